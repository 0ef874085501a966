"""The OpenAPI document and its page: every field is described, every example is answered, and every
answer is as documented.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import jsonschema
import msgspec
import pytest
import requests

from server import errors
from server.config import ServerSection, ServeSettings, load
from server.errors import ConfigurationError
from server.http.errors import OPENAI
from server.http.routes import Access
from tests.conftest import CHAT_TEMPLATE
from tests.support.bad_inputs import KEY_HASHES, KEYS
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, Served, serve
from tests.support.processes import ServerProcess

PREFIX = "/llm"
KEYED = ServerSection.model_validate(
    {"api_keys": KEY_HASHES, "metrics_key": KEY_HASHES.partition(",")[0], "max_body_bytes": 4096}
)
KEY = {"authorization": f"Bearer {KEYS[0]}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with fill-in-the-middle tokens, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261).save(
        str(folder / "tokenizer.json")
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@asynccontextmanager
async def door(
    folder: Path, section: ServerSection | None = None
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """The application over a fake engine that is ready, and a client of it."""
    served = serve(
        folder,
        FakeEngine(msgspec.structs.replace(READY, vocab_size=261, max_context=512, capacity=512)),
        section,
    )
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        yield served, http


async def read_document(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/openapi.json", headers=KEY)
    assert response.status_code == 200
    return dict(response.json())


@pytest.fixture
async def document(folder: Path) -> dict[str, Any]:
    """The document of a server without keys."""
    async with door(folder) as (_, http):
        return await read_document(http)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def examples(document: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """(path, name, body) of every example."""
    return [
        (path, name, example["value"])
        for path, method, operation in operations(document)
        if method == "post"
        for name, example in operation["requestBody"]["content"]["application/json"][
            "examples"
        ].items()
    ]


def first_example(document: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(next(body for route, _, body in examples(document) if route == path))


def properties(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of every field within a schema."""
    for key, value in (
        schema.items()
        if isinstance(schema, dict)
        else enumerate(schema)
        if isinstance(schema, list)
        else ()
    ):
        if key == "properties":
            for name, field in value.items():
                yield f"{path}.{name}", field
                yield from properties(field, f"{path}.{name}")
        else:
            yield from properties(value, path)


def keywords(schema: Any) -> set[str]:
    """The keywords of a field's schema and of its alternatives and items."""
    inner = [
        *schema.get("anyOf", ()),
        *(
            schema[key]
            for key in ("items", "additionalProperties")
            if isinstance(schema.get(key), dict)
        ),
    ]
    return set(schema).union(*map(keywords, inner))


def resolve(document: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Resolves a `$ref`; returns any other value unchanged."""
    while "$ref" in value:
        found: Any = document
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        value = found
    return value


def references(value: Any) -> Iterator[str]:
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        if key == "$ref":
            yield item
        yield from references(item)


def closed(value: Any) -> Any:
    """A schema whose objects have no properties but the documented ones."""
    if isinstance(value, list):
        return [closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: closed(item) for key, item in value.items()} | (
        {"additionalProperties": False} if "properties" in value else {}
    )


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raises where a value is not as a schema of the document says, or has fields that it does not
    mention.
    """
    jsonschema.Draft202012Validator(
        closed(schema) | {"components": closed(document["components"])}
    ).validate(value)


def events(text: str) -> Iterator[dict[str, Any]]:
    """The fields of each event of a stream."""
    for lines in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in lines.splitlines() if not line.startswith(":")
        )
        if fields:
            yield fields | ({"retry": int(fields["retry"])} if "retry" in fields else {})


def check_event(document: dict[str, Any], schema: dict[str, Any], event: dict[str, Any]) -> None:
    """Raises where an event is not as its schema says, which is that of an event and not of its
    data, or its data is not.
    """
    check(document, schema, event)
    resolved = resolve(document, schema)
    kinds = [
        resolve(document, kind)["properties"]["data"] for kind in resolved.get("anyOf", [resolved])
    ]
    contents = [
        text["contentSchema"]
        for kind in kinds
        for text in kind.get("anyOf", [kind])
        if "contentSchema" in text
    ]
    assert contents
    if event["data"] != "[DONE]":
        check(document, {"anyOf": contents}, json.loads(event["data"]))


