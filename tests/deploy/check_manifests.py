"""python -m tests.deploy.check_manifests render HELM | compare HELM | crds FOLDER: what
scripts/deploy does with the chart and manifests.

render: writes deploy/kubernetes. compare: renders again, also with values that no preset has, and
fails where a committed file differs. crds: validates every custom resource by the
CustomResourceDefinitions in a folder.
"""

import subprocess
import sys
from pathlib import Path

from tests.support.manifests import (
    CHART,
    DEPLOY,
    PRESETS,
    RENDERED,
    documents,
    header,
    mistakes,
    schemas,
)

FURTHER = {
    "hpa": (["autoscaling.kind=hpa"], "kind: HorizontalPodAutoscaler"),
    "a download by each pod": (
        ["model.repository=org/name", "model.tokenSecret=hub-token"],
        "{name: HF_TOKEN_PATH, value: /etc/hub/token}",
    ),
    "a number": (
        ["options.server.max_body_bytes=4000000"],
        '{name: ONEHEAD_SERVER__MAX_BODY_BYTES, value: "4000000"}',
    ),
    "a list": (
        ["options.server.trusted_proxies={10.0.0.0/8,::1}"],
        '{name: ONEHEAD_SERVER__TRUSTED_PROXIES, value: "10.0.0.0/8,::1"}',
    ),
    "a long drain": (["options.server.drain_timeout=90.5"], "terminationGracePeriodSeconds: 106"),
    "a rule of egress": (["networkPolicy.egress[0].ports[0].port=4318"], "port: 4318"),
}
"""Values that no preset has, each with what has to be in the rendering."""
REFUSED = {
    "a misspelt value": ["replcas=2"],
    "two models": ["model.claim=a", "model.repository=b/c"],
    "a revision of nothing": ["model.revision=main"],
    "two files of keys": ["keys.secret=a", "keys.file=b"],
}

BUILT_IN = {
    "v1",
    "apps/v1",
    "autoscaling/v2",
    "batch/v1",
    "networking.k8s.io/v1",
    "policy/v1",
    "rbac.authorization.k8s.io/v1",
}
"""Versions of Kubernetes' own API that the manifests use: kubernetes-validate has their schemas."""


def template(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`helm template` of the chart."""
    command = [helm, "template", "onehead", str(CHART), "--namespace", "onehead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _set(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def rendering(helm: str, preset: str) -> str:
    """A preset's manifests as they are committed."""
    done = template(helm, "--values", str(CHART / f"values-{preset}.yaml"))
    if done.returncode:
        raise SystemExit(f"values-{preset}.yaml: {done.stderr}")
    return header(preset) + "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def render(helm: str) -> list[str]:
    RENDERED.mkdir(exist_ok=True)
    for preset in PRESETS:
        (RENDERED / f"{preset}.yaml").write_text(rendering(helm, preset))
    return []


def compare(helm: str) -> list[str]:
    wrong = [
        f"deploy/kubernetes/{preset}.yaml is not what the chart renders: run `scripts/deploy "
        "render`"
        for preset in PRESETS
        if (RENDERED / f"{preset}.yaml").read_text() != rendering(helm, preset)
    ]
    for name, (values, part) in FURTHER.items():
        done = template(helm, *_set(values))
        if done.returncode or part not in done.stdout:
            wrong.append(f"{name}: {done.stderr or 'does not render what was asked for'}")
    return wrong + [
        f"{name} is not refused"
        for name, values in REFUSED.items()
        if template(helm, *_set(values)).returncode == 0
    ]


def crds(folder: str) -> list[str]:
    known = schemas(Path(folder))
    wrong, valid, unknown = [], 0, set()
    for path in [*sorted(RENDERED.glob("*.yaml")), *sorted((DEPLOY / "kserve").glob("*.yaml"))]:
        for manifest in documents(path):
            found = mistakes(manifest, known)
            if found is None:
                unknown |= {manifest["kind"]} if manifest["apiVersion"] not in BUILT_IN else set()
            elif found:
                wrong += [f"{path.name} {manifest['kind']} {each}" for each in found]
            else:
                valid += 1
    print(
        f"{valid} custom resources are valid by {len(known)} schemas; no schema of "
        f"{', '.join(sorted(unknown)) or 'none'}"
    )
    return wrong if valid else [*wrong, f"{folder} has no schema of a custom resource in deploy/"]


if __name__ == "__main__":
    problems = {"render": render, "compare": compare, "crds": crds}[sys.argv[1]](sys.argv[2])
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(bool(problems))
