"""Writes the pages of docs/reference from what the code declares.

    python -m scripts.generate_reference

Options come from the settings classes, commands from their --help, routes and fields from a running
server's /openapi.json, metrics from its /metrics, errors from the error classes. Invariant: the
pages are a function of the code alone; tests/docs/test_reference.py compares the committed ones
with what this module makes. It knows nothing of the site that shows them.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from server import errors
from server.config import ServeSettings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTE = (
    "<!-- Written by scripts/docs reference. Do not edit: change the code and run it again. -->\n"
)
SECTIONS = ("engine", "cache", "server")
COMMANDS = (
    "serve",
    "generate",
    "batch",
    "bench",
    "bench --offline",
    "top",
    "plan",
    "convert",
    "train",
    "compare",
)
EXIT_CODES = {
    0: "The command did what it was asked. `onehead serve`: it was told to stop, and open streams "
    "finished.",
    1: "`onehead bench`, `onehead batch`: it ran to the end, and some requests failed or were "
    "refused. `onehead top`, `onehead bench`: the server cannot be used.",
    2: "Usage: an option, command or file that the command does not take.",
    70: "The engine cannot be kept alive, or an internal error.",
    71: "A port or memory that cannot be had, also `cache.memory` above what the machine has.",
    75: "`onehead serve`: streams were cut at shutdown, by `server.drain_timeout` or a second "
    "signal.",
    78: "An option's value, a file of options or a checkpoint that cannot be served, or a CPU "
    "without the kernels that are compiled at install.",
    130: "Interrupted by Ctrl-C (every command but `onehead serve`).",
    141: "The program that read the output closed it.",
}
CODES = {
    "admission_error": "An internal error while the engine took the request in.",
    "cancelled": "The resumable stream was cancelled (only ever an event).",
    "context_length_exceeded": "Prompt and output are longer than the model or the cache allows.",
    "engine_unavailable": "No engine has been ready for 60 s, or twice the first one's time to "
    "load, or the server gave up.",
    "future_event": "`Last-Event-ID` or `after` names an event that the stream does not have yet.",
    "grammar_error": "An internal error while the request's grammar was applied.",
    "host_not_allowed": "The `Host` header names a host that this server does not answer to "
    "(`server.allowed_hosts`).",
    "idempotency_conflict": "A request with this `Idempotency-Key` is being answered already.",
    "invalid_api_key": "No key, or one that is not valid.",
    "invalid_event_id": "`Last-Event-ID` or `after` is not an event of this stream.",
    "model_not_found": "`model` is none of the names that `GET /v1/models` lists.",
    "not_restored": "`server.journal`: the stream cannot go on after the restart, as the model or "
    "the keys are others now, or the request was refused (only ever an event).",
    "out_of_memory": "The memory does not hold what this request needs for its next token.",
    "queue_timeout": "The request's own `timeout_s` passed before the engine had started it.",
    "queue_too_long": "The client's estimated wait is longer than 600 s.",
    "rate_limit_exceeded": "The key has used its `requests_per_minute` or `tokens_per_minute` of "
    "the keys' file.",
    "request_quarantined": "Engines crashed twice while they ran this request alone.",
    "resume_gap": "Events after the last one that the client saw are not kept any more.",
    "server_shutting_down": "The server is stopping.",
    "stream_expired": "The resumable stream ended more than `server.resume_retention` seconds ago.",
    "stream_not_found": "There is no such resumable stream, or it belongs to another key.",
    "text_error": "An internal error while tokens were turned into text.",
    "tokenization_failed": "The model's tokenizer cannot process this text.",
    "tokenization_timeout": "Tokenizing the text needs more than 5 s of processor time, or too "
    "much memory.",
    "too_many_jobs": "Too many long texts and grammars, of this client or of all, wait to be "
    "processed.",
    "too_many_requests": "`engine.max_running` plus `server.max_waiting` sequences (choices of "
    "requests) are open, or as many of one client as it may have.",
    "too_many_viewers": "As many connections as may watch the server at `/monitor` do.",
    "too_many_waiting_tokens": "1,000,000 prompt tokens are waiting, or as many of one client as "
    "may.",
}


def pages(document: dict[str, Any], exposition: str) -> dict[Path, str]:
    """Path -> text of every generated page, for a server's /openapi.json and /metrics (after one
    request).
    """
    return {
        DOCS / "reference" / "options.md": options_page(),
        DOCS / "reference" / "commands.md": commands_page(),
        DOCS / "reference" / "http.md": http_page(document),
        DOCS / "reference" / "metrics.md": metrics_page(exposition),
        DOCS / "reference" / "errors.md": errors_page(),
    }


def table(heads: str, rows: list[list[str]]) -> str:
    """A Markdown table. `heads` are separated by |."""
    lines = [heads, " | ".join("---" for _ in heads.split("|"))] + [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def code(value: str) -> str:
    return f"`{value}`" if value else ""


# Schemas


def type_of(schema: dict[str, Any], link: Callable[[str], str]) -> str:
    """The type of a JSON schema in words. `link` renders the name of a schema that is referred
    to.
    """
    if "$ref" in schema:
        return link(schema["$ref"].rsplit("/", 1)[1])
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "const" in schema:
        return code(
            str(schema["const"]).lower()
            if isinstance(schema["const"], bool)
            else str(schema["const"])
        )
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [type_of(part, link) for part in schema[key] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    kind = schema.get("type", "any")
    kinds = [name for name in (kind if isinstance(kind, list) else [kind]) if name != "null"]
    if kinds == ["array"]:
        return f"list of {type_of(schema.get('items', {}), link)}"
    return " or ".join("path" if schema.get("format") == "path" else name for name in kinds)


def bounds_of(schema: dict[str, Any]) -> str:
    """Bounds of a number, as '> 0, <= 3600'."""
    for part in schema.get("anyOf", []):
        if found := bounds_of(part):
            return found
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "gt": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    if schema.get("type") in ("integer", "number") or "gt" in schema:
        return ", ".join(f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema)
    return ""


def default_of(value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "none"
    return code(str(value).lower() if isinstance(value, bool) else str(value))


# Options


def options_page() -> str:
    """Every option of `onehead serve`."""
    schema = ServeSettings.model_json_schema()
    text = f"""{NOTE}
