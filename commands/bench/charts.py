"""Line charts as SVG, which a page draws in its own colours: series have the classes s0, s1, ..., and `earlier` where they are dashed.

Invariant: every text is escaped, and all that is drawn stands inside the picture. It knows nothing of benchmarks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, NARROW, HEIGHT = 560, 400, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
"""Room for the axes' words around what is drawn."""
NUM_STYLES = 8
"""Colours that a page has for series; further series begin with the first again."""
MAX_TICKS = 6
MAX_RATIO = 1e4
"""Of the ends of a logarithmic axis: values that are smaller stand at its beginning."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart: maps values from `low` to `high` to places from 0 to 1. `ticks`: marked values, and their words."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """The place of a value; that of the nearer end for one beyond the ends."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        value = min(max(value, self.low), self.high)
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart, through points (x, y). `style` numbers its colour; `is_earlier` draws it dashed, `has_marks` its points too."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: int
    is_earlier: bool = False
    has_marks: bool = True

    @property
    def classes(self) -> str:
        """The line's classes, by which the page's style sheet colours it."""
        return f"s{self.style % NUM_STYLES}{' earlier' if self.is_earlier else ''}"


def linear(title: str, values: Iterable[float], words: Callable[[float], str]) -> Axis:
    """From 0 to above the largest value, with ticks at 1, 2 or 5 times a power of ten."""
    most = max(values, default=0.0) or 1.0
    step = next(step for step in _steps(most) if most / step <= MAX_TICKS)
    count = math.ceil(most / step - 1e-9)
    return Axis(title, 0.0, count * step, tuple((number * step, words(number * step)) for number in range(count + 1)))


def _steps(most: float) -> Iterable[float]:
    power = 10.0 ** (math.floor(math.log10(most)) - 1)
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def logarithmic(title: str, values: Iterable[float], words: Callable[[float], str]) -> Axis:
    """From below the smallest positive value to above the largest, with ticks at powers of ten, or at 1, 2 and 5 times them."""
    positive = [value for value in values if value > 0] or [1.0]
    most = max(positive)
    least = max(min(positive), most / MAX_RATIO)
    powers = range(math.floor(math.log10(least)), math.floor(math.log10(most)) + 2)
    marks = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    low = max((mark for mark in marks if mark <= least), default=marks[0])
    high = min(mark for mark in marks if mark > most)
    within = [mark for mark in marks if low <= mark <= high]
    if len(within) > 2 * MAX_TICKS:
        within = [mark for mark in within if round(math.log10(mark), 6).is_integer()]
    return Axis(title, low, high, tuple((mark, words(mark)) for mark in within), is_log=True)


def ordinal(title: str, words: Sequence[str]) -> Axis:
    """One place for each word, at the values 0, 1, ..."""
    return Axis(title, -0.5, max(0, len(words) - 1) + 0.5, tuple(enumerate(words)))


def line_chart(about: str, series: Sequence[Series], x: Axis, y: Axis, width: int = WIDTH) -> Markup:
    """The picture. `about` says what it shows to those who do not see it."""

    def at(horizontal: float, vertical: float) -> tuple[str, str]:
        across, up = x.place(horizontal), y.place(vertical)
        return f"{LEFT + across * (width - LEFT - RIGHT):.1f}", f"{HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, HEIGHT, about)]
    for value, words in y.ticks:
        _, level = at(x.low, value)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, width - RIGHT, level, level))
        parts.append(Markup('<text class="tick end" x="{}" y="{}" dy="0.35em">{}</text>').format(LEFT - 8, level, words))
    for value, words in x.ticks:
        place, level = at(value, y.low)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(place, place, level, float(level) + 5))
        parts.append(Markup('<text class="tick middle" x="{}" y="{}">{}</text>').format(place, float(level) + 18, words))
    parts.append(Markup('<text class="axis middle" x="{}" y="{}">{}</text>').format((LEFT + width - RIGHT) / 2, HEIGHT - 6, x.title))
    turned = Markup('<text class="axis middle" transform="translate(12 {}) rotate(-90)">{}</text>')
    parts.append(turned.format((TOP + HEIGHT - BOTTOM) / 2, y.title))
    for each in series:
        places = [at(*point) for point in each.points]
        path = " ".join(",".join(place) for place in places)
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(each.classes, path))
        for (value, height), (across, level) in zip(each.points, places, strict=True) if each.has_marks else ():
            told = Markup("<title>{}: {}, {}</title>").format(each.name, _word(x, value), _word(y, height))
            parts.append(Markup('<circle class="{}" cx="{}" cy="{}" r="3.5">{}</circle>').format(each.classes, across, level, told))
    return Markup("\n").join([*parts, Markup("</svg>")])


def _word(axis: Axis, value: float) -> str:
    """A value as its axis spells it, else as a number."""
    return dict(axis.ticks).get(value, f"{value:.4g}")
