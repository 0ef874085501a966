"""Every option, typed, with its bounds; the only module that reads options from argv, the
environment and TOML files.

Precedence: command line, then ONEHEAD_SECTION__OPTION, then the file given by --config, then the
defaults below. A key that is not an option is an error that names it, wherever it stands. Each
component is handed its own section and sees no other.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from server.command_line import command_line, nearest
from server.errors import ConfigurationError
from server.option_types import Digest, Digests, File, Networks, Origins, Seconds, Size, Words

PREFIX = "ONEHEAD_"
_SERVICE_VARIABLE = re.compile(
    PREFIX + r"(\w+_)?(SERVICE_HOST=[\w.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_[A-Z]+)?=[a-z]+://\S+"
    r"|PORT_\d+_[A-Z]+_(PROTO=[a-z]+|PORT=\d+|ADDR=[\w.:]+))"
)
"""NAME=value of the variables that Kubernetes sets in each pod for a Service called onehead or
onehead-..."""
EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "model" / "pretrained"


class Section(BaseModel):
    """Base of the sections: frozen, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSection(Section):
    model_name: str | None = Field(
        None,
        description="the model's name in replies; default: the repository, or the folder's base "
        "name",
    )
    served_model_names: Words = Field(
        (),
        description="further names of the model for requests on /v1, which /v1/models lists",
    )
    chat_template: File | None = Field(
        None,
        description="file of a chat template, in Jinja, that is used in place of the checkpoint's",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines shown"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="log lines for people, or one JSON object each"
    )
    log_prompts: bool = Field(False, description="log the text of prompts")
    api_keys: Digests = Field(
        (),
        description="SHA-256 digests, in hex, of the accepted keys; each request must have one of "
        "the keys; default: none is needed",
    )
    api_keys_file: File | None = Field(
        None,
        description="TOML file of keys, each a [[key]] table with its `name`, `sha256` and "
        "limits; SIGHUP has it read again",
    )
    tls_certificate: File | None = Field(
        None,
        description="PEM file of the certificate chain, for HTTPS instead of HTTP; SIGHUP has it "
        "read again",
    )
    tls_key: File | None = Field(
        None, description="PEM file of the certificate's key, without a password"
    )
    metrics_key: Digest | None = Field(
        None, description="SHA-256 digest of the key to /metrics; default: none is needed"
    )
    metrics_aliases: bool = Field(
        False,
        description="show metrics under vLLM's names too, with the label model_name, for "
        "dashboards and autoscalers made for vLLM",
    )
    tracing_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]\S*$",
        description="base URL, like http://localhost:4318, of an OpenTelemetry collector that "
        "gets a trace of each request by OTLP over HTTP; needs onehead[tracing]; default: none",
    )
    kv_events: str = Field(
        "",
        description="address, like tcp://*:5557, where ZeroMQ publishes in vLLM's format which "
        "prefixes are cached; needs onehead[events]; default: none",
    )
    kv_events_replay: str = Field(
        "",
        description="address, like tcp://*:5558, where missed KV events are sent again; default: "
        "none",
    )
    kv_events_topic: str = Field(
        "", description="topic of KV events; llm-d expects kv@POD_IP@MODEL; default: empty"
    )
    trusted_proxies: Networks = Field(
        (),
        description="addresses, like 10.0.3.7, or networks of the proxies whose X-Forwarded-For "
        "names the client; default: none is believed",
    )
    root_path: str = Field(
        "",
        pattern="^(/[^/ ]+)*$",
        description="path prefix, like /llm, that a reverse proxy passes on; none where it "
        "removes the prefix",
    )
    allowed_hosts: Words = Field(
        (),
        description="names and addresses, without a port, that the Host header may have beside "
        "localhost and loopback addresses; default: where the server listens on a loopback "
        "address alone, no others; elsewhere any",
    )
    cors_origins: Origins = Field(
        (),
        description="origins whose pages may call, like https://app.example; * for all; default: "
        "none",
    )
    ui: bool = Field(
        True,
        description="serve pages for people: the playground and its map of the KV cache",
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        le=100_000,
        description="sequences (choices of requests) that may wait beyond engine.max_running; "
        "more get 429",
    )
    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="open connections; more get 503"
    )
    max_body_bytes: int = Field(
        2 * 2**20, ge=1024, le=2**30, description="longest request body; longer ones get 413"
    )
    strict_fields: bool = Field(
        False,
        description="true: refuse every unknown field of a request; false: ignore it and say so in "
        "x-onehead-ignored, unless it is a typing error or would change the answer",
    )
    keep_alive: Seconds = Field(
        15.0, description="seconds of silence in a stream before a comment is sent"
    )
    stall_after: Seconds = Field(
        10.0, description="seconds without progress after which an engine is replaced"
    )
    drain_timeout: float = Field(
        60.0, ge=0, le=3600, description="seconds that running streams get to finish at shutdown"
    )
    lb_grace: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="seconds after SIGTERM in which late requests still get a 503",
    )
    resume_retention: float = Field(
        60.0, ge=0, le=86400, description="seconds that a resumable stream is kept after its end"
    )
    detach_grace: float = Field(
        30.0, ge=0, le=86400, description="seconds that a resumable stream goes on without a reader"
    )
    journal: File | None = Field(
        None,
        description="folder that keeps resumable streams as files, with which the next server "
        "goes on. They hold prompts and answers",
    )

    @model_validator(mode="after")
    def _options_are_complete(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key are needed together")
        if (self.kv_events_replay or self.kv_events_topic) and not self.kv_events:
            raise ValueError("kv_events_replay and kv_events_topic need kv_events")
        return self


class EngineSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights and cache, on a GPU also of arithmetic, which is float32 on a CPU; "
        "auto: bfloat16 on a GPU; on a CPU weights as the checkpoint stores them and a float32 "
        "cache, with the results of float32 bit for bit",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="weights in fewer bits, and on a CPU activations in 8; auto: none, but on a "
        "CPU with engine.dtype auto a GGUF file's "
        "quantized matrices as they are, Q4_0, Q4_1 and Q4_K in int4 and others in int8; int8: a "
        "scale for each block of 32 inputs; int4: a scale and a minimum for each",
    )
    deterministic: bool = Field(
        False,
        description="batch-invariant, the same bits whatever else is computed: on a GPU by slower "
        "attention and matrix products; refused where it cannot be had",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads; default: OMP_NUM_THREADS, else the processors that may be used "
        "(affinity, CPU quota)",
    )
    max_context: int | None = Field(
        None,
        ge=1,
        description="most tokens of prompt and output; default: the checkpoint's positions",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences computed together; default: 64 on a CPU, 256 on a GPU, no more "
        "than step_tokens",
    )
    step_tokens: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="most tokens computed in one step; at least max_running; default: 512 on a "
        "CPU, 4096 on a GPU, or max_running if that is more",
    )
    speculation: Literal["none", "ngram", "draft"] = Field(
        "none",
        description="guess tokens and check several in one step. ngram: from the text so far; "
        "draft: by engine.draft, while that is faster; no output changes where kernels are "
        "batch-invariant, elsewhere the last bits may",
    )
    draft: Path | None = Field(
        None,
        description="smaller model with the same vocabulary, named as --model is, for "
        "engine.speculation draft, on a CPU; its cache takes an eighth of cache.memory",
    )

    @model_validator(mode="after")
    def _budget_covers_the_running(self) -> "EngineSection":
        if (
            self.step_tokens is not None
            and self.max_running is not None
            and self.step_tokens < self.max_running
        ):
            raise ValueError(
                f"step_tokens {self.step_tokens} must be at least max_running {self.max_running}"
            )
        if self.speculation == "draft" and self.draft is None:
            raise ValueError("speculation draft needs a model in draft")
        return self


