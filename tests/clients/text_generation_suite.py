"""TGI's own client: it posts to / and wants every field of `details`."""

import asyncio
from importlib.metadata import version

from check import run
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError


def generate(url: str) -> None:
    response = Client(url).generate(
        "def add(", max_new_tokens=6, decoder_input_details=True, top_n_tokens=2
    )
    assert response.details is not None and response.details.generated_tokens == 6
    assert len(response.details.prefill) == 3 and len(response.details.top_tokens) == 6


def generate_best_of(url: str) -> None:
    response = Client(url).generate("def add(", max_new_tokens=6, do_sample=True, best_of=2)
    assert len(response.details.best_of_sequences) == 1


def stream(url: str) -> None:
    whole = Client(url).generate("def add(", max_new_tokens=6)
    events = list(Client(url).generate_stream("def add(", max_new_tokens=6))
    assert (
        events[-1].generated_text == whole.generated_text
        and events[-1].details.finish_reason == "length"
    )


def asynchronous(url: str) -> None:
    async def work() -> str:
        client = AsyncClient(url)
        text = ""
        async for event in client.generate_stream("def add(", max_new_tokens=6):
            text += event.token.text
        return text

    assert asyncio.run(work()) == Client(url).generate("def add(", max_new_tokens=6).generated_text


def chat(url: str) -> None:
    answer = Client(url).chat(messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    assert answer.choices[0].message.role == "assistant" and answer.usage["completion_tokens"] == 5


def errors(url: str) -> None:
    try:
        Client(url).generate("x" * 30_000, max_new_tokens=1)
    except ValidationError:
        return
    raise AssertionError("no ValidationError")


run(
    "text-generation",
    version("text-generation"),
    [generate, generate_best_of, stream, asynchronous, chat, errors],
)
