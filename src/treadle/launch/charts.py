"""Charts as SVG, for pages that load nothing and run nothing. Pure; colours are the page's own (CSS classes).

draw(Chart("entropy", (Series("entropy", ((1, 0.9), (2, 0.7))),)))
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from treadle.track.plot import HeldOutPoint, smoothed

Point = tuple[float, float]
WIDTH, HEIGHT = 460.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 10.0, 28.0
MOST_POINTS = 300  # more than a chart has pixels for; their means are drawn
MOST_HINTS = 150  # points that tell their value when pointed at
LEAST_SPREAD = 1e-9  # relative to the values: smaller differences are rounding errors
LEAST_NUMBER = 1e-300  # smaller ones count as 0
TALL = 2.5  # times what 98 of 100 stay below: an axis for that would leave nothing to see of the others


@dataclass(frozen=True)
class Series:
    """`is_noisy`: the values are drawn faintly, and their course clearly. `colour`: 1 to 5, as the page names them.
    `gaps`: the steps without a value, in order; the line is broken there."""

    name: str
    points: tuple[Point, ...]
    colour: int = 1
    is_noisy: bool = False
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """`healthy`: a band that is drawn behind; `is_stacked`: each series stands on the one before it."""

    title: str
    series: tuple[Series, ...]
    unit: str = ""
    healthy: tuple[float, float] | None = None
    held_out: tuple[HeldOutPoint, ...] = ()
    from_zero: bool = False
    is_stacked: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.held_out and not any(series.points for series in self.series)

    @property
    def cut_at(self) -> float | None:
        """Where a few towers of a stack are cut off, so that the rest can be seen; None: nowhere."""
        heights = sorted(y for _, y in _stacked(self.series)[-1]) if self.is_stacked and not self.is_empty else []
        usual = heights[int(0.98 * (len(heights) - 1))] if heights else 0.0
        return 1.1 * usual if heights and 0 < TALL * usual < heights[-1] else None


@dataclass(frozen=True)
class _Scale:
    x: Callable[[float], float]
    y: Callable[[float], float]
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]


def draw(chart: Chart) -> str:
    shown = [replace(series, points=thinned(series.points)) for series in chart.series if series.points]
    stack = _stacked(shown) if chart.is_stacked else []
    scale = _scale_of(chart, shown, [point for top in stack for point in top])
    parts = [*_frame(chart, scale)]
    if chart.is_stacked:
        parts += _areas(shown, stack, scale)
    else:
        parts += [line for series in shown for line in _lines(series, scale)]
    parts += [mark for point in chart.held_out for mark in _held_out(point, scale)]
    label = escape(f"{chart.title}: {told(chart)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{label}">' + "".join(parts) + "</svg>"


def told(chart: Chart) -> str:
    """The chart in words: where each series began and where it is now."""
    words = []
    for series in chart.series:
        if series.points:
            first, last = series.points[0][1], series.points[-1][1]
            words.append(f"{series.name} from {number(first)} to {number(last)}")
    return "; ".join(words) or "nothing was measured"


def number(value: float) -> str:
    """
    >>> number(0.01234), number(1234.5), number(0.0), number(3.0)
    ('0.0123', '1,234', '0', '3')
    """
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Means of neighbours, so that at most so many are left.

    >>> thinned([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)], most=2)
    ((1.5, 2.0), (3.5, 6.0))
    """
    if len(points) <= most:
        return tuple(points)
    bins = [points[len(points) * i // most : len(points) * (i + 1) // most] for i in range(most)]
    return tuple((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in bins)


def pieces(points: Sequence[Point], gaps: Sequence[float]) -> list[tuple[Point, ...]]:
    """The line cut where half of the steps from one point to the next have no value; of thinned points that are many.

    >>> pieces(((1, 0.5), (2, 0.6), (4, 0.7)), gaps=(3,))
    [((1, 0.5), (2, 0.6)), ((4, 0.7),)]
    """
    cuts = [
        place
        for place, ((left, _), (right, _)) in enumerate(pairwise(points), start=1)
        if 2 * (bisect(gaps, right) - bisect(gaps, left)) >= right - left
    ]
    return [tuple(points[begin:end]) for begin, end in pairwise([0, *cuts, len(points)])]


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Round numbers that reach from below `low` to above `high`; at least two.

    >>> ticks(0.0, 0.93)
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    >>> ticks(0.0, 3e-14), ticks(1.0, 1.0 + 2e-16)
    ((0.0, 1e-14, 2e-14, 3e-14), (1.0, 1.2))
    """
    largest = max(abs(low), abs(high))
    spread = high - low if high - low > LEAST_SPREAD * largest else largest
    rough = (spread if spread > LEAST_NUMBER else 1.0) / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{step * i:.12g}") for i in range(first, max(last, first + 1) + 1))


def _scale_of(chart: Chart, shown: Sequence[Series], stacked: Sequence[Point]) -> _Scale:
    points = [*stacked, *(point for series in shown for point in series.points)]
    xs = [x for x, _ in points] + [float(point.step) for point in chart.held_out] or [0.0, 1.0]
    ys = [y for _, y in points] + [edge for point in chart.held_out for edge in (point.low, point.high)] or [0.0, 1.0]
    low = min(0.0, *ys) if chart.from_zero or chart.is_stacked else min(ys)
    y_ticks = ticks(low, chart.cut_at or max(ys))
    left, right = min(xs), max(xs)
    if right == left:
        left, right = left - 0.5, right + 0.5
    x_ticks = tuple(tick for tick in ticks(left, right) if left <= tick <= right and tick == int(tick))
    bottom, top = y_ticks[0], y_ticks[-1]
    return _Scale(
        lambda x: LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT),
        lambda y: HEIGHT - BOTTOM - (min(y, top) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM),
        x_ticks,
        y_ticks,
    )


def _frame(chart: Chart, scale: _Scale) -> list[str]:
    right = WIDTH - RIGHT
    parts = []
    if chart.healthy is not None:
        bottom, top = scale.y_ticks[0], scale.y_ticks[-1]
        low, high = (min(max(edge, bottom), top) for edge in chart.healthy)
        height = scale.y(low) - scale.y(high)
        if height > 0:
            where = f'x="{LEFT:.0f}" y="{scale.y(high):.1f}" width="{right - LEFT:.0f}" height="{height:.1f}"'
            parts.append(f'<rect class="healthy" {where}><title>healthy range</title></rect>')
    for tick in scale.y_ticks:
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6:.0f}" y="{y + 3.8:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in scale.x_ticks:
        where = f'x="{scale.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16:.0f}"'
        parts.append(f'<text class="tick" {where} text-anchor="middle">{number(tick)}</text>')
    return parts


def _lines(series: Series, scale: _Scale) -> list[str]:
    course = series.points
    parts = []
    if series.is_noisy and len(course) > 2:
        parts += [_path(piece, scale, f"line c{series.colour} faint") for piece in pieces(course, series.gaps)]
        course = tuple(zip((x for x, _ in course), smoothed([y for _, y in course]), strict=True))
    parts += [_path(piece, scale, f"line c{series.colour}") for piece in pieces(course, series.gaps)]
    if len(series.points) <= MOST_HINTS:
        parts += [_hint(series, x, y, scale) for x, y in series.points]
    return parts


def _path(points: Sequence[Point], scale: _Scale, kind: str) -> str:
    if len(points) == 1:
        x, y = points[0]
        return f'<circle class="dot {kind}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3"/>'
    return f'<polyline class="{kind}" points="{_places(points, scale)}"/>'


def _hint(series: Series, x: float, y: float, scale: _Scale) -> str:
    words = escape(f"step {number(x)}: {series.name} {number(y)}")
    return f'<circle class="hint" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="6"><title>{words}</title></circle>'


def _held_out(point: HeldOutPoint, scale: _Scale) -> list[str]:
    x, y = scale.x(point.step), scale.y(point.accuracy)
    low, high = scale.y(point.low), scale.y(point.high)
    words = (
        f"step {point.step}: held-out accuracy {100 * point.accuracy:.1f} % "
        f"({100 * point.low:.1f} to {100 * point.high:.1f})"
    )
    whisker = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"
    diamond = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
    return [
        f'<path class="whisker" d="{whisker}"/>',
        f'<path class="held-out" d="{diamond}"><title>{words}</title></path>',
    ]


def _stacked(shown: Sequence[Series]) -> list[tuple[Point, ...]]:
    """The upper edge of each series, on top of those before it. All have the same steps."""
    edges: list[tuple[Point, ...]] = []
    for series in shown:
        below = edges[-1] if edges else tuple((x, 0.0) for x, _ in series.points)
        edges.append(tuple((x, y + base) for (x, y), (_, base) in zip(series.points, below, strict=True)))
    return edges


def _areas(shown: Sequence[Series], stack: Sequence[Sequence[Point]], scale: _Scale) -> list[str]:
    parts = []
    floor: Sequence[Point] = [(x, 0.0) for x, _ in stack[0]] if stack else []
    for series, edge in zip(shown, stack, strict=True):
        outline = [*edge, *reversed(floor)]
        parts.append(f'<polygon class="area c{series.colour}" points="{_places(outline, scale)}"/>')
        floor = edge
    return parts


def _places(points: Sequence[Point], scale: _Scale) -> str:
    return " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
