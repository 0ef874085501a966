"""The tree of errors that users and clients see.

    OneheadError
    |-- ConfigurationError     exit 78   invalid option, file or checkpoint
    |-- UsageError             exit 2    a command was given a wrong file
    |-- ResourceError          exit 71   port or memory is not available
    |-- EngineGaveUp           exit 70   the engine keeps crashing
    `-- RequestError           an HTTP error, in the dialect of its route
        |-- Unauthorized       401   no API key, or an invalid one
        |-- HostNotAllowed     403   a Host header that this server does not answer to
        |-- StreamExpired      410   a resumable stream that is no longer kept
        |-- StreamCancelled    409   a resumable stream that was cancelled (sent only as an event)
        |-- Conflict           409   the Idempotency-Key of a request that is still running
        |-- MalformedBody      400   not UTF-8, not JSON, or not an object
        |-- UnsupportedMedia   415   not application/json, or with a Content-Encoding
        |-- BodyTooLarge       413
        |-- InvalidRequest     422   a field that cannot be served as it is (400 in OpenAI's dialect)
        |-- NotFound           404   an unknown model or stream
        |-- Overloaded         429   with Retry-After
        |-- GenerationFailed   424   the engine could not finish it (500 in OpenAI's dialect)
        |-- Unavailable        503   starting, restarting or shutting down
        `-- QueueTimeout       504   the request's time limit passed while it was queued

The entry points of commands and routes catch OneheadError; other code catches a subclass only where
it can do something about it. Invariant: a message names the field or option, the bound and what to
do; that of a RequestError never contains prompt text, a path on the server or a traceback.
"""  # noqa: E501

MAX_LINE_CHARS = 2000


def escaped(text: str) -> str:
    """A text with what cannot be printed as Python writes it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(error: BaseException) -> str:
    """A message as one printable line: what it quotes from a file may contain anything, and be of
    any length.
    """
    line = escaped(str(error)[:MAX_LINE_CHARS])
    return line if len(str(error)) <= MAX_LINE_CHARS else f"{line}..."


TOO_COMPLEX = "the grammar became too complex to continue"


class ConstraintFailed(Exception):
    """A constraint cannot continue: the request is at fault, or something unexpected happened. The
    message is shown to the client.
    """

    def __init__(self, message: str, refused: bool = True) -> None:
        super().__init__(message)
        self.refused = refused


class OneheadError(Exception):
    """Root of the tree. `exit_code` is the exit status of a process that the error ends."""

    exit_code = 70


class ConfigurationError(OneheadError):
    exit_code = 78


class UsageError(OneheadError):
    exit_code = 2


class ResourceError(OneheadError):
    exit_code = 71


class EngineGaveUp(OneheadError):
    """The engine keeps crashing."""


class RequestError(OneheadError):
    """An error answered over HTTP. TGI's dialect uses `status` and `tgi_type` (None: clients go by
    the status), OpenAI's `openai_status` if it differs and `openai_type`. `retry_after` is in
    seconds, `param` the field at fault, `code` machine-readable.
    """

    status = 500
    openai_status: int | None = None
    tgi_type: str | None = "generation"
    openai_type = "InternalServerError"

    def __init__(
        self,
        message: str,
        retry_after: int | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
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


class BadSize(InvalidRequest):
    """A prompt or an answer of a wrong size. The message names fields as TGI does, in every
    dialect.
    """


TOO_LONG = "context_length_exceeded"
"""The code of what the context does not hold, by which OpenAI's clients know it."""


class TooLongPrompt(BadSize):
    """A prompt that the context does not hold: its tokens (at least so many, if it has not been
    tokenized), and the most that one may have.
    """

    def __init__(self, message: str, num_tokens: int, most: int) -> None:
        super().__init__(message, param="inputs", code=TOO_LONG)
        self.num_tokens = num_tokens
        self.most = most


class NotFound(RequestError):
    status, tgi_type, openai_type = 404, None, "NotFoundError"


class Unauthorized(RequestError):
    status, tgi_type, openai_type = 401, "authentication", "AuthenticationError"


class HostNotAllowed(RequestError):
    status, tgi_type, openai_type = 403, "authentication", "PermissionDeniedError"


class Conflict(RequestError):
    status, tgi_type, openai_type = 409, "validation", "ConflictError"


class StreamCancelled(RequestError):
    status, tgi_type, openai_type = 409, "cancelled", "Cancelled"


class StreamExpired(RequestError):
    status, tgi_type, openai_type = 410, "validation", "NotFoundError"


class Overloaded(RequestError):
    status, tgi_type, openai_type = 429, "overloaded", "RateLimitError"


class GenerationFailed(RequestError):
    status, openai_status = 424, 500


class Unavailable(RequestError):
    status, tgi_type, openai_type = 503, "healthcheck", "Service Unavailable"


class QueueTimeout(RequestError):
    status, tgi_type, openai_type = 504, "overloaded", "TimeoutError"