def check_reply(
    document: dict[str, Any], operation: dict[str, Any], response: httpx.Response
) -> None:
    """Raises where a status is not documented, or a body or an event is not as documented."""
    documented = resolve(document, operation["responses"][str(response.status_code)])
    kind = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][kind]["schema"]
    if kind == "text/event-stream":
        for event in events(response.text):
            check_event(document, schema, event)
    elif kind == "application/json":
        check(document, schema, response.json())
    if kind != "text/event-stream":
        assert {name.lower() for name in documented.get("headers", {})} - {"x-stream-id"} <= set(
            response.headers
        )


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    """By the OpenAPI 3.1 meta-schema, and every reference leads somewhere."""
    import schemathesis

    schemathesis.openapi.from_dict(document).validate()
    for reference in references(document):
        assert resolve(document, {"$ref": reference})
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_tools_read_streams_as_events(
    document: dict[str, Any], embedded_server: ServerProcess
) -> None:
    """Schemathesis validates events that a server sends, and finds what is none of the documented
    ones.
    """
    import schemathesis
    from schemathesis.core.transport import Response

    schema = schemathesis.openapi.from_dict(document)
    asked: dict[str, dict[str, Any]] = {
        "/generate_stream": {"inputs": "def f", "parameters": {"max_new_tokens": 3}},
        "/v1/completions": {
            "prompt": "def f",
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "resumable": True,
        },
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
        },
        "/fim/completions": {
            "prompt": "def f",
            "suffix": "x",
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
        },
        "/completion": {"prompt": "def f", "n_predict": 3, "temperature": 0, "stream": True},
        "/infill": {
            "input_prefix": "def f",
            "input_suffix": "x",
            "n_predict": 3,
            "temperature": 0,
            "stream": True,
        },
    }
    for path, body in asked.items():
        with httpx.Client(base_url=f"http://127.0.0.1:{embedded_server.port}", timeout=60) as http:
            answer = http.post(path, json=body)
        assert answer.status_code == 200 and answer.text.count("data: ") >= 3, answer.text

        def validated(text: str, path: str = path) -> None:
            request = requests.Request("POST", f"http://test{path}").prepare()
            headers = {"content-type": ["text/event-stream"]}
            response = Response(
                200, headers, text.encode(), request, 0.1, False, message="OK", http_version="1.1"
            )
            schema[path]["POST"].validate_response(response)

        validated(answer.text)
        for other in ("data: 1\n\n", "data: x\n\n", "data: []\n\n"):
            with pytest.raises(Exception, match="SSE event"):
                validated(answer.text + other)


def test_every_operation_has_a_summary(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        assert 10 < len(operation["summary"]) < 80 and "\n" not in operation["summary"], (
            path,
            method,
        )
        assert (
            operation["responses"].keys() & {"200", "204"} and "default" in operation["responses"]
        ), (path, method)


def test_every_field_has_a_description(document: dict[str, Any]) -> None:
    fields = [
        found
        for name, schema in document["components"]["schemas"].items()
        for found in properties(schema, name)
    ]
    fields += [
        (path, parameter)
        for path, _, op in operations(document)
        for parameter in op.get("parameters", [])
    ]
    assert len(fields) > 300
    assert not [
        path
        for path, field in fields
        if len(resolve(document, field).get("description", field.get("description", ""))) < 9
    ]


def test_every_optional_field_of_a_request_says_what_its_absence_means(
    document: dict[str, Any],
) -> None:
    """The description of a number or a boolean states its default, or that the field has no effect,
    or that another field decides.
    """
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for _, _, operation in operations(document)
        if "requestBody" in operation
    ]
    names = {body["$ref"].rpartition("/")[2] for body in bodies} | {"Parameters", "StreamOptions"}
    said = ("efault", "changes nothing", "only false", "not supported", "newer name")
    for name in names:
        schema = document["components"]["schemas"][name]
        for field, value in schema["properties"].items():
            kinds = {kind.get("type") for kind in value.get("anyOf", ())}
            if field not in schema.get("required", ()) and kinds & {"integer", "number", "boolean"}:
                assert any(words in value["description"] for words in said), (name, field)


