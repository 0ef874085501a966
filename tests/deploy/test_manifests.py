"""The chart's renderings and KServe's manifests: what they promise the server, and ask of it.
scripts/deploy has schemas and Helm.
"""

import json
import re
import shlex
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import ServeSettings, load
from server.service import START_SECONDS
from tests.support.manifests import (
    CHART,
    DEPLOY,
    PRESETS,
    RENDERED,
    Schemas,
    chart_digest,
    documents,
    mistakes,
    schemas,
)
from tests.support.observability import exposed
from tests.support.processes import ServerProcess

ALL = {preset: documents(RENDERED / f"{preset}.yaml") for preset in PRESETS}
KSERVE = [each for path in sorted((DEPLOY / "kserve").glob("*.yaml")) for each in documents(path)]
ENGINE_STOP_SECONDS = 5
every_preset = pytest.mark.parametrize("preset", PRESETS)


def of_kind(preset: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in ALL[preset] if each["kind"] == kind]


def pod_templates(preset: str) -> list[dict[str, Any]]:
    return [
        each["spec"]["template"] for kind in ("Deployment", "Job") for each in of_kind(preset, kind)
    ]


def server_pod(preset: str) -> dict[str, Any]:
    """The pod of the Deployment of servers."""
    (pod,) = [
        each for each in pod_templates(preset) if each["spec"]["containers"][0]["name"] == "server"
    ]
    return pod


