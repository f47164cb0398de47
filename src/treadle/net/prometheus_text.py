"""Prometheus' text format (version 0.0.4), written by hand: a page is made of families, a family of samples.

page = Page()
page.family("hub_step", "gauge", "optimizer steps taken").add(7)
page.text() == "# HELP hub_step optimizer steps taken\n# TYPE hub_step gauge\nhub_step 7\n"
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]
NONE: Labels = {}


class Histogram:
    """Counts of values by upper bounds. One thread observes; any may read, and what it reads adds up."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> tuple[list[tuple[str, int]], float]:
        """([(upper bound, values up to it)], sum of the values); the last bound is +Inf."""
        counts = self._counts.copy()
        up_to, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            total += count
            up_to.append((_number(bound), total))
        return up_to, self._sum


class Family:
    """All samples of one name."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self._name = name
        self.lines = [f"# HELP {name} {_escaped(text)}", f"# TYPE {name} {kind}"]

    def add(self, value: float, labels: Labels = NONE) -> None:
        self._sample("", labels, value)

    def add_histogram(self, histogram: Histogram, labels: Labels = NONE) -> None:
        up_to, total = histogram.samples()
        for bound, count in up_to:
            self._sample("_bucket", {**labels, "le": bound}, count)
        self._sample("_sum", labels, total)
        self._sample("_count", labels, up_to[-1][1])

    def _sample(self, suffix: str, labels: Labels, value: float) -> None:
        listed = ",".join(f'{name}="{_escaped(text, quote=True)}"' for name, text in labels.items())
        self.lines.append(f"{self._name}{suffix}{f'{{{listed}}}' if listed else ''} {_number(value)}")


class Page:
    def __init__(self) -> None:
        self._families: list[Family] = []

    def family(self, name: str, kind: Literal["counter", "gauge", "histogram"], text: str) -> Family:
        family = Family(name, kind, text)
        self._families.append(family)
        return family

    def text(self) -> str:
        return "\n".join(line for family in self._families for line in family.lines) + "\n"


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
