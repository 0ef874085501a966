"""The request as code: each language sends exactly the body that the page would, whatever strings
are in it.
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
        mode.write(text).press("Code")
        page.locator("dialog.code").get_by_text(language, exact=True).click()
        expect(page.locator("dialog.code pre")).not_to_have_text("")
        code = page.locator("dialog.code pre").text_content()
        page.locator("dialog.code").get_by_role("button", name="Close").click()
        code = code.replace(f"127.0.0.1:{server.port}", f"127.0.0.1:{recorder.server_port}")
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
