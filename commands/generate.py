"""`onehead generate`: the service without HTTP, for one prompt or a chat, in the terminal."""

import asyncio
import secrets
import signal
import sys
from contextlib import suppress
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import CliImplicitFlag, CliPositionalArg

from server import protocol
from server.config import EngineSettings, ServerSection
from server.errors import InvalidRequest, RequestError, UsageError
from server.generation.request import Request, speeds
from server.service import SupervisedEngine, running_engine
from server.text.checkpoint_settings import CheckpointFiles
from server.text.conversation import ChatInput
from server.text.jobs import Encode, EncodeChat

EXIT_USAGE = 2
NAME = "onehead generate"
MAX_NEW_TOKENS = 128
DRAWS = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
"""Parameters that ask for sampling."""


class GenerateSettings(EngineSettings):
    """onehead generate: stream the continuation of a prompt to the terminal, or chat with the
    model.

    Text is sampled as the checkpoint's generation_config.json says; it is greedy where that says
    nothing. In a chat Ctrl-C ends the answer, and Ctrl-D the chat. Standard error gets the speed.
    """

    prompt: CliPositionalArg[str | None] = Field(
        None, description="text to go on from; with --chat the first message"
    )
    chat: CliImplicitFlag[bool] = Field(False, description="chat, by the model's chat template")
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description=f"most tokens to generate; default: {MAX_NEW_TOKENS}, with --chat what the "
        "context holds",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="0 takes the likeliest token each time; default: the checkpoint's",
    )
    top_k: int | None = Field(
        None,
        ge=0,
        description="draw from the k likeliest tokens; 0: from all; default: the checkpoint's",
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="draw from the likeliest tokens that hold this probability; default: the "
        "checkpoint's",
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=10, description="1 changes nothing; default: the checkpoint's"
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="of the draws; default: a new one each time"
    )
    stop: str | None = Field(None, min_length=1, description="end at this text")

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if self.prompt is None and not self.chat:
            raise UsageError("expected a PROMPT, or --chat")
        return self

    def sampling(self, files: CheckpointFiles) -> protocol.Sampling:
        """As given, else as the checkpoint says."""
        given = self.model_dump(include=DRAWS | {"repetition_penalty"}, exclude_none=True)
        by_default = bool(DRAWS & files.sampling_defaults.keys())
        if not DRAWS & given.keys() and not files.generation.get("do_sample", by_default):
            given["temperature"] = 0.0
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return protocol.Sampling(**(files.sampling_defaults | given), seed=seed)

    def request(self, prompt: list[int], sampling: protocol.Sampling) -> Request:
        """The request for the text after a prompt."""
        most = self.max_new_tokens or (None if self.chat else MAX_NEW_TOKENS)
        return Request(prompt, sampling, most, stop_strings=(self.stop,) if self.stop else ())


async def generate(settings: GenerateSettings) -> int:
    """Prints prompt and continuation as it comes, or a chat's answers; the exit status. Raises
    UsageError for a chat with a model that has no template.
    """
    files = CheckpointFiles(settings.model)
    if settings.chat and files.chat_template is None:
        raise UsageError(f"--chat: {settings.given} has no chat template; give a PROMPT without it")
    async with running_engine(settings, ServerSection(log_level="warning")) as engine:
        try:
            sampling = settings.sampling(files)
            if settings.chat:
                return await _chat(engine, settings, sampling)
            prompt = settings.prompt or ""
            ids = await engine.generation.tokenize(Encode(prompt), NAME)
            await _print(engine, settings.request(ids, sampling), [prompt])
        except RequestError as error:
            return _tell(error)
    return 0


def _tell(error: RequestError) -> int:
    """Prints an error; the exit status."""
    print(f"{NAME}: {error.message.replace('`inputs`', 'prompt')}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, InvalidRequest) else error.exit_code


async def _print(engine: SupervisedEngine, request: Request, texts: list[str]) -> None:
    """Prints `texts`, which what is generated is added to as it comes, and the speed at the end.
    Raises RequestError.
    """
    reservation = engine.client.reserve(NAME)
    try:
        pieces = engine.generation.start([request], reservation)
        try:
            sys.stdout.write("".join(texts))
            async for piece in pieces:
                texts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        finally:
            pieces.close()
            sys.stdout.write("\n")
            sys.stdout.flush()
            told, reason = speeds(pieces.choices), pieces.choices[0].outcome
            speed = "{output_tokens} tokens, {tokens_per_second} tokens/s".format(**told)
            first = "first after {ttft_ms} ms, prompt of {prompt_tokens}".format(**told)
            print(f"{speed}; {first}; finish reason: {reason}", file=sys.stderr)
    finally:
        reservation.close()


async def _chat(
    engine: SupervisedEngine, settings: GenerateSettings, sampling: protocol.Sampling
) -> int:
    """Answers each message, with those before it, to the end of the input; the exit status."""
    loop, status = asyncio.get_running_loop(), 0
    # While `input` waits it ends the chat.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    messages: list[dict[str, Any]] = []
    said = settings.prompt or _read()
    while said is not None:
        if said.strip():
            messages.append({"role": "user", "content": said})
            answer: list[str] = []
            try:
                job = EncodeChat(ChatInput(messages))
                ids = await engine.generation.tokenize(job, NAME)
                task = asyncio.ensure_future(
                    _print(engine, settings.request(ids, sampling), answer)
                )
                loop.add_signal_handler(signal.SIGINT, task.cancel)
                with suppress(asyncio.CancelledError):
                    await task
                messages.append({"role": "assistant", "content": "".join(answer)})
            except InvalidRequest as error:
                status = _tell(error)
                messages.pop()
            finally:
                loop.remove_signal_handler(signal.SIGINT)
        said = _read()
    return status


def _read() -> str | None:
    """The next line of the input; None at its end. The event loop waits meanwhile."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` edits lines with it)
    try:
        return input("> " if is_terminal else "")
    except EOFError:
        return None
