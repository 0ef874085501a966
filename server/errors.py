"""One tree of the errors that reach a person.

    OneheadError
    |-- ConfigurationError     exit 78   option, file or checkpoint that cannot be served
    |-- UsageError             exit 2    a file given to a command that is not what it takes
    |-- ResourceError          exit 71   port or memory that cannot be had
    |-- EngineGaveUp           exit 70   the engine cannot be kept alive
    `-- RequestError           an answer other than 200, in the dialect of its route
        |-- Unauthorized       401   no key, or a wrong one
        |-- StreamExpired      410   a resumable stream that is not kept any more
        |-- StreamCancelled    409   a resumable stream that was ended before its time (only ever an event)
        |-- Conflict           409   a second request under the Idempotency-Key of one that runs
        |-- MalformedBody      400   not UTF-8, not JSON, not an object, a key twice
        |-- UnsupportedMedia   415   not application/json, or encoded
        |-- BodyTooLarge       413
        |-- InvalidRequest     422   a field that is unknown, of the wrong type or out of bounds (400 in OpenAI's dialect)
        |-- NotFound           404   a model that is not served here, a stream that there is not
        |-- Overloaded         429   with Retry-After
        |-- GenerationFailed   424   the engine could not finish this request (500 in OpenAI's dialect)
        |-- Unavailable        503   starting, restarting or shutting down
        `-- QueueTimeout       504   its own time limit was over before its turn came

Catch broadly at the root, recover narrowly at the leaves. Messages name the field, the bound and what to do, and never hold text of
a prompt, a path of the server or a traceback.
"""


class OneheadError(Exception):
    """Root. `exit_code` is the process's where the error ends it."""

    exit_code = 70


class ConfigurationError(OneheadError):
    exit_code = 78


class UsageError(OneheadError):
    exit_code = 2


class ResourceError(OneheadError):
    exit_code = 71


class EngineGaveUp(OneheadError):
    exit_code = 70


class RequestError(OneheadError):
    """`status` and `tgi_type` are TGI's dialect, `openai_status` (where it differs) and `openai_type` OpenAI's. `retry_after` is in
    seconds, where waiting helps; `param` the field at fault; `code` a word for programs to read. With a `tgi_type` of None TGI's clients
    go by the status.
    """

    status = 500
    openai_status: int | None = None
    tgi_type: str | None = "generation"
    openai_type = "InternalServerError"

    def __init__(self, message: str, retry_after: int | None = None, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.param = param
        self.code = code


class MalformedBody(RequestError):
    status, tgi_type, openai_type = 400, "validation", "BadRequestError"


class UnsupportedMedia(RequestError):
    status, tgi_type, openai_type = 415, "validation", "BadRequestError"


class BodyTooLarge(RequestError):
    status, tgi_type, openai_type = 413, "validation", "BadRequestError"


class InvalidRequest(RequestError):
    status, openai_status, tgi_type, openai_type = 422, 400, "validation", "BadRequestError"


class NotFound(RequestError):
    status, tgi_type, openai_type = 404, None, "NotFoundError"


class Unauthorized(RequestError):
    status, tgi_type, openai_type = 401, "authentication", "AuthenticationError"


class Conflict(RequestError):
    status, tgi_type, openai_type = 409, "validation", "ConflictError"


class StreamCancelled(RequestError):
    status, tgi_type, openai_type = 409, "cancelled", "Cancelled"


class StreamExpired(RequestError):
    status, tgi_type, openai_type = 410, "validation", "NotFoundError"


class Overloaded(RequestError):
    status, tgi_type, openai_type = 429, "overloaded", "RateLimitError"


class GenerationFailed(RequestError):
    status, openai_status, tgi_type = 424, 500, "generation"


class Unavailable(RequestError):
    status, tgi_type, openai_type = 503, "healthcheck", "Service Unavailable"


class QueueTimeout(RequestError):
    status, tgi_type, openai_type = 504, "overloaded", "TimeoutError"
