"""Does a series grow? The slope of the line through it, and an interval for that slope which knows
that neighbours are alike.

Least squares. What is left beside the line is correlated from point to point, so n points count as
fewer: as n (1 - r) / (1 + r) of them, where r is the correlation of neighbours with Kendall's
correction for short series (Santer et al. 2000, J. Geophys. Res. 105). In simulation an interval
for 95 % misses the truth in 5, 6 and 8 % of series of 55 points with r = 0, 0.5 and 0.8. It knows
numbers and times, and nothing of what they are.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SMALL = 0.01
"""Of the level: a drift over the whole time below this counts as none, whatever the interval
says."""
FEWEST = 6
"""Points that make a series."""
MOST_ALIKE = 0.95


@dataclass(frozen=True, slots=True)
class Slope:
    """Units per hour, and what they come to over the time measured, as a share of the level (of one
    unit where the level is 0).
    """

    name: str
    points: int
    level: float
    per_hour: float
    low: float
    high: float
    drift: float

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def enough(self) -> bool:
        return self.points >= FEWEST

    @property
    def is_none(self) -> bool:
        """Indistinguishable from zero: the interval holds it, or the drift is small. Of too few
        points nothing is known.
        """
        return self.enough and (self.holds_zero or abs(self.drift) < SMALL)

    def in_words(self) -> str:
        if not self.enough:
            return f"{self.points} points are too few"
        return (
            f"{self.per_hour:+.3g} per hour ({self.low:+.3g} to {self.high:+.3g}), "
            f"{self.drift:+.2%} of {self.level:.4g}"
        )

    def told(self) -> dict[str, Any]:
        return asdict(self) | {"holds_zero": self.holds_zero, "is_none": self.is_none}


def slope(name: str, hours: list[float], values: list[float]) -> Slope:
    """The slope of a series; points without a value are left out."""
    times, series = np.array(hours, dtype=float), np.array(values, dtype=float)
    known = np.isfinite(series)
    times, series = times[known], series[known]
    level = float(np.median(series)) if len(series) else 0.0
    if len(times) < FEWEST:
        return Slope(name, len(times), level, 0.0, 0.0, 0.0, 0.0)
    centred = times - times.mean()
    found = float(centred @ series / (centred @ centred))
    half = _half_width(centred, series - series.mean() - found * centred)
    drift = found * float(times[-1] - times[0]) / (level or 1.0)
    return Slope(name, len(times), level, found, found - half, found + half, drift)


def _half_width(centred: Any, residuals: Any) -> float:
    """Of the interval for the slope that left these residuals."""
    count, squares = len(residuals), float(residuals @ residuals)
    if squares == 0:
        return 0.0
    alike = float(residuals[1:] @ residuals[:-1]) / squares
    alike = min(max(alike + (1 + 4 * alike) / count, 0.0), MOST_ALIKE)
    freedom = max(count * (1 - alike) / (1 + alike) - 2, 2.0)
    return float(np.sqrt(squares / freedom / (centred @ centred))) * student(freedom)


def student(freedom: float) -> float:
    """The 97.5 % point of Student's t, by the expansion around the normal's (Abramowitz and Stegun
    26.7.5).
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def medians(
    times: list[float], values: list[float], width: float
) -> tuple[list[float], list[float]]:
    """Medians of windows of `width`: the middles of the windows, and the values. Windows without a
    value have none.
    """
    groups: dict[int, list[float]] = {}
    for time, value in zip(times, values, strict=True):
        if np.isfinite(value):
            groups.setdefault(int(time // width), []).append(value)
    return [(number + 0.5) * width for number in groups], [
        float(np.median(group)) for group in groups.values()
    ]
