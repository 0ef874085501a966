"""Docker Compose, systemd, SkyPilot, llama-swap and LiteLLM: what their files in deploy/ give the
server, and promise of it.
"""

import re
import shlex
import shutil
import subprocess
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import ServeSettings, load
from server.errors import HostNotAllowed
from server.http.hosts import AllowedHosts
from server.service import START_SECONDS
from tests.support.manifests import DEPLOY
from tests.support.observability import DASHBOARD, PROMETHEUS
from tests.support.paths import ROOT

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; it comes with Prometheus"
)
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed; systemd has it",
)
UNIT = DEPLOY / "systemd" / "onehead.service"
DRAIN = ServeSettings.model_fields["server"].default.drain_timeout
ENGINE_STOP_SECONDS = 5
EXPOSURE = 20
"""Tenths of systemd's exposure level: "OK", of 0 to 10."""


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read("compose.yaml")["services"]


def options_of(line: str) -> ServeSettings:
    """The options of a command line, of which `onehead serve` is a part."""
    words = shlex.split(line)
    return load(ServeSettings, words[words.index("serve") + 1 :], "onehead serve")


def test_compose_gives_the_server_options_that_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = COMPOSE["onehead"]
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, value)
    section = load(ServeSettings, [], "onehead serve").server
    # nginx alone is believed, and names of other hosts are not answered on a port that is published
    # on a loopback address.
    (proxy,) = section.trusted_proxies
    assert (
        str(proxy.network_address) == COMPOSE["nginx"]["networks"]["api"]["ipv4_address"]
        and proxy.num_addresses == 1
    )
    (subnet,) = read("compose.yaml")["networks"]["api"]["ipam"]["config"]
    assert proxy.network_address in ip_network(subnet["subnet"])
    hosts = AllowedHosts(section.allowed_hosts, "0.0.0.0")
    for host in (b"localhost:8000", b"127.0.0.1:8000", b"onehead:8000"):
        hosts.check({"headers": [(b"host", host)]})
    with pytest.raises(HostNotAllowed):
        hosts.check({"headers": [(b"host", b"page.example")]})
    assert int(server["stop_grace_period"].removesuffix("s")) > DRAIN + ENGINE_STOP_SECONDS
    assert server["build"]["context"] == ".." and (DEPLOY / ".." / "Dockerfile").is_file()


@pytest.mark.parametrize("name", COMPOSE)
def test_services_are_hardened_and_stay_on_this_machine(name: str) -> None:
    service = COMPOSE[name]
    assert (
        service["read_only"]
        and service["cap_drop"] == ["ALL"]
        and service["security_opt"] == ["no-new-privileges:true"]
    )
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (
            (DEPLOY / source).is_file()
            if source.startswith(".")
            else source in read("compose.yaml")["volumes"]
        ), volume