def test_bounds_and_kinds_of_fields_that_take_several(document: dict[str, Any]) -> None:
    """Fields that are converted before they are checked show what is accepted, not what it
    becomes.
    """
    schemas = document["components"]["schemas"]
    unknown = {"ge", "gt", "le", "lt"}  # What pydantic writes for a bound that it cannot express.
    assert not [
        path
        for name, schema in schemas.items()
        for path, field in properties(schema, name)
        if unknown & keywords(field)
    ]

    def accepted(name: str, field: str, value: Any) -> bool:
        schema = schemas[name]["properties"][field] | {"components": document["components"]}
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))

    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2]]):
        assert accepted("CompletionBody", "prompt", prompt)
    assert not accepted("CompletionBody", "prompt", 1) and not accepted(
        "CompletionBody", "prompt", [-1]
    )
    assert (
        accepted("ChatBody", "stop", "a")
        and accepted("ChatBody", "stop", ["a"])
        and not accepted("ChatBody", "stop", "")
    )
    assert accepted("Message", "content", "a") and accepted(
        "Message", "content", [{"type": "text", "text": "a"}]
    )
    for seed, good in ((2**63 - 1, True), (2**63, False), (-2, False)):
        assert accepted("ChatBody", "seed", seed) == good


def test_numbers_of_examples_are_exact_in_a_browser(document: dict[str, Any]) -> None:
    """JavaScript rounds integers above 2**53: a page that makes up a seed from its bounds sends one
    that is refused.
    """
    for number in re.findall("[0-9]{10,}", json.dumps([body for _, _, body in examples(document)])):
        assert int(number) < 2**53
    for name, schema in document["components"]["schemas"].items():
        for field, value in properties(schema, name):
            large = [
                kind for kind in value.get("anyOf", ()) if kind.get("exclusiveMaximum", 0) > 2**53
            ]
            assert all(
                0 <= kind.get("examples", value.get("examples"))[0] < 2**53 for kind in large
            ), field


def test_every_example_is_answered_as_documented(embedded_server: ServerProcess) -> None:
    """By a server on the embedded model with a chat template, as the document has them."""
    with httpx.Client(base_url=f"http://127.0.0.1:{embedded_server.port}", timeout=60) as http:
        document = http.get("/openapi.json").json()
        posts = {path for path, method, _ in operations(document) if method == "post"}
        assert {path for path, _, _ in examples(document)} == posts
        for path, name, body in examples(document):
            response = http.post(path, json=body)
            assert response.status_code == 200, (path, name, response.text)
            check_reply(document, document["paths"][path]["post"], response)
        for path, method, operation in operations(document):
            if path == "/monitor":
                check_events(document, http)
            elif method == "get" and "stream_id" not in path:
                response = http.get(path.replace("{name}", "embedded"))
                assert response.status_code == 200, path
                check_reply(document, operation, response)


def check_events(document: dict[str, Any], http: httpx.Client) -> None:
    """Checks an event of each kind of /monitor, which never ends."""
    kinds = {"cache": "CacheEvent", "stats": "StatsEvent"}
    with http.stream("GET", "/monitor") as response:
        lines = response.iter_lines()
        while kinds:
            kind = next(line.removeprefix("event: ") for line in lines if line)
            event = {"event": kind, "data": next(lines).removeprefix("data: ")}
            check_event(document, {"$ref": "#/components/schemas/MonitorEvent"}, event)
            check(
                document,
                {"$ref": f"#/components/schemas/{kinds.pop(kind)}"},
                json.loads(event["data"]),
            )


