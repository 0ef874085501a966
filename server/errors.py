"""One tree of the errors that reach a person.

    OneheadError
    |-- ConfigurationError     exit 78   option, file or checkpoint that cannot be served
    |-- ResourceError          exit 71   port or memory that cannot be had
    |-- EngineGaveUp           exit 70   the engine cannot be kept alive
    `-- RequestError           an answer other than 200, in the dialect of its route
        |-- MalformedBody      400   not UTF-8, not JSON, not an object, a key twice
        |-- UnsupportedMedia   415   not application/json, or encoded
        |-- BodyTooLarge       413
        |-- InvalidRequest     422   a field that is unknown, of the wrong type or out of bounds
        |-- Overloaded         429   with Retry-After
        |-- GenerationFailed   424   the engine could not finish this request
        `-- Unavailable        503   starting, restarting or shutting down

Catch broadly at the root, recover narrowly at the leaves. Messages name the field, the bound and what to do, and never hold text of
a prompt, a path of the server or a traceback.
"""


class OneheadError(Exception):
    """Root. `exit_code` is the process's where the error ends it."""

    exit_code = 70


class ConfigurationError(OneheadError):
    exit_code = 78


class ResourceError(OneheadError):
    exit_code = 71


class EngineGaveUp(OneheadError):
    exit_code = 70


class RequestError(OneheadError):
    """`status` is HTTP's, `tgi_type` what TGI's dialect calls it, `retry_after` seconds where waiting helps."""

    status = 500
    tgi_type = "generation"

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class MalformedBody(RequestError):
    status, tgi_type = 400, "validation"


class UnsupportedMedia(RequestError):
    status, tgi_type = 415, "validation"


class BodyTooLarge(RequestError):
    status, tgi_type = 413, "validation"


class InvalidRequest(RequestError):
    status, tgi_type = 422, "validation"


class Overloaded(RequestError):
    status, tgi_type = 429, "overloaded"


class GenerationFailed(RequestError):
    status, tgi_type = 424, "generation"


class Unavailable(RequestError):
    status, tgi_type = 503, "healthcheck"
