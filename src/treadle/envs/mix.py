"""Draw items from several data sources by their weights. Pure.

    mix = Mix(names=("gsm8k", "countdown"), weights=(3, 1), sizes=(7000, 400), seed=1)
    mix.place_of(5)  # the place of item 5 among the items of all sources, those of gsm8k first

The sources follow a pattern of sum(weights) draws that repeats. After any number of draws each source has its share,
less than one draw more or less. Each source is drawn in epochs of its own, every epoch in its own order. Everything
follows from the index of the item and the seed, so a restarted process goes on with the same items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

from treadle.config.env import DataSource
from treadle.envs.base import stable_shuffle
from treadle.errors import ConfigError

LONGEST_PATTERN = 10_000


@dataclass
class Mix:
    """`weights`: draws of each source in a pattern; `sizes`: its number of items."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    sizes: tuple[int, ...]
    seed: int
    _pattern: list[int] = field(init=False)  # sources, one for each draw
    _turns: list[int] = field(init=False)  # for each draw, how often its source was drawn before in the pattern
    _offsets: list[int] = field(init=False)  # place of the first item of each source
    _orders: dict[int, tuple[int, list[int]]] = field(init=False, default_factory=dict)  # by source: epoch, order

    def __post_init__(self) -> None:
        self._pattern = spread_draws(self.weights)
        counts = [0] * len(self.weights)
        self._turns = []
        for source in self._pattern:
            self._turns.append(counts[source])
            counts[source] += 1
        self._offsets = [0, *accumulate(self.sizes)]

    def place_of(self, index: int) -> int:
        round_number, draw = divmod(index, len(self._pattern))
        source = self._pattern[draw]
        epoch, turn = divmod(round_number * self.weights[source] + self._turns[draw], self.sizes[source])
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            shuffled = stable_shuffle(range(self.sizes[source]), "order", self.names[source], self.seed, epoch)
            known = self._orders[source] = epoch, shuffled
        return self._offsets[source] + known[1][turn]

    def index_like(self, index: int, number: int) -> int:
        """The index of an item of the same source, in its first epoch: the draws of a pattern divide all among them."""
        draw = index % len(self._pattern)
        source = self._pattern[draw]
        num_rounds = -((self._turns[draw] - self.sizes[source]) // self.weights[source])
        return draw + len(self._pattern) * (number % max(1, num_rounds))


def whole_weights(sources: Sequence[DataSource]) -> tuple[int, ...]:
    """The smallest whole numbers in the same ratio.

    >>> whole_weights([DataSource("a.jsonl", "0.75"), DataSource("b.jsonl", "0.25")])
    (3, 1)
    """
    weights = [Fraction(source.weight) for source in sources]
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > LONGEST_PATTERN:
        shown = ", ".join(f"{source.name}:{source.weight}" for source in sources)
        raise ConfigError(
            f"the weights of --env.data {shown} repeat only after {sum(whole):,} draws",
            fix=f"write rounder ones, whose smallest whole ratio adds up to {LONGEST_PATTERN:,} or less, as 3 and 1",
        )
    return tuple(whole)


def spread_draws(weights: Sequence[int]) -> list[int]:
    """The sources of sum(weights) draws, each spread evenly: the one whose next draw is due first.

    >>> spread_draws([3, 1])
    [0, 0, 0, 1]
    """
    total = sum(weights)
    counts = [0] * len(weights)
    draws = []
    for number in range(total):
        # Draw k of a source may come from draw k / share on, and is due before draw (k + 1) / share.
        allowed = [one for one, weight in enumerate(weights) if counts[one] * total // weight <= number]
        source = min(allowed, key=lambda one: (-(-(counts[one] + 1) * total // weights[one]), one))
        counts[source] += 1
        draws.append(source)
    return draws


def in_turn(lists: Sequence[Sequence[object]]) -> list[int]:
    """For each position of the merged list, the number of the list it comes from: one of each in turn.

    >>> in_turn([["a", "b", "c"], ["x"]])
    [0, 1, 0, 0]
    """
    longest = max(map(len, lists), default=0)
    return [number for place in range(longest) for number, items in enumerate(lists) if place < len(items)]
