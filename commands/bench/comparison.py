"""A result of `onehead bench` beside an earlier one, so that a regression is seen.

Invariant: figures stand side by side only where the same was asked of the same model, in the same precision, on the same kind of device;
whatever else differs (machine, commit, options of the engine) may be what the comparison is about, and is printed. It knows result files
and nothing of how they come about.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from server.errors import UsageError

SAME_CASE = "prompt_tokens", "output_tokens", "requests"
SAME_MODEL = "model_id", "num_parameters", "model_dtype", "quantization", "kv_dtype", "model_device_type"
FIGURES: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("output tokens/s", ("output_tokens_per_second",), 1),
    ("requests/s", ("requests_per_second",), 1),
    ("failed", ("failed",), 1),
    ("TTFT p50, ms", ("time_to_first_token", "p50"), 1e3),
    ("TTFT p99, ms", ("time_to_first_token", "p99"), 1e3),
    ("inter-token latency p50, ms", ("inter_token_latency", "p50"), 1e3),
    ("inter-token latency p99, ms", ("inter_token_latency", "p99"), 1e3),
    ("end-to-end latency p50, s", ("e2e_latency", "p50"), 1),
    ("host's part of a step p50, ms", ("step", "host", "p50"), 1e3),
    ("model's part of a step p50, ms", ("step", "compute", "p50"), 1e3),
)
NOT_TOLD = {
    "settings": {"url", "seed", "warmup", "timeout", "concurrency", "rate", "output", "html", "compare", "config", "model", *SAME_CASE}
}
"""Settings that may differ between the two results without a note: they select what is run, not how fast it is."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The result in a file."""

    path: Path
    result: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Earlier":
        """Raises UsageError where the file holds no result."""
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise UsageError(f"compare {path}: cannot be read as JSON") from None
        if not isinstance(result, dict) or not _is_result(result):
            raise UsageError(f"compare {path}: holds no result of onehead bench")
        return cls(path, result)

    def must_be_of(self, kind: str, settings: dict[str, Any], loads: list[str]) -> None:
        """Raises UsageError where the earlier result is of another kind, or of other requests, or lacks one of these loads."""
        before = self.result.get("kind", "server")  # Old result files have no `kind`; all of them were measured on a server.
        if before != kind:
            raise UsageError(f"compare {self.path}: was measured {_where(before)}, this would be {_where(kind)}")
        self._must_agree(SAME_CASE, self.result["settings"], settings)
        known = {run["load"] for run in self.result["runs"]}
        missing = [load for load in loads if load not in known]
        if missing:
            raise UsageError(f"compare {self.path}: has no run {missing[0]!r}; it has {', '.join(sorted(known))}")

    def must_be_on(self, info: dict[str, Any]) -> None:
        """Raises UsageError where the earlier result is of another model, or of other dtypes or another type of device."""
        self._must_agree(SAME_MODEL, self.result["server"], info)

    def _must_agree(self, names: tuple[str, ...], before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in names:
            if name in before and name in now and before[name] != now[name]:
                raise UsageError(f"compare {self.path}: has {name} {before[name]}, this run {now[name]}; such figures cannot be compared")

    def differences(self, result: dict[str, Any]) -> list[str]:
        """What else is not as it was: of the machine, the server, the commit and the engine's options."""
        found = []
        for part in ("machine", "commit", "server", "settings"):
            before, now = (dict(leaves(part, each.get(part))) for each in (self.result, result))
            untold = {f"{part}.{name}" for name in NOT_TOLD.get(part, ())}
            for name in sorted((before.keys() & now.keys()) - untold):
                if before[name] != now[name]:
                    found.append(f"{name} {now[name]}, earlier {before[name]}")
        return found

    def table(self, runs: list[dict[str, Any]]) -> Table:
        """Every figure of these runs with the earlier one and the ratio of the two."""
        earlier = {run["load"]: run["figures"] for run in self.result["runs"]}
        table = Table(box=box.SIMPLE_HEAD, caption=f"earlier: {self.path}; ratio: now over earlier", caption_justify="left")
        for heading in ("load", "", "now", "earlier", "ratio"):
            table.add_column(heading, justify="right" if heading in ("now", "earlier", "ratio") else "left")
        for run in runs:
            for words, keys, unit in FIGURES:
                now, before = figure(run["figures"], keys), figure(earlier[run["load"]], keys)
                if now is None and before is None:
                    continue
                table.add_row(run["load"], words, cell(now, unit), cell(before, unit), f"{now / before:.3f}" if now and before else "-")
        return table


def _is_result(result: dict[str, Any]) -> bool:
    """Whether everything that is read of a result is there."""
    parts = isinstance(result.get("settings"), dict) and isinstance(result.get("server"), dict)
    runs = result.get("runs")
    return parts and isinstance(runs, list) and all(isinstance(run, dict) and {"load", "figures"} <= run.keys() for run in runs)


def _where(kind: str) -> str:
    return "without a server" if kind == "offline" else "over HTTP"


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every plain value inside, by its dotted name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    else:
        yield name, value


def figure(figures: Any, keys: tuple[str, ...]) -> float | None:
    """One figure of a run; None where it has none."""
    for key in keys:
        figures = figures.get(key) if isinstance(figures, dict) else None
    return figures if isinstance(figures, int | float) else None


def cell(value: int | float | None, unit: float) -> str:
    """A figure in its unit, as tables show it."""
    if value is None or isinstance(value, int):  # None, or a count.
        return "-" if value is None else str(value)
    return f"{value * unit:.2f}"
