"""`onehead generate`: the service without HTTP, for one prompt, to the terminal."""

import secrets
import sys

from pydantic import Field
from pydantic_settings import CliPositionalArg

from server import protocol
from server.config import Settings
from server.errors import RequestError
from server.generation import Request
from server.serve import running


class GenerateSettings(Settings):
    """onehead generate: stream the continuation of a prompt to the terminal."""

    prompt: CliPositionalArg[str] = Field(description="text to go on from")
    max_new_tokens: int = Field(128, ge=1, description="most tokens to generate")
    temperature: float = Field(0.0, ge=0, le=2, description="0 takes the likeliest token each time")
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that hold this probability")
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the draws; default: a new one each time")
    stop: list[str] = Field(default_factory=list, description="end at this text; may be given several times")


async def generate(settings: GenerateSettings) -> int:
    """Prints prompt and continuation as it comes; the exit status."""
    async with running(settings) as engine:
        sampling = protocol.SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=secrets.randbits(63) if settings.seed is None else settings.seed,
        )
        prompt = await engine.generation.encode(settings.prompt)
        request = Request(prompt, sampling, settings.max_new_tokens, stop_strings=tuple(settings.stop))
        sys.stdout.write(settings.prompt)
        try:
            async for piece in engine.generation.run(engine.generation.admit(request), request):
                if not piece.special:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        except RequestError as error:
            print(f"onehead generate: {error.message}", file=sys.stderr)
            return 1
        finally:
            sys.stdout.write("\n")
    return 0
