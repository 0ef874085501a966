"""nginx with the configuration of deploy/compose in front of a server of a test."""

import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.manifests import DEPLOY
from tests.support.processes import DEADLINE, wait_until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
CONFIGURATION = DEPLOY / "compose" / "nginx.conf"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


class Nginx:
    """nginx in the foreground. Of the configuration its addresses and the folder of its files are
    changed, and nothing else.
    """

    def __init__(self, folder: Path, server: int) -> None:
        assert NGINX is not None
        self.port = _free_port()
        text = CONFIGURATION.read_text()
        changes = {
            "server onehead:8000": f"server 127.0.0.1:{server}",
            "listen 8080": f"listen 127.0.0.1:{self.port}",
            "/tmp/": f"{folder}/",
            "/dev/stdout": f"{folder}/access.log",
            "/dev/stderr": f"{folder}/error.log",
        }
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        (folder / "nginx.conf").write_text(text)
        self.command = [NGINX, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        subprocess.run([*self.command, "-t"], check=True, capture_output=True, timeout=DEADLINE)
        self.process = subprocess.Popen([*self.command, "-g", "daemon off;"])
        wait_until(lambda: _is_open(self.port), f"nginx listens; its log is {folder}/error.log")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE)