# Options

Options of `onehead serve`. Each is given in one of three ways, the first of which wins:

1. on the command line: `--engine.threads 4`
2. in the environment: `ONEHEAD_ENGINE__THREADS=4`
3. in a TOML file named by `--config`: `threads = 4` below `[engine]`

On the command line an option may be written with hyphens as well (`--engine.max-running`), and the model may
stand alone: `onehead serve MODEL`. An option that does not exist is an error that names the nearest one.
`onehead serve --help` prints the same list. Other commands that run a model take `--model`, `--config`, and
the sections `engine` and `cache`: see [commands](commands.md).

"""  # noqa: E501
    text += _options_table(
        "", {name: field for name, field in schema["properties"].items() if name not in SECTIONS}
    )
    for section in SECTIONS:
        reference = schema["properties"][section]
        fields = schema["$defs"][reference["$ref"].rsplit("/", 1)[1]]["properties"]
        text += f"\n## {section}\n\n{reference['description'][0].upper()}{reference['description'][1:]}.\n\n"  # noqa: E501
        text += _options_table(f"{section}.", fields)
    return text


def _options_table(prefix: str, fields: dict[str, Any]) -> str:
    rows = []
    for name, field in fields.items():
        text, _, stated = field["description"].partition("; default: ")
        default = stated or default_of(field.get("default"))
        kind = type_of(field, lambda name: name.lower())
        if bounds := bounds_of(field):
            kind += f", {bounds}"
        rows.append([code(f"--{prefix}{name}"), kind, default, text])
    return table("option | value | default | meaning", rows)


# Commands


def entry_point() -> tuple[str, str]:
    """(module, function) of the `onehead` command, by pyproject.toml."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["onehead"].partition(":")
    return module, function


def onehead(*arguments: str) -> list[str]:
    """The command line of `onehead` in this tree."""
    module, function = entry_point()
    return [
        sys.executable,
        "-c",
        f"import sys; from {module} import {function}; sys.exit({function}())",
        *arguments,
    ]


