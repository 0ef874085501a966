"""What was asked of the figures, and whether it holds. Floors and shares are taken here, from the ceilings of the same run.

Invariant: a bar whose figures are missing is missed, and says so. On a CPU, and of the small form, speeds are nothing to be judged: there
numbers alone have bars, and that every part ran.
"""

from collections.abc import Iterator
from typing import Any

from bench.gpu.floor import Ceilings, Shape, nano_vllm, step_seconds, workload_seconds
from bench.report import Check, Found

COPY_SHARE, FULL_BYTES = 0.85, 200e6
LATENCY, LATENCY_CASE = 8e-6, "1x1024"
ENGINE_SHARE, HTTP_SHARE = 0.55, 0.50
HOST_SECONDS, BUSY_SHARE = 1e-3, 0.90
EXACT, ROUNDING = 1e-3, 2.0
"""Largest distance of a float32 logit from the reference's; how many times what bfloat16 does to the reference itself."""
MISSING = "not measured"


def at(found: Found, path: str) -> Any:
    """The figure at "part/name/name"; None where there is none."""
    place: Any = found
    for step in path.split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def ceilings(found: Found) -> Ceilings | None:
    copy, matmul = at(found, "ceilings/copy"), at(found, "ceilings/matmul")
    return Ceilings(copy, matmul) if isinstance(copy, float) and isinstance(matmul, float) else None


def attention_rows(found: Found) -> Iterator[Found]:
    """One for each kernel, heads and case: bytes per second, and their share of the copy's."""
    copy = at(found, "ceilings/copy")
    for kernel, by_heads in at(found, "attention").items() if at(found, "attention") else ():
        for heads, by_case in by_heads.items() if isinstance(by_heads, dict) and kernel != "on" else ():
            for case, figure in by_case.items():
                if "seconds" in figure:
                    rate = figure["bytes"] / figure["seconds"]
                    yield figure | {"kernel": kernel, "heads": heads, "case": case, "rate": rate, "share": copy and rate / copy}


def step_rows(found: Found) -> Iterator[Found]:
    """One for each step: its seconds and its floor's."""
    limits, shape = ceilings(found), at(found, "checkpoint/shape")
    for case, figure in (at(found, "step") or {}).items():
        if isinstance(figure, dict) and "seconds" in figure and limits and shape:
            batch, context = map(int, case.split("x"))
            floor = step_seconds(Shape(**shape), batch, context, limits)
            yield figure | {"case": case, "floor": floor, "share": floor / figure["seconds"]}


def rates(found: Found) -> dict[str, float]:
    """Output tokens per second of the workload: the floor's, ours, and the peers'."""
    result, limits, shape = {}, ceilings(found), at(found, "checkpoint/shape")
    if limits and shape:
        workload = nano_vllm(*at(found, "checkpoint/workload"))
        lengths = [len(prompt) for prompt in workload.prompts]
        result["floor"] = workload.num_tokens / workload_seconds(Shape(**shape), lengths, workload.outputs, limits)
    for name, path in (
        ("engine", "serve/engine/1"),
        ("http", "serve/http/1"),
        ("transformers, static cache", "peers/static"),
        ("transformers, continuous batching", "peers/continuous"),
    ):
        rate = at(found, f"{path}/output_tokens_per_second")
        if rate is not None:
            result[name] = rate
    return result


def notes(found: Found, kind: str, path: str = "") -> Iterator[str]:
    """Where something "failed" or is "missing", and how."""
    for name, value in found.items():
        if name == kind and isinstance(value, str):
            yield f"{path}: {value}"
        elif isinstance(value, dict):
            yield from notes(value, kind, f"{path}/{name}".lstrip("/"))


# --- the bars


