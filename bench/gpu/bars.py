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
PEERS = {"transformers, static cache": "peers/static", "transformers, continuous batching": "peers/continuous"}
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
    for name, path in {"engine": "serve/engine/1", "http": "serve/http/1", **PEERS}.items():
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


def kernel(found: Found) -> list[Check]:
    ours, checks = [row for row in attention_rows(found) if row["kernel"] == "onehead"], []
    for heads in at(found, "attention/onehead") or ["every model"]:
        shares = {r["case"]: r["share"] for r in ours if r["heads"] == heads and r["bytes"] >= FULL_BYTES and r["share"]}
        words = ", ".join(f"{case} {share:.0%}" for case, share in shares.items()) or MISSING
        what = f"attention of {heads}: {COPY_SHARE:.0%} of the copy's bandwidth from {FULL_BYTES / 1e6:.0f} MB on"
        checks.append(Check(what, bool(shares) and min(shares.values()) >= COPY_SHARE, words))
        one = at(found, f"attention/onehead/{heads}/{LATENCY_CASE}/seconds")
        words = f"{one * 1e6:.1f} us" if one else MISSING
        checks.append(Check(f"attention of {heads}: {LATENCY * 1e6:.0f} us for {LATENCY_CASE}", bool(one) and one <= LATENCY, words))
    return checks


def service(found: Found) -> list[Check]:
    rate, checks = rates(found), []
    for name, share in (("engine", ENGINE_SHARE), ("http", HTTP_SHARE)):
        reached = rate.get(name, 0.0) / rate["floor"] if "floor" in rate else 0.0
        words = f"{reached:.1%}, {rate[name]:,.0f} of {rate['floor']:,.0f} tokens/s" if reached else MISSING
        checks.append(Check(f"{name}: {share:.0%} of the floor's rate", reached >= share, words))
    return [*checks, *host(found)]


def ratios(found: Found) -> list[Check]:
    rate, checks = rates(found), []
    for name, path in PEERS.items():
        ratio = rate.get("engine", 0.0) / rate[name] if name in rate else 0.0
        words = f"{ratio:.2f} times: {rate['engine']:,.0f} beside {rate[name]:,.0f} tokens/s" if ratio else MISSING
        finished, requests = at(found, f"{path}/finished"), at(found, f"{path}/requests")
        words += f", cut at {finished} of {requests} requests" if finished != requests else ""
        checks.append(Check(f"engine: faster than {name}", ratio > 1, words))
    return checks


def host(found: Found) -> list[Check]:
    seconds, step, busy = (at(found, f"serve/host/{name}") for name in ("host", "step", "gpu"))
    words = f"{seconds * 1e3:.2f} ms, with {at(found, 'serve/host/sequences')} sequences" if seconds else MISSING
    short = Check(f"the host's part of a step: under {HOST_SECONDS * 1e3:.0f} ms", bool(seconds) and seconds < HOST_SECONDS, words)
    share = busy / step if busy else 0.0
    words = f"{share:.0%}: {busy * 1e3:.2f} of {step * 1e3:.2f} ms" if busy else MISSING
    return [short, Check(f"the host is overlapped: the GPU busy {BUSY_SHARE:.0%} of a step", share >= BUSY_SHARE, words)]


def numbers(found: Found) -> list[Check]:
    logits, greedy, engine = (at(found, f"numerics/{name}") or {} for name in ("logits", "greedy", "engine"))
    distance = logits.get("float32")
    words = MISSING if distance is None else f"{distance:.2g}"
    checks = [Check(f"float32 logits: within {EXACT} of the CPU's reference", distance is not None and distance <= EXACT, words)]
    distance, allowed = logits.get("bfloat16"), ROUNDING * logits.get("reference_bfloat16", 0.0)
    words = MISSING if distance is None else f"{distance:.3g} of {allowed:.3g}; the largest logit is {logits['largest']:.3g}"
    what = f"bfloat16 logits: within {ROUNDING:g} times what bfloat16 does to the reference"
    checks.append(Check(what, distance is not None and distance <= allowed, words))
    different = greedy.get("first_difference")
    same = different is None and greedy.get("tokens", 0) == greedy.get("asked")
    words = f"{greedy['tokens']} tokens" if "tokens" in greedy else MISSING
    words = words if different is None else f"token {different} differs, by {greedy['gap']:.3g} of a logit"
    checks.append(Check("greedy tokens in float32: the CPU's reference's", same, words))
    for heads, rows in (at(found, "numerics/kernel") or {"every model": {}}).items():
        words = f"{rows['differ']} of {rows['rows']} rows differ" if "differ" in rows else MISSING
        checks.append(Check(f"kernel of {heads}: the same bits alone and in company", rows.get("differ") == 0, words))
    if engine.get("deterministic"):
        words = engine["first_difference"] or f"{engine['requests']} requests"
        checks.append(Check("engine.deterministic: the same bits alone and in company", not engine["differ"], words))
    return checks


BARS = {"attention": kernel, "serve": service, "numerics": numbers, "peers": ratios}


def bars(found: Found, parts: list[str], judged: bool) -> list[Check]:
    """All of the parts that were to run; where speeds are not judged, of the numbers."""
    failed, missing = (list(notes(found, kind)) for kind in ("failed", "missing"))
    words = "; ".join(failed) or ", ".join(parts) + (f"; without {missing[0]}" if missing else "")
    chosen = [judge for part, judge in BARS.items() if part in parts and (judged or judge is numbers)]
    return [Check("every part ran whole", not failed, words), *(check for judge in chosen for check in judge(found))]