def clean_environment() -> dict[str, str]:
    """The environment without options of onehead, and with this tree first among the modules."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ONEHEAD_")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}


def commands_page() -> str:
    """--help of every command."""
    text = f"{NOTE}\n# Commands\n\n`onehead COMMAND --help` prints what stands here.\n"
    for arguments in ((), *((*command.split(),) for command in COMMANDS if command != "serve")):
        shown = " ".join(("onehead", *arguments, "--help"))
        done = subprocess.run(
            onehead(*arguments, "--help"),
            capture_output=True,
            text=True,
            env=clean_environment(),
            cwd=ROOT,
            check=True,
            timeout=120,
        )
        title = " ".join(("onehead", *arguments))
        text += f"\n## {title}\n\n```text\n$ {shown}\n{done.stdout.rstrip()}\n```\n"
        if not arguments:
            text += "\n## onehead serve\n\nIts options have [a page of their own](options.md).\n"
    return text


# HTTP


def http_page(document: dict[str, Any]) -> str:
    """Routes, then bodies."""
    text = f"""{NOTE}
# HTTP

What a server's `/openapi.json` says. A running server shows it at `/docs`, with a form to send requests.
Null is the default of every field, and a field that is not listed is refused.

"""  # noqa: E501
    routes = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    text += table(
        "route | what", [[_route_link(path, method), op["summary"]] for path, method, op in routes]
    )
    for tag in document["tags"]:
        text += f"\n## {tag['name']}\n\n{tag['description']}\n"
        for path, method, operation in routes:
            if operation["tags"][0] == tag["name"]:
                text += _route(document, path, method, operation)
    text += "\n## Bodies and replies\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        text += f"\n### {name}\n\n{schema.get('description', '')}\n\n"
        if "properties" in schema:
            text += table("field | type | meaning", list(_fields(schema)))
        else:
            text += f"{type_of(schema, _schema_link)}\n"
    return text


def _route_link(path: str, method: str) -> str:
    anchor = re.sub(r"[^a-z0-9_-]+", "", f"{method} {path}".lower().replace(" ", "-"))
    return f"[`{method.upper()} {path}`](#{anchor})"


def _schema_link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _route(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    anchor = re.sub(r"[^a-z0-9_-]+", "", f"{method} {path}".lower().replace(" ", "-"))
    text = f"\n### `{method.upper()} {path}` {{ #{anchor} }}\n\n{operation['summary']}\n"
    if operation.get("description"):
        text += f"\n{operation['description']}\n"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        text += f"\nBody: {type_of(schema, _schema_link)}\n"
    rows = []
    for status, response in operation["responses"].items():
        response = _resolved(document, response)
        kinds = [
            type_of(media.get("schema", {}), _schema_link)
            for media in response.get("content", {}).values()
        ]
        rows.append(
            [
                status,
                ", ".join(kind for kind in dict.fromkeys(kinds) if kind != "any"),
                response["description"],
            ]
        )
    return text + "\n" + table("status | reply | when", sorted(rows))


def _resolved(document: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in value:
        return value
    found: Any = document
    for part in value["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


def _fields(schema: dict[str, Any]) -> Iterator[list[str]]:
    for name, field in schema["properties"].items():
        kind = type_of(field, _schema_link)
        if bounds := bounds_of(field):
            kind += f", {bounds}"
        required = "" if name not in schema.get("required", ()) else " (required)"
        yield [f"{code(name)}{required}", kind, field.get("description", "")]


# Metrics


def metrics_page(exposition: str) -> str:
    """Every series of /metrics."""
    rows = []
    for family in text_string_to_metric_families(exposition):
        if family.name.endswith("_created"):
            continue
        names = {"counter": f"{family.name}_total"}
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        if family.type == "gauge" and family.name.endswith("_info"):
            labels = sorted({label for sample in family.samples for label in sample.labels})
        name = names.get(family.type, family.name)
        rows.append([code(name), family.type, ", ".join(map(code, labels)), family.documentation])
    intro = f"""{NOTE}
# Metrics

