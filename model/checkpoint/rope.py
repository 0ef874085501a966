"""Rotary embeddings from a config, in transformers 4's and 5's spelling, to a Rotary. Plain floats,
no torch.

Scalings that depend on the length of the sequence so far (dynamic NTK) are refused, because cached
keys are already rotated.
"""

import math

from model.checkpoint.config import Config, short
from model.spec import CheckpointError, Rotary

CONTEXT = "original_max_position_embeddings"
MOST_RADIANS = 1e6
"""The largest rotation of one position: beyond it a float32 could not tell positions apart, so the
config must be wrong."""


def rotary(
    config: Config, dim: int, default_positions: int, *, interleaved: bool = False
) -> tuple[Rotary, int]:
    """The rotation of `dim` columns, and the number of positions that it supports, which is
    `default_positions` where the config does not say it.

    Reads transformers 5's `rope_parameters`, and 4's `rope_theta` with `rope_scaling`.
    """
    most = config.integer("max_position_embeddings", default_positions)
    base = config.number("rope_theta", 10000.0)
    return rotary_of(scaling_of(config), config.path, dim, most, base, interleaved=interleaved)


def scaling_of(config: Config) -> Config | None:
    """The object that describes RoPE scaling, in either spelling. Raises CheckpointError if both
    are there and differ.
    """
    old, new = config.sub("rope_scaling"), config.sub("rope_parameters")
    if old is not None and new is not None and old.values != new.values:
        raise CheckpointError(
            f"{config.path}: rope_scaling and rope_parameters differ; expected one of them"
        )
    scaling, context = new or old, config.get(CONTEXT)
    if scaling is not None and context is not None:
        # Older configs have it outside the object; if there are two, readers disagree about which
        # one counts.
        if scaling.values.get(CONTEXT, context) != context:
            inner = short(scaling.values[CONTEXT])
            raise CheckpointError(
                f"{config.path}: {CONTEXT} is {short(context)} beside and {inner} in {scaling.path}"
            )
        scaling = Config({**scaling.values, CONTEXT: context}, scaling.path)
    return scaling


def rotary_of(
    scaling: Config | None,
    path: str,
    dim: int,
    max_positions: int,
    base: float,
    *,
    interleaved: bool = False,
) -> tuple[Rotary, int]:
    """`rotary` for the object that describes RoPE scaling, which may contain the base too."""
    if dim % 2:
        raise CheckpointError(
            f"{path}: {dim} columns of a head are to be rotated, which go in pairs; expected an "
            "even number"
        )
    scaling = Config({}, path) if scaling is None else scaling
    base = scaling.number("rope_theta", base)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    scaling.get("type")
    if kind != "proportional":
        scaling.only("partial_rotary_factor", 1, 1.0, why="onehead rotates whole heads")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise CheckpointError(
            f"{scaling.path}: rope_type is {short(kind)}; supported: {', '.join(_SCALINGS)}"
        )
    try:
        frequencies, scale, most = _SCALINGS[kind](
            scaling, _frequencies(base, dim), base, max_positions
        )
    except ArithmeticError:
        frequencies, scale, most = [math.inf], math.inf, max_positions
    # Of proportional ones some pairs do not turn.
    turning = [f for f in frequencies if f or kind != "proportional"]
    if not all(0 < value < MOST_RADIANS for value in (*turning, scale)):
        raise CheckpointError(
            f"{scaling.path}: rope_theta {base} and what scales it for rope_type {kind!r} give "
            "angles that are no numbers"
        )
    for key in scaling.unread():
        if key != CONTEXT:
            raise CheckpointError(f"{scaling.path}: {key} has no meaning for rope_type {kind!r}")
    return Rotary(tuple(frequencies), scale, interleaved), most


def _frequencies(base: float, dim: int) -> tuple[float, ...]:
    return tuple(base ** (-i / dim) for i in range(0, dim, 2))


_Scaled = tuple[list[float], float, int]


def _plain(scaling: Config, frequencies: tuple[float, ...], base: float, most: int) -> _Scaled:
    return list(frequencies), 1.0, most


def _linear(scaling: Config, frequencies: tuple[float, ...], base: float, most: int) -> _Scaled:
    factor = scaling.number("factor")
    return [f / factor for f in frequencies], 1.0, most


def _proportional(
    scaling: Config, frequencies: tuple[float, ...], base: float, most: int
) -> _Scaled:
    """Gemma 4: the first pairs turn as if all did, a share of them, and the rest do not."""
    share, factor = scaling.number("partial_rotary_factor", 1.0), scaling.number("factor", 1.0)
    num_turning = int(share * 2 * len(frequencies) // 2)
    if not 0 < num_turning <= len(frequencies):
        raise scaling.wrong("partial_rotary_factor", "a share of a head of at least two columns")
    turning = [f / factor for f in frequencies[:num_turning]]
    return turning + [0.0] * (len(frequencies) - num_turning), 1.0, most


def _llama3(scaling: Config, frequencies: tuple[float, ...], base: float, most: int) -> _Scaled:
    """Llama 3.1: wavelengths longer than the original context are stretched, short ones kept, those
    between blended.
    """
    factor, low, high = (
        scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = scaling.integer(CONTEXT, most)
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"above low_freq_factor {low}")
    scaled = []
    for f in frequencies:
        share = min(1.0, max(0.0, (context * f / (2 * math.pi) - low) / (high - low)))
        scaled.append(f * (share + (1 - share) / factor))
    return scaled, 1.0, most


def _yarn(scaling: Config, frequencies: tuple[float, ...], base: float, most: int) -> _Scaled:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, equations 20 to 23): slow pairs are interpolated,
    fast ones kept, a ramp between.
    """
    context = scaling.integer(CONTEXT, most)
    factor = scaling.number("factor", max(1.0, most / context))
    fast, slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)
    dim = 2 * len(frequencies)

    def column(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = column(fast), column(slow)
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last
    kept = [1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(len(frequencies))]
    scaled = [f * (k + (1 - k) / factor) for f, k in zip(frequencies, kept, strict=True)]
    given, all_dim = (
        scaling.number(key, 0.0) if scaling.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    )
    scale = (
        yarn_scale(factor, given) / yarn_scale(factor, all_dim)
        if given and all_dim
        else yarn_scale(factor)
    )
    return scaled, scaling.number("attention_factor", scale), most


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """The growth of attention logits that goes with interpolation by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(scaling: Config, frequencies: tuple[float, ...], base: float, most: int) -> _Scaled:
    """LongRoPE (arXiv 2402.13753) within its original context. Beyond it, every cached key would
    have to be rotated again.
    """
    context = scaling.integer(CONTEXT, most)
    factor = scaling.number("factor", most / context)
    short = scaling.numbers("short_factor", len(frequencies))
    scaling.numbers("long_factor", len(frequencies))
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    scale = scaling.number("attention_factor", scale)
    return [f / s for f, s in zip(frequencies, short, strict=True)], scale, min(context, most)


_SCALINGS = {
    "default": _plain,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
