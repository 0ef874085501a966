"""GET /openapi.json and the page that shows it, GET /docs.

The document has three sources: FastAPI gives the routes and their docstrings; pydantic gives the
schemas of request bodies and the docstrings of their fields; documentation.json gives examples,
responses and errors of each route. It is built on first use. Every URL in both is relative, so that
a reverse proxy may serve them under any prefix.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from server.http.errors import TGI
from server.http.front import FrontDoor
from server.http.routes import Route

SCRIPTS = "static-offline-docs"
BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "One of the keys of server.api_keys (for /metrics: of server.metrics_key).",
}


def documentation_routes(app: FastAPI, door: Callable[[], FrontDoor]) -> list[Route]:
    """Routes of the page and the document of `app`. The page's scripts are served by this server,
    so that it needs no internet. `door`: has the routes, and knows which need a key.
    """

    @cache
    def document() -> bytes:
        return json.dumps(describe(app, door())).encode()

    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} {app.version}",
            swagger_js_url=f"{SCRIPTS}/swagger-ui-bundle.js",
            swagger_css_url=f"{SCRIPTS}/swagger-ui.css",
            swagger_favicon_url=f"{SCRIPTS}/favicon.png",
            swagger_ui_parameters={"defaultModelExpandDepth": 2},
        )

    return [
        Route(
            f"/{SCRIPTS}/{{path:path}}",
            (),
            StaticFiles(packages=[("fastapi_offline", "static")]),
            TGI,
        ),
        Route("/openapi.json", ("GET",), openapi, TGI),
        Route("/docs", ("GET",), docs, TGI),
    ]


def describe(app: FastAPI, door: FrontDoor) -> dict[str, Any]:
    """Builds the OpenAPI document."""
    stated: dict[str, Any] = json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
    described, paths, components = app.openapi(), stated.pop("paths"), stated["components"]
    components["responses"] |= _errors(stated.pop("errors"), stated.pop("retry_headers"))
    _, bodies = models_json_schema(
        [(route.body, "validation") for route in door.table.routes if route.body],
        ref_template="#/components/schemas/{model}",
    )
    components["schemas"] |= bodies["$defs"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            operation |= (paths.get(path) or paths[f"/v1{path}"])[method]
            names = operation["responses"].pop("errors", "").split()
            operation["responses"] |= {
                status: {"$ref": f"#/components/responses/{name}"}
                for status, name in [
                    *((name[-3:], name) for name in names),
                    ("default", "Connection"),
                ]
            }
            operation["summary"], _, operation["description"] = operation["description"].partition(
                "\n\n"
            )
            if door.keys(door.table.find(path)) is not None:
                operation["security"] = [{"bearer": []}]
                components["securitySchemes"] = {"bearer": BEARER}
            else:
                operation["responses"].pop("401", None)
    return described | stated


def _errors(texts: dict[str, dict[str, str]], retry: dict[str, Any]) -> dict[str, Any]:
    """The error responses of each dialect by name, such as Tgi400, from their descriptions."""
    found: dict[str, Any] = {}
    for dialect, of_dialect in texts.items():
        schema = {"$ref": f"#/components/schemas/{dialect}Error"}
        for status, text in of_dialect.items():
            response: dict[str, Any] = {
                "description": text,
                "content": {"application/json": {"schema": schema}},
            }
            if status in ("429", "503"):
                response["headers"] = retry
            found[dialect + status] = response
    return found
