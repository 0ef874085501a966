"""The request as code: each language sends exactly the body that the page would, whatever strings
are in it; and in other APIs what the server accepts there.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest

from tests.browser.support import Mode, expect
from tests.support.processes import ServerProcess

NASTY = [
    "it's a \"quote\" and a `tick` and a 'quote'",
    "$HOME $(touch x) ${HOME} `id` !! !$ %s %PATH% ~ * ? [a] {a,b} # & ; | < > \\",
    "line\nline\r\nend\ttab\\n \\\\ \\' \\\" \\u0041 \\x41 \\N{BULLET}",
    "'''  \"\"\"  ''' + str(1) + '''",
    "${1+1} `${1+1}` \\`",
    "\u2028\u2029\u0085\ufeff\u200b\u202e",
    "\x00\x01\x07\x08\x0b\x0c\x1b[31m\x7f",
    "🙂 é ü 漢字 \U0001d11e",
    "\\",
    "'",
    '"',
    "\\'",
    "</script><script>alert(1)</script><!--",
    "EOF\n'\nEOF\n",
    "{{ x }} {% y %} {x} %(x)s",
]


class Recorder(BaseHTTPRequestHandler):
    """Answers every POST with an empty stream, and keeps its body."""

    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[ThreadingHTTPServer]:
    Recorder.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as recorder:
        thread = threading.Thread(target=recorder.serve_forever)
        thread.start()
        yield recorder
        recorder.shutdown()
        thread.join()


RUN = {
    "curl": ["bash", "-c"],
    "Python": [sys.executable, "-c"],
    "JavaScript": ["node", "--input-type=module", "-e"],
}


def code_in(page: Any, mode: Mode, language: str) -> str:
    """What the dialog shows for a language or an API."""
    mode.press("Code")
    page.locator("dialog.code").get_by_text(language, exact=True).click()
    expect(page.locator("dialog.code pre")).not_to_have_text("")
    code: str = page.locator("dialog.code pre").text_content()
    page.locator("dialog.code").get_by_role("button", name="Close").click()
    return code


@pytest.mark.parametrize("language", RUN)
@pytest.mark.parametrize("name", ["complete", "chat"])
def test_a_snippet_sends_the_same_body(
    page: Any, server: ServerProcess, recorder: ThreadingHTTPServer, language: str, name: str
) -> None:
    program, *arguments = RUN[language]
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on PATH")
    mode = Mode(page, name).set(
        top_k=3, temperature=0.5, ignore_eos="true", stop="\\n\\n\nit's", logit_bias='{"5": -1.5}'
    )
    environment = os.environ | {"NO_PROXY": "*", "no_proxy": "*"}
    for text in NASTY if language != "Python" else [*NASTY[:3], "".join(NASTY)]:
        code = code_in(page, mode.write(text), language).replace(
            f"127.0.0.1:{server.port}", f"127.0.0.1:{recorder.server_port}"
        )
        done = subprocess.run(
            [program, *arguments, code],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, (done.stderr, code)
        # A text field turns line ends into \n, as every browser does.
        typed = text.replace("\r\n", "\n")
        said = (
            {"prompt": typed}
            if name == "complete"
            else {"messages": [{"role": "user", "content": typed}]}
        )
        common = {
            "model": "embedded",
            "max_tokens": 128 if name == "complete" else 256,
            "temperature": 0.5,
            "top_k": 3,
            "stream": True,
        }
        assert Recorder.bodies.pop() == said | common | {
            "ignore_eos": True,
            "stop": ["\n\n", "it's"],
            "logit_bias": {"5": -1.5},
        }
    assert Recorder.bodies == []


SAID: dict[tuple[str, str], dict[str, Any]] = {
    ("complete", "Ollama"): {"prompt": NASTY[1], "raw": True},
    ("chat", "Ollama"): {"messages": [{"role": "user", "content": NASTY[1]}]},
    ("chat", "Messages"): {"messages": [{"role": "user", "content": NASTY[1]}]},
    ("chat", "Responses"): {"input": [{"role": "user", "content": NASTY[1]}]},
}
SET: dict[str, Any] = {"max_tokens": 3, "temperature": 0.5, "stop": "it's", "seed": 7, "top_k": 4}
OPTIONS = {"num_predict": 3, "temperature": 0.5, "stop": ["it's"], "seed": 7, "top_k": 4}
PARAMETERS: dict[str, dict[str, Any]] = {
    "Ollama": {"options": OPTIONS},
    "Messages": {"max_tokens": 3, "temperature": 0.5, "stop_sequences": ["it's"], "top_k": 4},
    "Responses": {"max_output_tokens": 3, "temperature": 0.5},
}
ROUTES = {"Messages": "/v1/messages", "Responses": "/v1/responses"}


@pytest.mark.parametrize(("name", "api"), SAID)
def test_a_request_in_another_api_is_accepted_with_every_field(
    page: Any, server: ServerProcess, name: str, api: str, recorder: ThreadingHTTPServer
) -> None:
    mode = Mode(page, name).set(**SET, min_tokens=2).write(NASTY[1])
    code = code_in(page, mode, api)
    assert code.startswith("# Not translated: ") and "min_tokens" in code.partition("\n")[0]
    recorded = code.replace(f"127.0.0.1:{server.port}", f"127.0.0.1:{recorder.server_port}")
    subprocess.run(["bash", "-c", recorded], capture_output=True, timeout=60, check=True)
    body = Recorder.bodies.pop()
    assert body == SAID[name, api] | PARAMETERS[api] | {"model": "embedded", "stream": True}
    route = ROUTES.get(api, "/api/chat" if name == "chat" else "/api/generate")
    assert f":{server.port}{route}'" in code
    answer = httpx.post(f"http://127.0.0.1:{server.port}{route}", json=body, timeout=60)
    assert answer.status_code == 200 and "x-onehead-ignored" not in answer.headers


def test_a_system_message_in_other_apis(page: Any) -> None:
    mode = Mode(page, "chat").write("Hello")
    mode.panel.get_by_text("System message", exact=True).first.click()
    mode.panel.get_by_label("System message").fill("Be brief.")
    assert '"system": "Be brief."' in code_in(page, mode, "Messages")
    assert '"role": "system"' not in code_in(page, mode, "Messages")
    assert '"role": "system"' in code_in(page, mode, "Responses")


def test_what_other_apis_say_in_other_forms_is_not_offered_in_them(page: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    Mode(page, "chat").set(tools=json.dumps([tool])).write("Hello").press("Code")
    choices = page.locator("dialog.code label").all_text_contents()
    assert choices == ["curl", "Python", "JavaScript"]
