"""The names of the model that requests may use, and the name in replies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from server.config import ServeSettings, load
from server.errors import NotFound
from server.http.model_names import ModelNames
from tests.conftest import CHAT_TEMPLATE
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, serve


@pytest.mark.parametrize(
    ("given", "shown", "accepted"),
    [
        ("org/name", "org/name", ("org/name", "name")),
        ("org/name@v1", "org/name", ("org/name@v1", "org/name", "name")),
        ("models/small", "small", ("models/small", "./models/small", "models/small/", "small")),
        ("/srv/@models/small", "small", ("/srv/@models/small", "/srv/@models/small/", "small")),
    ],
)
def test_what_model_names_is_served_in_full_and_by_its_last_part(
    given: str, shown: str, accepted: tuple[str, ...]
) -> None:
    names = ModelNames.of((shown, "alias", "org/alias", "alias"), (given, shown))
    assert names.listed == (shown, "alias", "org/alias")
    for name in (*accepted, None, "", "dummy", "tgi"):
        assert names.resolve(name) == shown
    assert [names.resolve(name) for name in ("alias", "org/alias")] == ["alias", "org/alias"]
    for other in (
        "org",
        "other/name2",
        "NAME",
        "alia",
        ".",
        "/",
        "/srv/",
        "srv",
        f"{given} ",
        "v1",
    ):
        with pytest.raises(NotFound, match=f"this server has '{shown}', 'alias'"):
            names.resolve(other)


def test_a_name_of_its_own_keeps_those_that_model_gave() -> None:
    names = ModelNames.of(("mine",), ("org/name@v1", "org/name"))
    assert (
        names.listed == ("mine",) and names.resolve("org/name") == names.resolve("name") == "mine"
    )


def test_the_option_is_a_list_and_what_was_given_outlives_the_folder_that_it_is_found_in() -> None:
    settings = load(
        ServeSettings,
        ["--model", "org/name", "--server.served_model_names", "a,b/c"],
        "onehead serve",
    )
    found = settings.found_in(Path("/cache/models--org--name/snapshots/1"))
    assert settings.server.served_model_names == ("a", "b/c")
    assert (str(found.model), found.given, found.found_in(Path("/x")).given) == (
        "/cache/models--org--name/snapshots/1",
        "org/name",
        "org/name",
    )


URLS = [
    ("http://127.0.0.1:8000", "127.0.0.1:8000"),
    ("http://127.0.0.1:8000/", "127.0.0.1:8000"),
    ("http://127.0.0.1:8000/v1/chat/completions?x=1", "127.0.0.1:8000"),
    ("HTTP://LLM.example/v1", "llm.example"),
    ("http://llm.example:80", "llm.example"),
    ("https://llm.example", "llm.example:443"),
    ("https://llm.example#x", "LLM.example"),
    ("http://[::1]:8000/v1", "[::1]:8000"),
]


@pytest.mark.parametrize(("url", "host"), URLS)
def test_the_url_of_the_endpoint_is_the_model(url: str, host: str) -> None:
    names = ModelNames.of(("mine",), ())
    assert names.resolve(url, host) == "mine"
    for other in (None, "", "other.example", f"{host}0", f"x{host}"):
        with pytest.raises(NotFound):
            names.resolve(url, other)
    for name in (
        host,
        f"ftp://{host}",
        f"http:/{host}",
        f"http://{host}@other.example/",
        f"http://x@{host}",
    ):
        with pytest.raises(NotFound):
            names.resolve(name, host)


async def test_the_routes_of_one_model_ignore_its_name_and_those_of_openai_check_it_last(
    tmp_path: Path,
) -> None:
    make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    names = ModelNames.of(("org/name", "alias"), ("org/name",))
    served = serve(
        tmp_path,
        FakeEngine(msgspec.structs.replace(READY, vocab_size=261, max_context=512, capacity=512)),
        names=names,
    )
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    inputs: dict[str, Any]
    inputs = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    messages = [{"role": "user", "content": "a"}]
    openai: dict[str, Any] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
    }
    openai |= {
        path: {"prompt": "a", "max_tokens": 2}
        for path in ("/v1/fim/completions", "/fim/completions")
    }
    openai |= {
        "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}
    }
    openai |= {"/v1/systemone": {"state": "a", "questions": {"q": {"type": "noul"}}}}
    tokens = {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/apply-template": {"messages": messages},
    }
    tokens |= {
        f"{path}/render": openai[path] for path in ("/v1/completions", "/v1/chat/completions")
    }
    of_one_model = {
        "/": inputs,
        "/generate": inputs,
        "/generate_stream": inputs,
        "/completion": {"prompt": "a", "n_predict": 2},
    }
    of_one_model |= {
        "/tokenize": inputs,
        "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    }
    documented = [route for route in served.app.table.routes if route.tag]
    posted = {route.path for route in documented if "POST" in route.methods}
    assert posted == openai.keys() | tokens.keys() | of_one_model.keys()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as client:
        for path, body in of_one_model.items():
            for name in ("http://127.0.0.1:8000", "", "gpt-4", None):
                assert (await client.post(path, json=body | {"model": name})).status_code == 200, (
                    path
                )
        for path, body in (openai | tokens).items():
            for name in ("org/name", "name", "alias", "", None, "tgi"):
                answer = await client.post(path, json=body | {"model": name})
                value = answer.json()
                shown = value[0] if isinstance(value, list) else value
                assert answer.status_code == 200 and shown.get("model", "org/name") == "org/name", (
                    answer.text
                )
            assert (
                await client.post(path, json=body | {"model": "http://test/v1"})
            ).status_code == 200
            answer = await client.post(path, json=body | {"model": "http://other.test/v1"})
            assert answer.status_code == 404
            answer = await client.post(path, json=body | {"model": "gpt-4"})
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
            assert (
                await client.post(path, json=body | {"model": "gpt-4", "modl": 1})
            ).status_code == 400
        listed = (await client.get("/v1/models")).json()
        assert (await client.get("/v1/models/")).json() == listed
        assert [model["id"] for model in listed["data"]] == ["org/name", "alias"]
        for name, id in (("org/name", "org/name"), ("name", "org/name"), ("alias", "alias")):
            assert json.loads((await client.get(f"/v1/models/{name}")).text)["id"] == id
        assert (await client.get("/info")).json()["model_id"] == "org/name"


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 40}])
async def test_a_model_says_what_it_can_do_and_which_defaults_it_has(
    tmp_path: Path, has_marks: bool, has_template: bool, sampling: dict[str, float]
) -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>") if has_marks else ()
    make_tokenizer(marks, 261).save(str(tmp_path / "tokenizer.json"))
    if has_template:
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": 20} | sampling))
    served = serve(tmp_path, FakeEngine(msgspec.structs.replace(READY, vocab_size=261)))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    transport = httpx.ASGITransport(served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["default_sampling_params"] == sampling
    assert model["capabilities"] == {"completion_chat": has_template, "completion_fim": has_marks}
