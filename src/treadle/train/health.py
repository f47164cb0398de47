"""Says in plain words when a figure of the run leaves its healthy range, and when it is back. Pure.

A line is said when something begins, again when it has become much worse or has lasted long, and once when it is over:
a line on every step would be read by nobody. A reward that does not rise is no alarm: that is what training looks like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from treadle.train.health_rules import ALIGNMENT, CLOSED_WITHOUT_WORDS, RULES, Finding, Observations

SAY_AGAIN_AFTER_STEPS = 20
MUCH_WORSE = 1.5
CALM_STEPS = 3  # a figure that wavers around its bound is not over each time it dips below


@dataclass
class _Open:
    """Something that has been said and is not over yet."""

    said_at: int
    said_badness: float
    calm_steps: int = 0


class HealthCheck:
    """Fed the metrics of one step after the other; keeps what it needs to compare with.

    >>> health = HealthCheck(max_age=1)
    >>> health.check(1, {"clipped_fraction": 0.42})
    ['clipped_fraction 0.42 (healthy below 0.3): 42 % of the tokens have no gradient; lower --lr']
    >>> health.check(2, {"clipped_fraction": 0.41})
    []
    """

    def __init__(self, *, max_age: int = 0) -> None:
        self._seen = Observations(max_age)
        self._open: dict[str, _Open] = {}
        self._has_said_aligned = False

    def check(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """The lines to say about this step; none, as a rule."""
        self._seen.add({name: float(v) for name, v in metrics.items() if isinstance(v, int | float) and isfinite(v)})
        findings = {found.topic: found for rule in RULES if (found := rule(self._seen)) is not None}
        lines = [found.line for found in findings.values() if self._is_news(step, found)]
        return lines + self._what_is_over(findings) + self._alignment_shown()

    def _is_news(self, step: int, found: Finding) -> bool:
        known = self._open.get(found.topic)
        if known is None and found.can_wait:
            return False
        if known is None:
            self._open[found.topic] = _Open(step, found.badness)
            return True
        known.calm_steps = 0
        has_lasted = step - known.said_at >= SAY_AGAIN_AFTER_STEPS
        if not has_lasted and found.badness < MUCH_WORSE * known.said_badness:
            return False
        known.said_at, known.said_badness = step, max(found.badness, known.said_badness)
        return True

    def _what_is_over(self, findings: Mapping[str, Finding]) -> list[str]:
        lines = []
        for topic in [topic for topic in self._open if topic not in findings]:
            self._open[topic].calm_steps += 1
            if self._open[topic].calm_steps >= CALM_STEPS:
                del self._open[topic]
                if topic == ALIGNMENT:
                    self._has_said_aligned = False  # that is said in its own words
                elif topic not in CLOSED_WITHOUT_WORDS:
                    lines.append(f"{topic} is back in its healthy range")
        return lines

    def _alignment_shown(self) -> list[str]:
        """Once, at the first step that can show it: the engine samples from the weights that are trained."""
        gap = self._seen.on_policy_gap
        if self._has_said_aligned or gap is None or ALIGNMENT in self._open:
            return []
        self._has_said_aligned = True
        return [f"{ALIGNMENT}: OK (trainer and engine differ by {gap:.3f} per token)"]
