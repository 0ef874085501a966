"""`onehead generate`: the service without HTTP, for one prompt, to the terminal."""

import secrets
import sys

from pydantic import Field
from pydantic_settings import CliPositionalArg

from server import protocol
from server.config import EngineSettings, ServerSection
from server.errors import InvalidRequest, RequestError
from server.generation.request import Request
from server.service import running_engine
from server.text.jobs import Encode

EXIT_USAGE = 2


class GenerateSettings(EngineSettings):
    """onehead generate: stream the continuation of a prompt to the terminal."""

    prompt: CliPositionalArg[str] = Field(description="text to go on from")
    max_new_tokens: int = Field(128, ge=1, description="most tokens to generate")
    temperature: float = Field(0.0, ge=0, le=2, description="0 takes the likeliest token each time")
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that hold this probability")
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the draws; default: a new one each time")
    stop: str | None = Field(None, min_length=1, description="end at this text")


async def generate(settings: GenerateSettings) -> int:
    """Prints prompt and continuation as it comes; the exit status."""
    async with running_engine(settings, ServerSection(log_level="warning")) as engine:
        sampling = protocol.Sampling(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=secrets.randbits(63) if settings.seed is None else settings.seed,
        )
        try:
            prompt = await engine.generation.tokenize(Encode(settings.prompt), "onehead generate")
            request = Request(prompt, sampling, settings.max_new_tokens, stop_strings=(settings.stop,) if settings.stop else ())
            pieces = engine.generation.start([request], engine.client.reserve("onehead generate"))
            sys.stdout.write(settings.prompt)
            async for piece in pieces:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except RequestError as error:
            print(f"onehead generate: {error.message.replace('`inputs`', 'prompt')}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, InvalidRequest) else error.exit_code
        sys.stdout.write("\n")
    return 0
