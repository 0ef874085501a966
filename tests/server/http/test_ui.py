"""The playground's files: who may have them, with which headers, below which prefix."""

import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from server.config import ServerSection
from server.http.page import files as ui_files
from tests.server.http.test_documentation import KEYED, PREFIX, door

MAX_BYTES = 150_000
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
"""How browsers ask for a page; others get Ollama's greeting."""
TYPES = {"text/css", "text/javascript", "image/svg+xml"}


def policy(response: httpx.Response) -> dict[str, str]:
    """The directives of the content security policy."""
    return dict(
        part.strip().partition(" ")[::2]
        for part in response.headers["content-security-policy"].split(";")
    )


async def test_the_page_and_its_files_need_no_key(tokenizer_folder: Path) -> None:
    async with door(tokenizer_folder, KEYED) as (_, http):
        page = await http.get("/", headers=BROWSER)
        assert (
            page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        )
        for url in re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text):
            file = await http.get(f"/{url}")
            assert file.status_code == 200, url
            assert file.headers["content-type"].partition(";")[0] in TYPES, url
        assert (await http.post("/", json={"inputs": "a"})).status_code == 401
        assert (await http.get("/openapi.json")).status_code == 401


async def test_nothing_but_its_own_files_is_run_or_framed(tokenizer_folder: Path) -> None:
    async with door(tokenizer_folder) as (_, http):
        for path in ("/", "/ui/app.js", "/ui/style.css"):
            answer = await http.get(path, headers={**BROWSER, "sec-fetch-dest": "document"})
            rules = policy(answer)
            assert (
                rules["default-src"]
                == rules["frame-ancestors"]
                == rules["base-uri"]
                == rules["form-action"]
                == "'none'"
            )
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert (
                answer.headers["cross-origin-resource-policy"]
                == answer.headers["cross-origin-opener-policy"]
                == "same-origin"
            )
            assert (
                answer.headers["x-frame-options"] == "DENY"
                and answer.headers["x-content-type-options"] == "nosniff"
            )


async def test_a_file_that_is_known_is_not_sent_again(tokenizer_folder: Path) -> None:
    async with door(tokenizer_folder) as (_, http):
        first = await http.get("/ui/app.js")
        again = await http.get(
            "/ui/app.js", headers={"if-none-match": f'"x", {first.headers["etag"]}'}
        )
        other = await http.get("/ui/app.js", headers={"if-none-match": '"x"'})
        assert (again.status_code, again.content, again.headers["etag"]) == (
            304,
            b"",
            first.headers["etag"],
        )
        assert other.content == first.content and first.headers["cache-control"] == "no-cache"
        plain = await http.get("/ui/app.js", headers={"accept-encoding": "identity"})
        assert (
            first.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        )
        assert (
            plain.content == first.content
            and int(first.headers["content-length"]) < len(plain.content) / 2
        )
        assert (await http.head("/ui/app.js")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/ui/", "/ui/nothing.js", "/ui/../config.py", "/ui/%2e%2e/config.py", "/ui/vendor", "/ui"],
)
async def test_no_other_file_is_served(tokenizer_folder: Path, path: str) -> None:
    async with door(tokenizer_folder) as (_, http):
        assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize("passed_on", [True, False])
async def test_the_page_below_a_prefix(tokenizer_folder: Path, passed_on: bool) -> None:
    """For a proxy that passes the prefix on, and for one that removes it."""
    inside = PREFIX if passed_on else ""
    async with door(tokenizer_folder, ServerSection(root_path=PREFIX) if passed_on else None) as (
        _,
        http,
    ):
        page = await http.get(f"{inside}/", headers=BROWSER)
        urls = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert len(urls) > 3
        for url in urls:
            assert urljoin(f"http://public{PREFIX}/", url).startswith(f"http://public{PREFIX}/"), (
                url
            )
            assert (await http.get(f"{inside}/{url}")).status_code == 200, url
        if passed_on:  # Without its slash the browser would resolve URLs beside the prefix.
            answer = await http.get(PREFIX, headers=BROWSER)
            assert answer.status_code == 307
            assert (
                urljoin(f"http://public{PREFIX}", answer.headers["location"])
                == f"http://public{PREFIX}/"
            )


async def test_it_can_be_turned_off(tokenizer_folder: Path) -> None:
    async with door(tokenizer_folder, ServerSection(ui=False)) as (_, http):
        assert (await http.get("/", headers=BROWSER)).status_code == 405
        assert (await http.get("/ui/app.js")).status_code == 404
        assert (await http.post("/", json={"inputs": "a"})).status_code == 200


async def test_it_is_small(tokenizer_folder: Path) -> None:
    """All files together as a browser gets them, and the lines of what is ours."""
    files = [path for path in ui_files.FOLDER.rglob("*") if path.is_file()]
    async with door(tokenizer_folder) as (_, http):
        answers = [await http.get(f"/ui/{path.relative_to(ui_files.FOLDER)}") for path in files]
    assert sum(int(answer.headers["content-length"]) for answer in answers) <= MAX_BYTES
    lines = [
        path.read_text().count("\n")
        for path in files
        if path.suffix in (".js", ".css") and "vendor" not in path.parts
    ]
    assert sum(lines) <= 2500
