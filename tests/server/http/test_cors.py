"""Cross-origin requests: preflights of allowed pages, those of pages that call a server in their
own network too, are granted.
"""

from pathlib import Path

import httpx
import pytest

from server.http.app import with_cors
from tests.support.fake_engine import serve

PAGE = "https://app.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def ask(folder: Path, origins: tuple[str, ...], headers: dict[str, str]) -> httpx.Response:
    app = with_cors(serve(folder).app, origins)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        return await http.options("/v1/completions", headers=PREFLIGHT | headers)


@pytest.mark.parametrize("origins", [(PAGE,), ("http://localhost:3000", PAGE), ("*",)])
@pytest.mark.parametrize("private", [{}, {"access-control-request-private-network": "true"}])
async def test_an_allowed_page_is_granted(
    tokenizer_folder: Path, origins: tuple[str, ...], private: dict[str, str]
) -> None:
    response = await ask(tokenizer_folder, origins, {"origin": PAGE} | private)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert response.headers.get("access-control-allow-private-network") == (
        "true" if private else None
    )


@pytest.mark.parametrize("private", [{}, {"access-control-request-private-network": "true"}])
async def test_another_page_is_not(tokenizer_folder: Path, private: dict[str, str]) -> None:
    response = await ask(tokenizer_folder, (PAGE,), {"origin": "https://evil.example"} | private)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


async def test_without_origins_there_is_no_cors(tokenizer_folder: Path) -> None:
    response = await ask(tokenizer_folder, (), {"origin": PAGE})
    assert not [name for name in response.headers if name.startswith("access-control")]