# Fields that add to an answer: (path, fields beside those of its first example).
ADDING: list[tuple[str, dict[str, Any]]] = [
    (
        "/generate",
        {
            "parameters": {
                "decoder_input_details": True,
                "top_n_tokens": 2,
                "do_sample": True,
                "best_of": 2,
                "max_new_tokens": 3,
            }
        },
    ),
    ("/generate_stream", {"parameters": {"details": True, "top_n_tokens": 2, "max_new_tokens": 3}}),
    (
        "/v1/completions",
        {
            "logprobs": 2,
            "echo": True,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "max_tokens": 3,
        },
    ),
    (
        "/v1/completions",
        {
            "logprobs": 2,
            "return_token_ids": True,
            "stream": True,
            "resumable": True,
            "max_tokens": 3,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "logprobs": True,
            "top_logprobs": 2,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "max_tokens": 3,
        },
    ),
    (
        "/v1/chat/completions",
        {"logprobs": True, "return_token_ids": True, "stream": True, "max_tokens": 3},
    ),
    ("/tokenize", {"return_token_strs": True}),
    ("/tokenize", {"prompt": None, "inputs": None, "content": "a\u20ac", "with_pieces": True}),
    ("/completion", {"n_probs": 2, "return_tokens": True, "n_predict": 3}),
    ("/infill", {"n_probs": 2, "timings_per_token": True, "stream": True, "n_predict": 3}),
]


@pytest.mark.parametrize(("path", "fields"), ADDING, ids=str)
async def test_all_that_an_answer_may_have_is_documented(
    folder: Path, document: dict[str, Any], path: str, fields: dict[str, Any]
) -> None:
    async with door(folder) as (_, http):
        response = await http.post(path, json=first_example(document, path) | fields)
    assert response.status_code == 200, response.text
    check_reply(document, document["paths"][path]["post"], response)


Spoilt = tuple[dict[str, str], bytes | None]
# What is wrong: headers and body of the request, which is else the first example.
REFUSED: dict[str, Spoilt] = {
    "no JSON": ({}, b"{"),
    "no key": ({"authorization": ""}, None),
    "another type": ({"content-type": "text/plain"}, None),
    "too long": ({}, b" " * 5000),
    "an unknown field": ({}, b'{"unknown": 1}'),
    "draining": ({}, None),
    "full": ({}, None),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_every_refusal_is_documented(folder: Path, what: str) -> None:
    """On every route that takes a body: its status and the shape of the error."""
    headers, body = REFUSED[what]
    async with door(folder, KEYED) as (served, http):
        document = await read_document(http)
        served.client.admission.draining = what == "draining"
        served.client.admission.num_reserved = 10**6 * (what == "full")
        for path, method, operation in operations(document):
            if method == "post":
                content = (
                    json.dumps(first_example(document, path)).encode() if body is None else body
                )
                response = await http.post(
                    path,
                    content=content,
                    headers=KEY | {"content-type": "application/json"} | headers,
                )
                generates = served.app.table.find(path).generates  # type: ignore[union-attr]
                assert response.status_code != 200 or (
                    what in ("draining", "full") and not generates
                ), path
                check_reply(document, operation, response)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/fim/completions",
        "/apply-template",
        "/tokenize",
        "/detokenize",
    ],
)
async def test_another_model_is_documented(
    folder: Path, document: dict[str, Any], path: str
) -> None:
    async with door(folder) as (_, http):
        response = await http.post(path, json=first_example(document, path) | {"model": "another"})
    assert response.status_code == 404
    check_reply(document, document["paths"][path]["post"], response)


