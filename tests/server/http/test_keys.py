"""Keys: the file is strict, is read again whole or not at all, and no message repeats a key or a
digest.
"""

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.config import ServerSection, ServeSettings, load
from server.errors import ConfigurationError
from server.generation.clients import Terms
from server.http.keys import Keys, read_keys
from server.protocol import Share
from tests.server.http.test_streams import Client
from tests.support.fake_engine import serve


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def table(name: str, key: str) -> str:
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest(key)}"\n'


def names(terms: dict[str, Terms] | None) -> dict[str, str]:
    assert terms is not None
    return {digest: one.name for digest, one in terms.items()}


def test_names_by_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        table("editor", "one")
        + table("ci.bot-2", "two").replace(digest("two"), digest("two").upper())
    )
    assert names(read_keys(file)) == {digest("one"): "editor", digest("two"): "ci.bot-2"}
    given = load(
        ServeSettings, ["--server.api_keys_file", str(file)], "onehead serve"
    ).server.api_keys_file
    assert given == file
    keys = Keys([digest("three")], file)
    assert names(keys.terms) == {
        digest("one"): "editor",
        digest("two"): "ci.bot-2",
        digest("three"): "",
    }
    assert Keys((), None).terms is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[key]", "line 1"),
        ("\xff", "utf-8"),
        ("[[keys]]\nname = 'a'\n", "keys: no such option"),
        (table("a", "one") + "weigth = 2\n", "key.0.weigth: no such option"),
        ("[[key]]\nname = 'a'\n", "key.0.sha256: Field required"),
        (f"[[key]]\nsha256 = '{digest('secret')}'\n", "key.0.name: Field required"),
        ("[[key]]\nname = 'a'\nsha256 = 'secret'\n", "sha256sum"),
        (
            table("a", "one") + table("a", "secret"),
            "a and a must each have a name and a sha256 of their own",
        ),
        (
            table("a", "secret") + table("b", "secret"),
            "a and b must each have a name and a sha256 of their own",
        ),
        (table("a b", "one"), "key.0.name"),
        (
            table("a", "one") + "weight = 0\n",
            "key.0.weight: Input should be greater than or equal to 0.01",
        ),
        (table("a", "one") + "requests_per_minute = 0\n", "key.0.requests_per_minute"),
        (table("a", "one") + "max_running = 1.5\n", "key.0.max_running"),
        (table("a", "one") + "priority = -1\n", "key.0.priority"),
    ],
)
def test_a_file_that_is_not_right_is_refused_without_its_secrets(
    content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigurationError) as error:
        read_keys(file)
    assert message in str(error.value) and str(file) in str(error.value)
    assert "secret" not in str(error.value) and digest("secret") not in str(error.value)


def test_a_file_that_cannot_be_read_again_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    with pytest.raises(ConfigurationError, match="No such file"):
        Keys((), file)
    file.write_text(table("editor", "one"))
    keys = Keys((), file)
    for content in (table("editor", "two") + "[[", None):
        file.write_text(content) if content is not None else file.unlink()
        keys.reload()
        assert names(keys.terms) == {digest("one"): "editor"}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and all(
        "the API keys stay as they were" in error and str(file) in error for error in errors
    )
    file.write_text("")
    keys.reload()
    assert keys.terms == {}  # And not None, with which every request would be let in.