class CacheSection(Section):
    dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto: engine.dtype; fp8: 8 bits, on GPUs from compute capability 8.9 on",
    )
    memory: Annotated[Size, Field(gt=0)] | None = Field(
        None,
        description="a share up to 1.0 of free memory, or bytes (2GiB); default: 0.4 on a CPU, "
        "0.9 on a GPU",
    )
    pages: int | None = Field(None, ge=1, description="exact number of pages, instead of memory")
    page_size: int = Field(
        64,
        ge=1,
        le=1024,
        description="tokens of a page; native kernels: a multiple of 16 on a CPU, a power of two "
        "from 16 on on a GPU",
    )
    disk: File | None = Field(
        None,
        description="folder that keeps the prefix cache as files, for later servers and others of "
        "this model; on a CPU. The files hold prompts and answers",
    )
    disk_size: Annotated[Size, Field(gt=1)] = Field(
        8.0 * 2**30,
        description="the most bytes of these files; the least recently used are removed",
    )


class EngineSettings(BaseSettings):
    """The options of every command that runs a model."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    model: Path = Field(
        EMBEDDED_MODEL,
        description="checkpoint folder, GGUF file, or org/name[@revision][:FILE.gguf] of the "
        "Hugging Face hub; default: the embedded model",
    )
    config: Path | None = Field(None, description="TOML file of options")
    engine: EngineSection = Field(EngineSection(), description="options of the engine process")
    cache: CacheSection = Field(CacheSection(), description="options of the KV cache")
    _given: str | None = PrivateAttr(None)

    @property
    def given(self) -> str:
        """The value of --model, also after `model` was replaced by the folder of the downloaded
        repository.
        """
        return self._given or str(self.model)

    def found_in(self, folder: Path, draft: Path | None = None) -> Self:
        """These settings with the folders of the checkpoints that --model and --engine.draft
        name.
        """
        engine = self.engine.model_copy(update={"draft": draft})
        found = self.model_copy(update={"model": folder, "engine": engine})
        found._given = self.given
        return found


def _check_host(value: str) -> str:
    """An empty host would listen on every interface."""
    if not value.strip():
        raise ValueError(
            "must be an address to listen on, like 127.0.0.1, 0.0.0.0 for every interface, or "
            "unix:PATH"
        )
    return value


class ServeSettings(EngineSettings):
    """onehead serve: a checkpoint on HTTP."""

    by_position: ClassVar[str] = "model"

    server: ServerSection = Field(ServerSection(), description="options of the HTTP server")
    host: Annotated[str, AfterValidator(_check_host)] = Field(
        "127.0.0.1",
        description="address to listen on, or unix:PATH for a Unix socket; a socket "
        "given by systemd goes first",
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")


class DeploymentFile(TomlConfigSettingsSource):
    """The TOML file. It is written for the server: other commands read it too, and ignore the
    options of `serve` that they lack.
    """

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if "config" in values:
            raise ConfigurationError("config: a file of options cannot name another")
        return {
            key: value
            for key, value in values.items()
            if key in self.settings_cls.model_fields or key not in ServeSettings.model_fields
        }


AnySettings = TypeVar("AnySettings", bound=BaseSettings)


def load(cls: type[AnySettings], argv: list[str], prog: str) -> AnySettings:
    """The settings of one command. Raises ConfigurationError naming the option; a flag that does
    not exist exits with status 2.
    """
    toml: Path | None = None

    class Loaded(cls):  # type: ignore[valid-type, misc]
        __doc__ = cls.__doc__

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            **_: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            # First, so that --help is answered whatever is wrong with the environment or the file.
            arguments = command_line(settings_cls, argv, prog)
            if not cls.model_config["env_prefix"]:
                return (arguments,)
            nonlocal toml
            if path := arguments().get("config") or os.environ.get(PREFIX + "CONFIG"):
                toml = Path(path)
            if toml is not None and not toml.is_file():
                raise ConfigurationError(f"--config {toml}: no such file")
            environment = EnvSettingsSource(settings_cls)
            environment.env_vars = {key.lower(): value for key, value in _variables(cls).items()}
            return arguments, environment, DeploymentFile(settings_cls, toml)

    try:
        return Loaded()
    except ValidationError as error:
        raise ConfigurationError(
            describe(error, {name: name for name in (*cls.model_fields, *_names(cls))}, toml)
        ) from error
    except (SettingsError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{toml}: {error}" if isinstance(error, ValueError) else str(error)
        ) from None


def describe(error: ValidationError, known: dict[str, str], file: Path | None = None) -> str:
    """What is wrong, option by option, in words that begin with the option; for one that does not
    exist, with its file and the nearest of the `known` names.
    """
    return "; ".join(
        _describe(detail, known, f"{file}: " if file else "") for detail in error.errors()
    )


def _describe(detail: Any, known: dict[str, str], place: str) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    # Only a file can hold one: other sources have been checked.
    if detail["type"] == "extra_forbidden":
        return f"{place}{key}: no such option{nearest(key, known)}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _variables(cls: type[BaseSettings]) -> dict[str, str]:
    """The environment variables that set options; those of a Kubernetes Service are left out.
    Raises ConfigurationError for a misspelt one, which the library would ignore.
    """
    names = [
        f"{PREFIX}{name.replace('.', '__')}".upper()
        for name in (*_names(ServeSettings), *_names(cls))
    ]
    known = {name: name for name in names}
    given = {
        key: value
        for key, value in os.environ.items()
        if key.upper().startswith(PREFIX) and _SERVICE_VARIABLE.fullmatch(f"{key}={value}") is None
    }
    unknown = sorted(key for key in given if key.upper() not in known)
    if unknown:
        raise ConfigurationError(
            f"environment variable {unknown[0]}: no such option{nearest(unknown[0].upper(), known)}"
        )
    return given


def _names(cls: type[BaseSettings]) -> Iterator[str]:
    """The names of all options, as they follow `--`."""
    for name, field in cls.model_fields.items():
        options: Iterable[str] = getattr(field.annotation, "model_fields", ())
        yield from [f"{name}.{option}" for option in options] or [name]


def cache_folder() -> Path:
    """The folder of caches, by the XDG convention. Raises ConfigurationError if there is neither
    XDG_CACHE_HOME nor a home folder.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(chosen) if chosen.startswith("/") else Path.home() / ".cache") / "onehead"
    except RuntimeError:
        raise ConfigurationError(
            "this user has no home folder to keep a cache in; set XDG_CACHE_HOME to a folder"
        ) from None