async def test_every_error_of_generation_is_documented(
    folder: Path, document: dict[str, Any]
) -> None:
    """By the statuses of the classes in errors.py, and 408, which the connection answers."""
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RequestError)
    }
    # Of streams, and of servers with keys.
    kinds -= {
        errors.StreamCancelled,
        errors.StreamExpired,
        errors.Unauthorized,
    }
    # Of every route, for requests that were meant for another host.
    kinds -= {errors.HostNotAllowed}
    async with door(folder) as (served, _):
        generating = [
            route.path for route in served.app.table.routes if route.generates and route.tag
        ]
    for path in generating:
        openai = served.app.table.dialect(path) is OPENAI
        named = kinds if path.startswith(("/v1/", "/fim/")) else kinds - {errors.NotFound}
        statuses = {(kind.openai_status if openai else None) or kind.status for kind in named}
        documented = set(document["paths"][path]["post"]["responses"])
        assert documented == {"200", "408", "default", *map(str, statuses)}, path


async def test_a_key_is_documented_where_one_is_needed(
    folder: Path, document: dict[str, Any]
) -> None:
    assert "securitySchemes" not in document["components"]
    assert not [
        path
        for path, _, operation in operations(document)
        if "security" in operation or "401" in operation["responses"]
    ]
    async with door(folder, KEYED) as (served, http):
        assert (await http.get("/openapi.json")).status_code == 401
        keyed = await read_document(http)
        assert keyed["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
        for path, method, operation in operations(keyed):
            refused = (await http.request(method, path)).status_code == 401
            route = served.app.table.find(path)
            needs_key = route is not None and route.access is not Access.PUBLIC
            assert (
                refused
                == ("security" in operation)
                == ("401" in operation["responses"])
                == needs_key
            ), path


@pytest.mark.parametrize("passed_on", [True, False])
async def test_the_page_below_a_prefix(folder: Path, passed_on: bool) -> None:
    """As a browser resolves its URLs, for a proxy that passes the prefix on and for one that
    removes it.
    """
    public = f"http://public{PREFIX}/"

    def inside(url: str) -> str:
        assert url.startswith(public), url
        return url.removeprefix("http://public" if passed_on else public.rstrip("/"))

    async with door(folder, ServerSection(root_path=PREFIX) if passed_on else None) as (_, http):
        page = (await http.get(inside(f"{public}docs"))).text
        found = re.findall(r"""(?:src|href)="([^"]+)"|url: '([^']+)'""", page)
        urls = [urljoin(f"{public}docs", "".join(groups)) for groups in found]
        assert len(urls) == 4
        for url in urls:
            assert (await http.get(inside(url))).status_code == 200, url
        document = (await http.get(inside(urls[-1]))).json()
        base = urljoin(urls[-1], document["servers"][0]["url"]).rstrip("/")
        for path, _, body in examples(document):
            assert (await http.post(inside(base + path), json=body)).status_code == 200, path


async def test_a_prefix_opens_no_door(folder: Path) -> None:
    """The path without server.root_path decides whether a key is needed; a path that only resembles
    the prefix is not stripped.
    """
    async with door(folder, KEYED.model_copy(update={"root_path": PREFIX})) as (_, http):
        for path, with_key, without in (
            ("/llm/live", 200, 200),
            ("/live", 200, 200),
            ("/llm/info", 200, 401),
            ("/info", 200, 401),
            ("/llmlive", 404, 401),
            ("/llm/llm/live", 404, 401),
            ("/live/llm", 404, 401),
        ):
            assert (await http.get(path, headers=KEY)).status_code == with_key, path
            assert (await http.get(path)).status_code == without, path
        for path in ("/llm", "/llm/", "/"):
            assert (await http.post(path, json={"inputs": "a"}, headers=KEY)).status_code == 200, (
                path
            )


def test_the_prefix_is_a_path() -> None:
    assert (
        load(ServeSettings, ["--server.root_path", "/a/b"], "onehead serve").server.root_path
        == "/a/b"
    )
    for bad in ("llm", "/llm/", "/", "http://x/llm", "/a b"):
        with pytest.raises(ConfigurationError, match=r"server\.root_path"):
            load(ServeSettings, ["--server.root_path", bad], "onehead serve")
