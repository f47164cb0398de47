"""Plot reward and accuracy per step, and the held-out accuracy with its intervals (reward.png)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.errors import MissingExtra

_ACCURACY, _REWARD, _HELD_OUT, _QUIET = "#1f6fb4", "#e08214", "#1b1b1b", "#6b6b6b"


@dataclass(frozen=True)
class HeldOutPoint:
    """One evaluation: accuracy 0.73 at step 50, 95 % interval 0.67 to 0.78."""

    step: int
    accuracy: float
    low: float
    high: float


def pooled(parts: Sequence[tuple[int, HeldOutPoint]]) -> HeldOutPoint:
    """The accuracy over the prompts of several evaluations, (number of prompts, point) each, at one step.

    The interval combines theirs: the distances to the bounds add up as independent errors do (Zou and Donner's MOVER).

    >>> point = HeldOutPoint(0, 0.5, 0.4, 0.6)
    >>> [round(bound, 3) for bound in (pooled([(100, point)] * 2).low, pooled([(100, point)] * 2).high)]
    [0.429, 0.571]
    """
    accuracy, low, high = pooled_mean([(num, (point.accuracy, point.low, point.high)) for num, point in parts])
    return HeldOutPoint(parts[0][1].step, accuracy, max(0.0, low), min(1.0, high))


def pooled_mean(parts: Sequence[tuple[int, tuple[float, float, float]]]) -> tuple[float, float, float]:
    """The mean over the prompts of several evaluations and its interval, of (number of prompts, (mean, low, high))."""
    total = sum(num for num, _ in parts) or 1
    shares = [(num / total, *estimate) for num, estimate in parts]
    mean = sum(share * own for share, own, _, _ in shares)
    below = math.hypot(*(share * (own - low) for share, own, low, _ in shares))
    above = math.hypot(*(share * (high - own) for share, own, _, high in shares))
    return mean, mean - below, mean + above


def load_pyplot() -> Any:
    """Import matplotlib's pyplot with a backend that draws into files."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtra("a plot needs matplotlib", fix="pip install 'treadle[train]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_reward(steps: Sequence[Mapping[str, Any]], held_out: Sequence[HeldOutPoint], *, title: str) -> Any:
    """The plot of `steps` (lines of metrics.jsonl) as a matplotlib figure, for `.savefig(file)`.

    Made without pyplot: the backend of a notebook is left unchanged.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("a plot needs matplotlib", fix="pip install 'treadle[train]'") from None
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    _draw_series(axes, steps, "reward", "mean reward", _REWARD)
    _draw_series(axes, steps, "rollout/accuracy", "accuracy in training", _ACCURACY)
    _draw_held_out(axes, held_out)
    _style_axes(axes, title)
    return figure


def smoothed(values: Sequence[float], weight: float = 0.75) -> list[float]:
    """Exponential moving average with bias correction: [1, 1, 1] stays [1, 1, 1].

    >>> [round(value, 2) for value in smoothed([0.0, 1.0], weight=0.5)]
    [0.0, 0.67]
    """
    mean, mass, result = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        result.append(mean / mass)
    return result


def _draw_series(axes: Any, steps: Sequence[Mapping[str, Any]], key: str, label: str, colour: str) -> None:
    """Draw the measured values faintly and their moving average clearly."""
    known = [(step["step"], float(step[key])) for step in steps if isinstance(step.get(key), (int, float))]
    if not known:
        return
    x, y = [step for step, _ in known], [value for _, value in known]
    axes.plot(x, y, color=colour, alpha=0.35, linewidth=1.0, marker="o", markersize=2.2, zorder=2)
    axes.plot(x, smoothed(y), color=colour, linewidth=2.2, label=label, zorder=3)


def _draw_held_out(axes: Any, points: Sequence[HeldOutPoint]) -> None:
    if not points:
        return
    from matplotlib import patheffects as path_effects

    axes.errorbar(
        [point.step for point in points],
        [point.accuracy for point in points],
        yerr=[
            [max(0.0, point.accuracy - point.low) for point in points],
            [max(0.0, point.high - point.accuracy) for point in points],
        ],
        fmt="D", color=_HELD_OUT, markersize=6, capsize=4, linewidth=1.4, zorder=4,
        label="held-out accuracy (95 % interval)", clip_on=False,
    )  # fmt: skip
    halo = [path_effects.withStroke(linewidth=3, foreground="white")]  # readable where it crosses a curve
    last = max(point.step for point in points)
    for point in points:
        is_last = point.step == last and last > 0
        axes.annotate(
            f"{100 * point.accuracy:.{0 if point.accuracy >= 0.1 else 1}f} %",
            (point.step, point.accuracy if is_last else max(point.high, point.accuracy)),
            xytext=(9, 0) if is_last else (0, 7),
            textcoords="offset points",
            ha="left" if is_last else "center",
            va="center" if is_last else "bottom",
            fontweight="bold",
            color=_HELD_OUT,
            path_effects=halo,
            zorder=5,
        )


def _style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_HELD_OUT)
    axes.set_xlabel("optimizer step", color=_QUIET)
    axes.tick_params(colors=_QUIET)
    axes.xaxis.get_major_locator().set_params(integer=True)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, 1.0))
    left, right = axes.dataLim.intervalx
    if right > left:
        axes.set_xlim(left - 0.06 * (right - left), right + 0.08 * (right - left))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", frameon=False, fontsize=9)
