from __future__ import annotations

import random
import time
from itertools import combinations

import pytest

from treadle.hub.batching import plan
from treadle.store import EnvQueue, Waiting


def choose(waiting: list[Waiting], size: int) -> list[int] | None:
    return plan([EnvQueue(None, [group for group in waiting if group.size <= size])], size).ids


def line(*sizes: int) -> list[Waiting]:
    return [Waiting(index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "size", "chosen"),
    [
        ((2, 2, 2, 2), 4, [0, 1]),
        ((4, 3, 4), 8, [0, 2]),
        ((4, 2, 1, 2), 8, [0, 1, 3]),
        ((1, 2, 1), 2, [0, 2]),
        ((8, 4), 4, [1]),  # one that is too large blocks nobody
        ((3, 3, 3, 3, 3), 8, None),
        ((3, 2, 2, 2, 2), 8, [1, 2, 3, 4]),
        ((), 4, None),
        ((2,), 4, None),
        ((5, 5, 6, 5, 6), 16, [0, 1, 2]),
    ],
)
def test_examples(sizes, size, chosen):
    assert choose(line(*sizes), size) == chosen


@pytest.mark.parametrize("seed", range(40))
def test_a_choice_is_the_oldest_of_all_exact_ones(seed):
    """Against brute force: the first in lexicographic order, where having an older group comes first."""
    rng = random.Random(seed)
    waiting = line(*(rng.randint(1, 9) for _ in range(rng.randint(0, 11))))
    size = rng.randint(1, 20)
    exact = [
        [group.id for group in subset]
        for count in range(1, len(waiting) + 1)
        for subset in combinations(waiting, count)
        if sum(group.size for group in subset) == size
    ]
    oldest_first = sorted(exact, key=lambda ids: [group.id not in ids for group in waiting])
    assert choose(waiting, size) == (oldest_first[0] if oldest_first else None)


@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_lost_split_or_overtaken_by_its_equal(seed):
    rng = random.Random(1000 + seed)
    size = rng.choice([8, 16, 30, 64])
    waiting: list[Waiting] = []
    delivered: list[Waiting] = []
    arrived = 0
    for _ in range(300):
        waiting.append(Waiting(arrived, rng.choice([1, 2, 3, 4, 7, 8, size, size + 1])))
        arrived += 1
        ids = choose(waiting, size)
        if ids is None:
            continue
        taken = [group for group in waiting if group.id in set(ids)]
        assert sum(group.size for group in taken) == size
        assert ids == sorted(set(ids)) == [group.id for group in taken]
        waiting = [group for group in waiting if group.id not in set(ids)]
        for group in taken:
            assert not any(other.size == group.size and other.id < group.id for other in waiting)
        delivered += taken
    assert sorted([*waiting, *delivered]) == sorted({*waiting, *delivered})
    assert len(waiting) + len(delivered) == arrived
    assert delivered


def test_a_large_awkward_window_is_searched_quickly():
    waiting = line(*([3] * 4000), 1)
    began = time.process_time()
    assert choose(waiting, 4096) == [*range(1365), 4000]
    assert time.process_time() - began < 1.0


def test_batches_beyond_the_reach_of_the_search_keep_to_their_size():
    rng = random.Random(5)
    waiting = line(*(rng.choice([3, 5, 8]) for _ in range(20_000)))
    ids = choose(waiting, 60_001)
    assert ids is not None
    assert sum(waiting[index].size for index in ids) == 60_001


def test_a_batch_size_beyond_all_reason_costs_nothing():
    assert choose(line(1, 2, 3), 2**62) is None


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([8] * 3, "3 of 8 groups wait (24 of 64 sequences)"),
        ([], "no groups wait (0 of 64 sequences)"),
        ([8, 4], "2 groups wait (12 of 64 sequences)"),
        (
            [3] * 30,
            "30 groups wait (90 of 64 sequences); no choice of them sums to exactly 64: 30 of size 3; "
            "groups of these sizes never will: choose a group size that divides 64",
        ),
    ],
)
def test_the_reason_for_no_batch_is_a_sentence(sizes, reason):
    assert plan([EnvQueue(None, line(*sizes))], 64).reason == reason
