"""Things of different sizes into bins: none too full, all about as costly. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(things: Sequence[tuple[int, float]], capacity: int) -> list[list[int]]:
    """Places of (size, cost) things, by bin. A bin holds at most `capacity`; a larger thing gets a bin of its own.

    The costliest first, each into the cheapest bin that has room: the greedy rule whose worst bin is at most a third
    above the best possible. The same things always give the same bins, and within a bin they keep their order.

    >>> spread([(4, 4.0), (3, 3.0), (3, 3.0), (2, 2.0)], capacity=6)
    [[0, 3], [1, 2]]
    """
    num_bins = -(-sum(min(size, capacity) for size, _ in things) // capacity)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sizes, costs = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins)
    for place in sorted(range(len(things)), key=lambda i: (-things[i][1], i)):
        size, cost = things[place]
        has_room = (sizes == 0) | (sizes + size <= capacity)
        if not has_room.any():
            bins.append([])
            sizes, costs = np.append(sizes, 0), np.append(costs, 0.0)
            has_room = np.append(has_room, True)
        chosen = int(np.where(has_room, costs, np.inf).argmin())
        bins[chosen].append(place)
        sizes[chosen] += size
        costs[chosen] += cost
    return [sorted(chosen) for chosen in bins if chosen]


def deal(costs: Sequence[float], num_hands: int) -> list[list[int]]:
    """Places of things that cost so much, by hand: always `num_hands` of them, some empty when there are few things.

    The costliest first, each to the hand that has least; the same costs always give the same hands.

    >>> deal([4.0, 3.0, 3.0, 2.0], 2), deal([5.0], 3)
    ([[0, 3], [1, 2]], [[0], [], []])
    """
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    totals = [0.0] * num_hands
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(num_hands), key=lambda h: totals[h])
        hands[least].append(place)
        totals[least] += costs[place]
    return [sorted(hand) for hand in hands]
