"""Every list, text and object of every body has a bound, and lists fail at their first error,
instead of making an error for each item.
"""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from annotated_types import MaxLen
from pydantic import BaseModel, FailFast, ValidationError
from pydantic.fields import FieldInfo

from server.errors import RequestError
from server.http import body, fields
from server.http.anthropic.fields import CountBody, MessagesBody
from server.http.decisions.fields import DecisionBody, SystemBody
from server.http.llama_cpp.fields import InfillBody, LlamaCppCompletionBody
from server.http.mistral.fim import FimBody
from server.http.ollama import fields as ollama
from server.http.openai.chat_fields import ChatBody, TemplateBody
from server.http.openai.fields import CompletionBody
from server.http.responses.fields import ResponsesBody
from server.http.tgi.fields import GenerateBody
from server.http.token_fields import DetokenizeBody, TokenizeBody

BODIES: tuple[type[BaseModel], ...] = (
    CompletionBody,
    ChatBody,
    FimBody,
    InfillBody,
    LlamaCppCompletionBody,
    TemplateBody,
)
BODIES += (GenerateBody, TokenizeBody, DetokenizeBody, DecisionBody, SystemBody)
BODIES += (ollama.GenerateBody, ollama.ChatBody, ollama.ShowBody, ollama.PullBody)
BODIES += (MessagesBody, CountBody, ResponsesBody)
LONGEST = 2 * 2**20


def unbounded(annotation: Any, metadata: list[Any], name: str) -> Iterator[str]:
    """The parts of a type without a bound, in words."""
    flat = [
        part
        for each in metadata
        for part in (each.metadata if isinstance(each, FieldInfo) else [each])
    ]
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from unbounded(annotation.__origin__, [*flat, *annotation.__metadata__], name)
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from unbounded(part, flat, name)
    elif origin in (list, dict):
        yield from unbounded_items(annotation, flat, name)
    elif annotation is str and not any(isinstance(each, MaxLen) for each in flat):
        yield f"{name}: no max_length"
    elif annotation in (list, dict, tuple, set) or (
        annotation is Any and fields.ANY_JSON not in flat
    ):
        yield f"{name}: any value, which is not fields.Json"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unbounded_fields(annotation, name)


def unbounded_items(annotation: Any, metadata: list[Any], name: str) -> Iterator[str]:
    most = next((each.max_length for each in metadata if isinstance(each, MaxLen)), None)
    if most is None:
        yield f"{name}: no max_length"
    if get_origin(annotation) is list and most != 0 and FailFast(True) not in metadata:
        yield f"{name}: not fail_fast"
    for part in get_args(annotation):
        yield from unbounded(part, [], f"{name}[]")


def unbounded_fields(model: type[BaseModel], name: str) -> Iterator[str]:
    for field, info in model.model_fields.items():
        yield from unbounded(info.annotation, info.metadata, f"{name}.{field}")


@pytest.mark.parametrize("model", BODIES)
def test_every_list_text_and_object_has_a_bound(model: type[BaseModel]) -> None:
    assert not [*unbounded_fields(model, model.__name__)]


def test_the_walk_finds_what_has_no_bound() -> None:
    class Inner(BaseModel):
        texts: Annotated[list[str], MaxLen(0)] | None = None

    class Outer(BaseModel):
        free: str
        anything: Any
        inner: list[Inner] | None = None
        slow: Annotated[list[int], MaxLen(3)]
        named: dict[fields.Name, fields.Json]

    assert [*unbounded_fields(Outer, "o")] == [
        "o.free: no max_length",
        "o.anything: any value, which is not fields.Json",
        "o.inner: no max_length",
        "o.inner: not fail_fast",
        "o.inner[].texts[]: no max_length",
        "o.slow: not fail_fast",
        "o.named: no max_length",
    ]


@pytest.mark.parametrize(
    ("model", "head", "item", "tail"),
    [
        (CompletionBody, '{"prompt":"a","stop":[', '""', "]}"),
        (CompletionBody, '{"prompt":"a","stop":[', "1", "]}"),
        (InfillBody, '{"input_prefix":"","input_suffix":"","stop":[', "1", "]}"),
        (InfillBody, '{"input_prefix":"","input_suffix":"","samplers":[', "1", "]}"),
        (ChatBody, '{"messages":[{"role":"user","content":"a"}],"modalities":[', "1", "]}"),
        (ChatBody, '{"messages":[{"role":"user","content":[', "1", "]}]}"),
        (
            ChatBody,
            '{"messages":[',
            '{"role":"user",' + ",".join(f'"k{i}":1' for i in range(100)) + "}",
            "]}",
        ),
    ],
)
def test_an_error_is_the_first_one_and_no_more_are_made(
    model: type[BaseModel], head: str, item: str, tail: str
) -> None:
    count = min(
        (LONGEST - len(head) - len(tail)) // (len(item) + 1),
        body.MAX_VALUES // (1 + item.count(",")) - 4,
    )
    value = body.parse((head + ",".join([item] * count) + tail).encode())
    with pytest.raises(ValidationError) as raised:
        model.model_validate(value, strict=True)
    # Objects cannot fail fast: each of their keys may have an error.
    assert raised.value.error_count() <= fields.MAX_KEYS + 2


def test_values_are_counted_outside_of_texts() -> None:
    many = "1," * body.MAX_VALUES
    with pytest.raises(RequestError, match=f"more than {body.MAX_VALUES} values"):
        body.parse(f'{{"a":[{many}1,1]}}'.encode())
    assert body.parse(f'{{"a":"{many}","b":[1,2]}}'.encode())["b"] == [1, 2]
