"""The bars (required values) of the figures, and whether they hold. Floors and shares are computed
here, from the ceilings of the same run.

Invariant: a bar whose figures are missing is missed, and says so; figures that cannot be judged
cost no other bar. On a CPU or with --small only the numerics have bars, and that every part ran;
speeds are not judged.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.common import CASES, HEADS
from bench.gpu.floor import Ceilings, Shape, nano_vllm, step_seconds, workload_seconds
from tests.support.checks import Check, Found

COPY_SHARE, FULL_BYTES = 0.85, 200e6
LATENCY, LATENCY_CASE = 10.5e-6, "1x1024"
"""Upper bound on the seconds of a decode kernel's call that joins splits, without storing keys; no
configuration that was tried on an H100 reached 8 us."""
ENGINE_SHARE, HTTP_SHARE = 0.55, 0.50
HOST_SECONDS, OVERLAPPED_SHARE = 1e-3, 0.95
EXACT, ROUNDING = 1e-3, 2.0
"""Largest distance of a float32 logit from the reference's; how many times what bfloat16 does to
the reference itself."""
PEERS = {
    "transformers, static cache": "peers/static",
    "transformers, continuous batching": "peers/continuous",
}
CEILINGS = "ceilings", "ceilings_after"
DRIFT = 0.05
"""Largest distance of a ceiling at the end of a run from its value at the beginning."""
MISSING = "not measured"


def at(found: Found, path: str) -> Any:
    """The figure at "part/name/name"; None where there is none."""
    place: Any = found
    for step in path.split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def ceiling(found: Found, name: str) -> float | None:
    """The rate of a "copy", a "read" or a "matmul": the better one of both ends of the run."""
    rates = [
        rate for part in CEILINGS if isinstance(rate := at(found, f"{part}/{name}/rate"), float)
    ]
    return max(rates, default=None)


def ceilings(found: Found) -> Ceilings | None:
    """The ceilings for a floor that cannot be beaten: the faster of copying and reading."""
    copy, read, matmul = (ceiling(found, name) for name in ("copy", "read", "matmul"))
    return Ceilings(max(copy, read or 0.0), matmul) if copy and matmul else None


def attention_rows(found: Found) -> Iterator[Found]:
    """One for each kernel, heads and case: bytes per second, and their shares of the copy's and of
    the read's.
    """
    copy, read = ceiling(found, "copy"), ceiling(found, "read")
    for kernel, by_heads in at(found, "attention").items() if at(found, "attention") else ():
        for heads, by_case in (
            by_heads.items() if isinstance(by_heads, dict) and kernel != "on" else ()
        ):
            for case, figure in by_case.items():
                if "seconds" in figure:
                    rate = figure["bytes"] / figure["seconds"]
                    shares = {"share": copy and rate / copy, "read_share": read and rate / read}
                    yield (
                        figure
                        | {"kernel": kernel, "heads": heads, "case": case, "rate": rate}
                        | shares
                    )


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
        result["floor"] = workload.num_tokens / workload_seconds(
            Shape(**shape), lengths, workload.outputs, limits
        )
    for name, path in {"engine": "serve/engine", "http": "serve/http", **PEERS}.items():
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


def full_cases(head_dim: int) -> list[str]:
    """Those in which K and V, in bfloat16, are large enough for bandwidth to be asked of the
    kernel.
    """
    return [
        f"{batch}x{context}"
        for batch, context in CASES
        if 4 * batch * context * head_dim >= FULL_BYTES
    ]


def kernel(found: Found) -> list[Check]:
    ours = {
        (row["heads"], row["case"]): row
        for row in attention_rows(found)
        if row["kernel"] == "onehead" and row["share"]
    }
    checks = []
    for num_heads, head_dim in HEADS:
        heads = f"{num_heads}x{head_dim}"
        rows = {case: ours.get((heads, case)) for case in full_cases(head_dim)}
        words = ", ".join(f"{case} {in_words(row)}" for case, row in rows.items())
        what = (
            f"attention of {heads}: {COPY_SHARE:.0%} of the copy's bandwidth from "
            f"{FULL_BYTES / 1e6:.0f} MB on, without writing keys"
        )
        checks.append(
            Check(
                what,
                all(row is not None and row["share"] >= COPY_SHARE for row in rows.values()),
                words,
            )
        )
        one = at(found, f"attention/onehead/{heads}/{LATENCY_CASE}/seconds")
        writing = at(found, f"attention/onehead/{heads}/{LATENCY_CASE}/seconds_with_write")
        words = (
            (f"{one * 1e6:.1f} us" + (f", with the write {writing * 1e6:.1f}" if writing else ""))
            if one
            else MISSING
        )
        checks.append(
            Check(
                f"attention of {heads}: {LATENCY * 1e6:g} us for {LATENCY_CASE}, without "
                "writing keys",
                bool(one) and one <= LATENCY,
                words,
            )
        )
    return checks


def in_words(row: Found | None) -> str:
    """Shares of one call."""
    if row is None:
        return MISSING
    of_the_read = f" (of the read's {row['read_share']:.0%})" if row["read_share"] else ""
    return f"{row['share']:.0%}{of_the_read}{'' if row['graph'] else ', no graph'}"


def service(found: Found) -> list[Check]:
    rate, checks = rates(found), []
    for name, share in (("engine", ENGINE_SHARE), ("http", HTTP_SHARE)):
        reached = rate.get(name, 0.0) / rate["floor"] if "floor" in rate else 0.0
        words = (
            f"{reached:.1%}, {rate[name]:,.0f} of {rate['floor']:,.0f} tokens/s"
            if reached
            else MISSING
        )
        checks.append(Check(f"{name}: {share:.0%} of the floor's rate", reached >= share, words))
    return [*checks, *host(found)]


def ratios(found: Found) -> list[Check]:
    rate, checks = rates(found), []
    for name, path in PEERS.items():
        ratio = rate.get("engine", 0.0) / rate[name] if rate.get(name) else 0.0
        words = (
            f"{ratio:.2f} times: {rate['engine']:,.0f} beside {rate[name]:,.0f} tokens/s"
            if ratio
            else MISSING
        )
        for done, asked, things in (
            ("finished", "requests", "requests"),
            ("steps", "asked_steps", "steps"),
        ):
            reached, wanted = at(found, f"{path}/{done}"), at(found, f"{path}/{asked}")
            words += f", cut at {reached} of {wanted} {things}" if reached != wanted else ""
        checks.append(Check(f"engine: faster than {name}", ratio > 1, words))
    return checks


def host(found: Found) -> list[Check]:
    seconds, overlapped = at(found, "serve/host/host"), at(found, "serve/host/overlapped")
    words = (
        f"{seconds * 1e3:.2f} ms, with {at(found, 'serve/host/sequences')} sequences"
        if seconds
        else MISSING
    )
    short = Check(
        f"the host's part of a step: under {HOST_SECONDS * 1e3:.0f} ms",
        bool(seconds) and seconds < HOST_SECONDS,
        words,
    )
    words = MISSING if overlapped is None else f"{overlapped:.0%} of steps"
    busy, step = at(found, "serve/gpu/seconds"), at(found, "serve/host/step")
    words += f"; the GPU at work {busy * 1e3:.2f} of {step * 1e3:.2f} ms" if busy and step else ""
    what = (
        f"the host is overlapped: {OVERLAPPED_SHARE:.0%} of steps launched before the GPU is "
        "done with the previous one"
    )
    return [short, Check(what, overlapped is not None and overlapped >= OVERLAPPED_SHARE, words)]


def steady(found: Found) -> list[Check]:
    """That the device was as fast at the end of the run as at its beginning: shares of it mean
    little where it was not.
    """
    rates = {
        name: [at(found, f"{part}/{name}/rate") for part in CEILINGS] for name in ("copy", "matmul")
    }
    changes = {
        name: after / before - 1 for name, (before, after) in rates.items() if before and after
    }
    words = ", ".join(f"{name} {change:+.1%}" for name, change in changes.items()) or MISSING
    holds = len(changes) == len(rates) and all(abs(change) <= DRIFT for change in changes.values())
    return [
        Check(
            f"copy and matrix product at the end: within {DRIFT:.0%} of the beginning", holds, words
        )
    ]


def launches(found: Found) -> list[Check]:
    kinds, waiting = at(found, "step/waits/kinds"), at(found, "step/waits/waiting")
    words = "; ".join(f"{kind}: {why}" for kind, why in (waiting or {}).items())
    words = words or (f"{len(kinds)} kinds of requests" if kinds else MISSING)
    return [
        Check(
            "no kind of request makes a launch wait for the GPU", bool(kinds) and not waiting, words
        )
    ]


def numbers(found: Found) -> list[Check]:
    logits, engine = (at(found, f"numerics/{name}") or {} for name in ("logits", "engine"))
    distance = logits.get("float32")
    words = MISSING if distance is None else f"{distance:.2g}"
    checks = [
        Check(
            f"float32 logits: within {EXACT} of the CPU's reference",
            distance is not None and distance <= EXACT,
            words,
        )
    ]
    distance, allowed = logits.get("bfloat16"), ROUNDING * logits.get("reference_bfloat16", 0.0)
    words = (
        MISSING
        if distance is None
        else f"{distance:.3g} of {allowed:.3g}; the largest logit is {logits['largest']:.3g}"
    )
    what = f"bfloat16 logits: within {ROUNDING:g} times what bfloat16 does to the reference"
    checks.append(Check(what, distance is not None and distance <= allowed, words))
    if "refused" in engine:
        return checks
    words = (
        engine["first_difference"] or f"{engine['requests']} requests"
        if "differ" in engine
        else MISSING
    )
    return [
        *checks,
        Check("engine.deterministic: batch-invariant", engine.get("differ") == 0, words),
    ]


BARS = {
    "ceilings_after": steady,
    "attention": kernel,
    "step": launches,
    "serve": service,
    "numerics": numbers,
    "peers": ratios,
}


def judge(judges: Callable[[Found], list[Check]], found: Found) -> list[Check]:
    try:
        return judges(found)
    except Exception as error:
        return [
            Check(
                f"{judges.__name__}: can be judged",
                False,
                f"{MISSING}: {type(error).__name__}: {error}",
            )
        ]


def bars(found: Found, parts: list[str], judged: bool) -> list[Check]:
    """The checks of the parts that were to run; only those of the numerics where speeds are not
    judged.
    """
    failed, missing = (list(notes(found, kind)) for kind in ("failed", "missing"))
    words = "; ".join(failed) or ", ".join(parts) + (f"; without {missing[0]}" if missing else "")
    chosen = [
        judges for part, judges in BARS.items() if part in parts and (judged or judges is numbers)
    ]
    return [
        Check("every part ran whole", not failed, words),
        *(check for judges in chosen for check in judge(judges, found)),
    ]
