"""The manifests of deploy/ as tests and scripts/deploy read them: the chart's three renderings,
KServe's files, and schemas of custom resources.
"""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "onehead"
RENDERED = DEPLOY / "kubernetes"
PRESETS = ("cpu", "one-gpu", "several")
"""The chart's files of values, each of which is rendered."""
Schemas = dict[tuple[str, str], dict[str, Any]]
"""Schemas of custom resources by apiVersion and kind."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file, empty ones left out."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def chart_digest() -> str:
    """SHA-256 of the chart's files, names included: what a rendering is of."""
    digest = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        digest.update(
            f"{path.relative_to(CHART).as_posix()}\0".encode() + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()


def header(preset: str) -> str:
    """The first lines of a rendering, which say how it was made and of what."""
    return (
        "# By scripts/deploy render: helm template onehead deploy/helm/onehead --namespace "
        f"onehead --values values-{preset}.yaml.\n"
        "# For kubectl without Helm; put your image in. Of the chart with the SHA-256 "
        f"{chart_digest()}\n"
    )


def schemas(folder: Path) -> Schemas:
    """The schemas of every CustomResourceDefinition in a folder of YAML files. Fields that they
    lack are refused, as by kubectl.
    """
    found: Schemas = {}
    for path in sorted(folder.glob("*.yaml")):
        for definition in documents(path):
            if definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                schema["properties"] |= {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                }
                found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def _strict(schema: Any) -> Any:
    """A structural schema in JSON Schema's words."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if (
        isinstance(schema.get("properties"), dict)
        and "type" in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        strict.setdefault("additionalProperties", False)
    return strict


def mistakes(manifest: dict[str, Any], known: Schemas) -> list[str] | None:
    """What a custom resource has that its schema does not allow, in words; None where there is no
    schema of it.
    """
    schema = known.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        return None
    return [
        f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
        for error in Draft7Validator(schema).iter_errors(manifest)
    ]