`GET /metrics` answers in Prometheus' text format. It needs no key unless `server.metrics_key` is set. Names
and meanings do not change; meanings are those of [vLLM's metrics](../guides/moving-from-vllm.md#metrics).
The model's name is a label of `onehead_model_info` alone
([why](../why.md#model-name-metric)). `process_*` is the API process,
`onehead_engine_process_*` the engine.

"""  # noqa: E501
    return intro + table("metric | type | labels | meaning", rows)


# Errors


def request_errors() -> list[tuple[type[errors.RequestError], str]]:
    """(class, meaning) of the errors that are answers, by the tree that the module's docstring
    draws.
    """
    meanings = dict(re.findall(r"[|`]-- (\w+) +(?:\d{3}|exit \d+) *(.*)", errors.__doc__ or ""))
    return [
        (cls, meanings[cls.__name__] or "longer than `server.max_body_bytes`")
        for cls in errors.RequestError.__subclasses__()
    ]


def used_codes() -> set[str]:
    """Every word that the server's source gives as the `code` of an error."""
    found: set[str] = set()
    for path in sorted((ROOT / "server").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "code":
                    value = (
                        constants.get(keyword.value.id)
                        if isinstance(keyword.value, ast.Name)
                        else getattr(keyword.value, "value", None)
                    )
                    found |= {value} if isinstance(value, str) and value else set()
    return found


def used_exit_codes() -> set[int]:
    """Every exit status that an error has or a constant EXIT_... names."""
    classes: list[type[errors.OneheadError]] = [
        errors.OneheadError,
        *errors.OneheadError.__subclasses__(),
    ]
    found = {cls.exit_code for cls in classes} | {0, 1}
    for folder in ("server", "commands"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= {
                int(number)
                for number in re.findall(r"^EXIT_\w+ = (\d+)$", path.read_text(), re.MULTILINE)
            }
    return found


def errors_page() -> str:
    """Exit codes, statuses and code words. Raises ValueError where the lists above and the code
    differ.
    """
    for name, listed, used in (
        ("EXIT_CODES", set(EXIT_CODES), used_exit_codes()),
        ("CODES", set(CODES), used_codes()),
    ):
        if listed != used:
            raise ValueError(
                f"{name} of {__name__} and the code differ in {sorted(listed ^ used, key=str)}"
            )
    statuses = [
        [
            str(cls.status),
            str(cls.openai_status or cls.status),
            code(cls.tgi_type or ""),
            code(cls.openai_type),
            meaning,
        ]
        for cls, meaning in request_errors()
    ]
    return f"""{NOTE}
# Errors and exit codes

## Exit codes

{table("status | meaning", [[str(number), text] for number, text in EXIT_CODES.items()])}
## HTTP statuses

`/generate`, `/generate_stream` and `/` answer in TGI's form, `{{"error", "error_type"}}`; routes below `/v1`
and `/infill` in OpenAI's, `{{"error": {{"message", "type", "param", "code"}}}}`; [HTTP](http.md) says it for
each route. What is refused before it is a request (400, 408, 431, 503) has OpenAI's form on every route.
404 and 405 have no `error_type`, so that TGI's clients go by the status. Every reply has the request's id
in `x-request-id`. An error after a stream's first token is an event, the last one; OpenAI's streams still
send `[DONE]` after it.

{table("TGI | OpenAI | `error_type` | `type` | when", sorted(statuses))}
## Code words

`code` in OpenAI's form, for programs. Where no word applies, it is the status: for example
400 for a grammar that became too complex in the middle of an answer.

{table("code | meaning", [[code(word), text] for word, text in sorted(CODES.items())])}"""  # noqa: E501


# A server to ask


def ask_a_server() -> tuple[dict[str, Any], str]:
    """/openapi.json and /metrics of a server with the embedded model, which is started and stopped
    here.
    """
    arguments = (
        "serve",
        "--port",
        "0",
        "--engine.threads",
        "1",
        "--cache.pages",
        "64",
        "--server.lb_grace",
        "0",
    )
    server = subprocess.Popen(
        onehead(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        return answers(lambda path, body: read(url + path, body))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def answers(get: Callable[[str, str | None], str]) -> tuple[dict[str, Any], str]:
    """(document, exposition) of a server that `get` asks: a path, and a body to be posted or
    None.
    """
    get("/generate", '{"inputs":"a","parameters":{"max_new_tokens":1}}')
    return json.loads(get("/openapi.json", None)), get("/metrics", None)


def read(url: str, body: str | None) -> str:
    """The body of an answer."""
    request = urllib.request.Request(
        url, body.encode() if body else None, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def main() -> None:
    for path, text in pages(*ask_a_server()).items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