def settings_of(
    container: dict[str, Any], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> ServeSettings:
    """The options that a server in a container would have."""
    for variable in container.get("env", []):
        monkeypatch.setenv(variable["name"], variable["value"])
    return load(ServeSettings, arguments, "onehead serve")


@every_preset
def test_the_committed_manifests_are_of_this_chart(preset: str) -> None:
    written = (RENDERED / f"{preset}.yaml").read_text()
    assert chart_digest() in written, (
        "the chart has changed: run `scripts/deploy render` and commit what it writes"
    )


@every_preset
def test_the_server_accepts_its_options_and_outlives_its_drain(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = server_pod(preset)["spec"]
    settings = settings_of(pod["containers"][0], pod["containers"][0].get("args", []), monkeypatch)
    assert (
        pod["terminationGracePeriodSeconds"]
        > ceil(settings.server.drain_timeout) + ENGINE_STOP_SECONDS
    )
    startup = pod["containers"][0]["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > START_SECONDS


@every_preset
def test_probes_ask_for_what_they_mean(preset: str) -> None:
    (server,) = server_pod(preset)["spec"]["containers"]
    paths = {
        name: server[name]["httpGet"]["path"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    (deployment,) = [
        each
        for each in of_kind(preset, "Deployment")
        if each["spec"]["template"] == server_pod(preset)
    ]
    single = deployment["spec"].get("replicas") == 1
    assert paths == {
        "startupProbe": "/ready",
        "livenessProbe": "/live",
        "readinessProbe": "/health" if single else "/ready",
    }


@every_preset
def test_pods_have_no_rights_that_they_do_not_need(preset: str) -> None:
    for template in pod_templates(preset):
        pod = template["spec"]
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        )
        for container in pod["containers"]:
            security = container["securityContext"]
            assert (
                security["readOnlyRootFilesystem"] is True
                and security["allowPrivilegeEscalation"] is False
            )
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}
            declared = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= declared
            assert all(
                "valueFrom" not in each or "fieldRef" in each["valueFrom"]
                for each in container.get("env", [])
            )


@every_preset
def test_selectors_choose_the_servers(preset: str) -> None:
    labels = server_pod(preset)["metadata"]["labels"]
    (service,) = [
        each for each in of_kind(preset, "Service") if each["spec"]["ports"][0]["name"] == "http"
    ]
    chosen = [
        service["spec"]["selector"],
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in of_kind(preset, "PodDisruptionBudget") + of_kind(preset, "InferencePool")
        ),
    ]
    assert all(selector.items() <= labels.items() for selector in chosen)
    for monitor in of_kind(preset, "ServiceMonitor"):
        assert (
            monitor["spec"]["selector"]["matchLabels"].items()
            <= service["metadata"]["labels"].items()
        )
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "onehead", (
            "the alert rules ask for this job"
        )
        assert monitor["spec"]["endpoints"][0]["port"] == "http"


@every_preset
def test_every_pod_has_a_network_policy(preset: str) -> None:
    policies = [
        each["spec"]["podSelector"]["matchLabels"].items()
        for each in of_kind(preset, "NetworkPolicy")
    ]
    assert [
        [selector <= pod["metadata"]["labels"].items() for selector in policies].count(True)
        for pod in pod_templates(preset)
    ] == [1 for _ in pod_templates(preset)]


def test_autoscalers_and_the_endpoint_picker_ask_for_metrics_that_there_are(
    embedded_server: ServerProcess,
) -> None:
    series = exposed(embedded_server.get("/metrics")[1])
    scaled = [
        trigger["metadata"]["query"]
        for each in of_kind("several", "ScaledObject")
        for trigger in each["spec"]["triggers"]
    ]
    chart = (CHART / "templates" / "autoscaling.yaml").read_text()
    asked = set(re.findall(r"onehead_\w+", " ".join(scaled))) | set(
        re.findall(r"name: (onehead_\w+)}", chart)
    )
    assert asked == {"onehead_requests_waiting", "onehead_requests_running"}
    picked = set(re.findall(r"Spec: (\w+)", (CHART / "endpoint-picker.yaml").read_text()))
    assert len(picked) == 4 and asked | picked <= series.keys()
    assert {"block_size", "num_gpu_blocks"} <= series["onehead_cache_config_info"], (
        "the endpoint picker reads these labels"
    )


def test_the_schema_of_the_values_names_all_of_them() -> None:
    def names(values: Any, prefix: str = "") -> set[str]:
        return {prefix + key for key in values} | {
            each
            for key, value in values.items()
            if isinstance(value, dict) and value
            for each in names(value, f"{prefix}{key}.")
        }

    def declared(schema: Any, prefix: str = "") -> set[str]:
        found = schema.get("properties", {})
        assert schema.get("additionalProperties") is not None or not found or not prefix, prefix
        return {prefix + key for key in found} | {
            each for key, value in found.items() for each in declared(value, f"{prefix}{key}.")
        }

    schema = declared(json.loads((CHART / "values.schema.json").read_text()))
    values = names(yaml.safe_load((CHART / "values.yaml").read_text()))
    free = {"resources", "inferencePool.resources"}
    quantities = {
        each
        for each in values
        if each.split(".")[-1] in ("cpu", "memory") and each.rsplit(".", 2)[0] in free
    }
    assert values - quantities == schema - {
        "global",
        "options.engine",
        "options.cache",
        "options.server",
    }


def test_kserve_starts_the_server_with_options_that_it_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = KSERVE[2]["spec"]["containers"][0]
    config = KSERVE[0]["spec"]["template"]["containers"][0]
    assert settings_of(runtime, runtime["args"], monkeypatch).port == 8080
    for tls in (True, False):
        line = re.sub(
            r"{{ if .GlobalConfig.EnableTLS }}(.*?){{ end }}",
            r"\1" if tls else "",
            config["args"][0],
        )
        exec_, command, serve, *arguments = shlex.split(re.sub(r"{{ [\w.]+ }}", "name", line))
        assert (exec_, command, serve) == ("exec", "onehead", "serve")
        assert bool(settings_of(config, arguments, monkeypatch).server.tls_certificate) is tls


def test_kserve_has_the_charts_endpoint_picker() -> None:
    picker = yaml.safe_load((CHART / "endpoint-picker.yaml").read_text())
    assert KSERVE[0]["spec"]["router"]["scheduler"]["config"]["inline"] == picker
    assert (
        KSERVE[0]["spec"]["labels"]["llm-d.ai/engine-type"]
        == server_pod("several")["metadata"]["labels"]["llm-d.ai/engine-type"]
    )


CUSTOM = """
kind: CustomResourceDefinition
spec:
  group: example.com
  names: {kind: Thing}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties:
                count: {type: integer, minimum: 1}
                port: {x-kubernetes-int-or-string: true}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
"""


@pytest.fixture
def custom(tmp_path: Path) -> Schemas:
    (tmp_path / "thing.yaml").write_text(CUSTOM)
    return schemas(tmp_path)


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"count": 1, "port": "http", "free": {"a": [1]}}, []),
        ({"count": 0}, ["spec.count"]),
        ({"cuont": 1}, ["spec"]),
        ({"port": [1]}, ["spec.port"]),
    ],
)
def test_schemas_of_custom_resources_see_mistakes(
    spec: dict[str, Any], wrong: list[str], custom: Schemas
) -> None:
    found = mistakes(
        {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {}, "spec": spec}, custom
    )
    assert found is not None and [each.split(":")[0] for each in found] == wrong
    assert mistakes({"apiVersion": "example.com/v2", "kind": "Thing"}, custom) is None