def test_services_find_each_other() -> None:
    nginx = (DEPLOY / "compose" / "nginx.conf").read_text()
    assert (
        "server onehead:8000 " in nginx
        and "listen 8080;" in nginx
        and COMPOSE["nginx"]["ports"] == ["127.0.0.1:8000:8080"]
    )
    prometheus = read("compose/prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    assert job == {"job_name": "onehead", "static_configs": [{"targets": ["onehead:8000"]}]}
    example = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    assert [(prometheus[key], prometheus["global"]) for key in ("rule_files",)] == [
        (example["rule_files"], example["global"])
    ]
    assert (
        read("compose/grafana-datasource.yaml")["datasources"][0]["url"] == "http://prometheus:9090"
    )
    (folder,) = {
        each["options"]["path"] for each in read("compose/grafana-dashboards.yaml")["providers"]
    }
    assert (
        f"./observability/grafana/{DASHBOARD.name}:{folder}/{DASHBOARD.name}:ro"
        in COMPOSE["grafana"]["volumes"]
    )


def test_the_gpu_file_changes_the_server_alone() -> None:
    assert set(read("compose.gpu.yaml")["services"]) == {"onehead"}


@needs_promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    for path in (DEPLOY / "compose" / "prometheus.yaml", PROMETHEUS / "alerts.yaml"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def unit(path: Path = UNIT) -> dict[str, list[str]]:
    """The settings of a unit file."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


@needs_systemd
@pytest.mark.parametrize("gpu", [False, True])
def test_systemd_accepts_the_unit_and_its_exposure_is_low(gpu: bool, tmp_path: Path) -> None:
    # systemd looks for the program, which is not installed here.
    text = UNIT.read_text().replace("/opt/onehead/bin/onehead", shutil.which("true") or "")
    (tmp_path / "onehead.service").write_text(text)
    if gpu:
        (tmp_path / "onehead.service.d").mkdir()
        shutil.copy(DEPLOY / "systemd" / "gpu.conf", tmp_path / "onehead.service.d")
    verify = ["systemd-analyze", "verify", str(tmp_path / "onehead.service")]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    security = [
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--threshold={EXPOSURE}",
        "--no-pager",
        verify[-1],
    ]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_unit_outlives_a_drain_and_knows_the_exit_statuses() -> None:
    settings = unit()
    assert int(settings["TimeoutStopSec"][0]) > DRAIN + ENGINE_STOP_SECONDS
    assert (settings["RestartPreventExitStatus"], settings["SuccessExitStatus"]) == (
        ["2 78"],
        ["75"],
    )
    words = shlex.split(settings["ExecStart"][0])
    assert words[1:3] == ["serve", "--config"] and words[3].startswith(
        "/etc/" + settings["ConfigurationDirectory"][0]
    )
    cache = "/var/cache/" + settings["CacheDirectory"][0]
    paths = [word for line in settings["Environment"] for word in line.split() if "/" in word]
    assert len(paths) == 3 and all(word.split("=")[1].startswith(cache) for word in paths)


def test_skypilot_starts_the_server_only_with_a_key() -> None:
    task = read("skypilot.yaml")
    script = task["run"].replace("exec .venv/bin/onehead", "echo onehead")
    for digest in ("", "0" * 64):
        command = ["bash", "-eu", "-c", script]
        done = subprocess.run(
            command,
            env=task["envs"] | {"KEY_DIGEST": digest},
            capture_output=True,
            text=True,
            check=False,
        )
        if digest:
            settings = options_of(done.stdout)
            assert (
                str(settings.model) == task["envs"]["MODEL"]
                and settings.port == task["resources"]["ports"]
            )
            assert settings.server.api_keys
        else:
            assert (
                done.returncode != 0
                and "KEY_DIGEST: the port is open to the Internet" in done.stderr
            )
    assert (ROOT / task["setup"].strip()).is_file()


@pytest.mark.parametrize("model", read("llama-swap.yaml")["models"])
def test_llama_swap_starts_the_server(model: str) -> None:
    config = read("llama-swap.yaml")
    entry = config["models"][model]
    line = (
        entry["cmd"]
        .replace("${onehead}", config["macros"]["onehead"])
        .replace("${PORT}", "5800")
        .replace("${MODEL_ID}", model)
    )
    settings = options_of(line)
    assert (settings.server.model_name, settings.port) == (model, 5800)
    assert (
        entry["proxy"].replace("${PORT}", "5800") == "http://127.0.0.1:5800"
        and entry["checkEndpoint"] == "/ready"
    )
    assert config["healthCheckTimeout"] >= START_SECONDS
    assert config["unloadTimeout"] > settings.server.drain_timeout + ENGINE_STOP_SECONDS


def test_litellm_holds_no_secret() -> None:
    text = (DEPLOY / "litellm.yaml").read_text()
    assert re.findall(r"(?:api_key|api_base|master_key): (\S+)", text) == [
        "os.environ/ONEHEAD_URL",
        "os.environ/ONEHEAD_KEY",
        "os.environ/LITELLM_MASTER_KEY",
    ]