def speed(found: Found) -> list[Check]:
    checks = []
    ours = [row for row in attention_rows(found) if row["kernel"] == "onehead"]
    full = [row for row in ours if row["bytes"] >= FULL_BYTES and row["share"]]
    for heads in sorted({row["heads"] for row in ours}) or ["every model"]:
        shares = {row["case"]: row["share"] for row in full if row["heads"] == heads}
        words = ", ".join(f"{case} {share:.0%}" for case, share in shares.items()) or MISSING
        what = f"attention of {heads}: {COPY_SHARE:.0%} of the copy's bandwidth from {FULL_BYTES / 1e6:.0f} MB on"
        checks.append(Check(what, bool(shares) and min(shares.values()) >= COPY_SHARE, words))
        found_us = [row["seconds"] for row in ours if row["heads"] == heads and row["case"] == LATENCY_CASE]
        words = f"{found_us[0] * 1e6:.1f} us" if found_us else MISSING
        checks.append(
            Check(f"attention of {heads}: {LATENCY * 1e6:.0f} us for {LATENCY_CASE}", bool(found_us) and found_us[0] <= LATENCY, words)
        )
    rate = rates(found)
    for name, share in (("engine", ENGINE_SHARE), ("http", HTTP_SHARE)):
        reached = rate[name] / rate["floor"] if name in rate and "floor" in rate else None
        words = MISSING if reached is None else f"{reached:.1%}, {rate[name]:,.0f} of {rate['floor']:,.0f} tokens/s"
        checks.append(Check(f"{name}: {share:.0%} of the floor's rate", reached is not None and reached >= share, words))
    for name in list(rate)[1:]:
        if name.startswith("transformers") and "engine" in rate:
            ratio = rate["engine"] / rate[name]
            checks.append(Check(f"engine: faster than {name}", ratio > 1, f"{ratio:.2f} times, {rate[name]:,.0f} tokens/s"))
    return [*checks, *host(found)]


def host(found: Found) -> list[Check]:
    figures = at(found, "serve/host") or {}
    seconds, busy = figures.get("host"), figures.get("gpu")
    words = MISSING if seconds is None else f"{seconds * 1e3:.2f} ms of a step with {figures['sequences']} sequences"
    checks = [Check(f"the host's part of a step: under {HOST_SECONDS * 1e3:.0f} ms", seconds is not None and seconds < HOST_SECONDS, words)]
    share = busy / figures["step"] if busy else None
    words = MISSING if share is None else f"{share:.0%}: {busy * 1e3:.2f} of {figures['step'] * 1e3:.2f} ms"
    return [
        *checks,
        Check(f"the host is overlapped: the GPU busy {BUSY_SHARE:.0%} of a step", share is not None and share >= BUSY_SHARE, words),
    ]


def numbers(found: Found) -> list[Check]:
    checks, figures = [], at(found, "numerics/logits") or {}
    if "float32" in figures:
        exact, rounded, allowed = figures["float32"], figures["bfloat16"], ROUNDING * figures["reference_bfloat16"]
        checks.append(Check(f"float32 logits: within {EXACT} of the CPU's reference", exact <= EXACT, f"{exact:.2g}"))
        what = f"bfloat16 logits: within {ROUNDING:g} times what bfloat16 does to the reference"
        checks.append(Check(what, rounded <= allowed, f"{rounded:.3g} of {allowed:.3g}; the largest logit is {figures['largest']:.3g}"))
    figures = at(found, "numerics/greedy") or {}
    if "tokens" in figures:
        same = figures["first_difference"] is None and figures["tokens"] == figures["asked"]
        words = f"{figures['tokens']} tokens" if same else f"token {figures['first_difference']} differs, by {figures['gap']} of a logit"
        checks.append(Check("greedy tokens in float32: the CPU's reference's", same, words))
    for heads, figures in (at(found, "numerics/kernel") or {}).items():
        if "differ" in figures:
            words = f"{figures['differ']} of {figures['rows']} rows differ"
            checks.append(Check(f"kernel of {heads}: the same bits alone and in company", not figures["differ"], words))
    figures = at(found, "numerics/engine") or {}
    if figures.get("deterministic"):
        words = figures["first_difference"] or f"{figures['requests']} requests"
        checks.append(Check("engine.deterministic: the same bits alone and in company", not figures["differ"], words))
    return checks or [Check("numerics", False, MISSING)]


def bars(found: Found, parts: list[str], judged: bool) -> list[Check]:
    """All of them, of the parts that were to run."""
    failed, missing = (list(notes(found, kind)) for kind in ("failed", "missing"))
    words = "; ".join(failed) or ", ".join(parts) + (f"; without {missing[0]}" if missing else "")
    checks = [Check("every part ran whole", not failed, words), *(numbers(found) if "numerics" in parts else [])]
    return checks + speed(found) if judged else checks