async def test_a_removed_key_is_refused_from_its_next_request_on_and_a_new_name_is_the_same_client(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.toml"
    file.write_text(table("editor", "one") + table("ci", "two"))
    served = serve(
        tokenizer_folder, section=ServerSection(api_keys_file=file, api_keys=(digest("three"),))
    )
    await asyncio.sleep(0)  # The engine becomes ready.
    client, body = Client(served), {"prompt": "abc", "max_tokens": 2}

    async def status(key: str) -> int:
        response = await client.request(
            "POST", "/v1/completions", body, authorization=f"Bearer {key}"
        )
        return int(response.status_code)

    assert [await status(key) for key in ("one", "two", "three", "four")] == [200, 200, 200, 401]
    file.write_text(table("author", "one") + table("new", "four"))
    served.app.api_keys.reload()  # type: ignore[attr-defined]
    assert [await status(key) for key in ("one", "two", "three", "four")] == [200, 401, 200, 200]
    salts = [submit.salt for submit in served.engine.submits]
    # What a key computed is found again under its new name.
    assert salts[0] == salts[3] and len(set(salts)) == 4
    records: list[Any] = [record for record in caplog.records if record.name == "onehead.access"]
    names = [record.fields.get("key") for record in records]
    assert names == ["editor", "ci", None, None, "author", None, None, "new"]
    assert not any(key in caplog.text for key in (digest("one"), digest("two")))


async def test_what_a_key_may_is_in_the_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Its weight and bounds go to the engine; `priority` counts against everybody's requests, or is
    refused.
    """
    file = tmp_path / "keys.toml"
    terms = "weight = 3\nmax_running = 2\nrequests_per_minute = 2\npriority = true\n"
    file.write_text(table("urgent", "one") + terms + table("other", "two"))
    served = serve(
        tokenizer_folder, section=ServerSection(api_keys_file=file, api_keys=(digest("three"),))
    )
    await asyncio.sleep(0)  # The engine becomes ready.
    client, body = Client(served), {"prompt": "abc", "max_tokens": 2, "priority": -1}

    async def ask(key: str, **changed: object) -> httpx.Response:
        return await client.request(
            "POST", "/v1/completions", body | changed, authorization=f"Bearer {key}"
        )

    assert (await ask("one")).status_code == 200
    assert served.engine.submits[-1].share == Share("urgent", 3.0, 2, -1)
    for key in ("two", "three"):
        refused = await ask(key)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
        assert (await ask(key, priority=0)).status_code == 200
    assert served.engine.submits[-1].share == Share(digest("three"))
    assert (await ask("one")).status_code == 200
    refused = await ask("one")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 29 <= int(refused.headers["retry-after"]) <= 30
    file.write_text(table("urgent", "one"))
    served.app.api_keys.reload()  # type: ignore[attr-defined]
    assert (await ask("one", priority=0)).status_code == 200


BODIES: list[tuple[str, dict[str, object], int]] = [
    ("/tokenize", {"inputs": "a" * 400}, 200),
    ("/tokenize", {"prompt": "a" * 400}, 200),
    ("/tokenize", {"content": "a" * 400}, 200),
    ("/detokenize", {"tokens": [5] * 400}, 200),
    ("/v1/completions/render", {"prompt": [[5] * 60] * 2, "max_tokens": 2}, 200),
    # Refused once it is tokenized: the context is 64 tokens.
    ("/v1/completions", {"prompt": "ab " * 40, "max_tokens": 2}, 400),
    ("/generate", {"inputs": "ab " * 40}, 422),
]


@pytest.mark.parametrize(("path", "body", "status"), BODIES)
async def test_tokenizing_counts_against_the_tokens_of_a_key(
    path: str, body: dict[str, object], status: int, tokenizer_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(table("one", "one") + "tokens_per_minute = 90\n" + table("two", "two"))
    served = serve(tokenizer_folder, section=ServerSection(api_keys_file=file))
    await asyncio.sleep(0)  # The engine becomes ready.

    async def ask(key: str) -> int:
        response = await Client(served).request("POST", path, body, authorization=f"Bearer {key}")
        return int(response.status_code)

    assert [await ask("one") for _ in range(3)] == [status, 429, 429]
    assert [await ask("two") for _ in range(3)] == [status] * 3


async def test_without_keys_priority_orders_the_requests_of_one_address(
    tokenizer_folder: Path,
) -> None:
    served = serve(tokenizer_folder)
    await asyncio.sleep(0)  # The engine becomes ready.
    await Client(served).request(
        "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 2, "priority": -1}
    )
    assert (
        served.engine.submits[-1].share == Share("127.0.0.1")
        and served.engine.submits[-1].priority == -1
    )
