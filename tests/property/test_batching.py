"""The choice of a batch: exact, the oldest first, fair by weight, and never stuck."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.hub.batching import HOARD_BATCHES, freshness, plan
from treadle.store import EnvQueue, Plan, Waiting


class Queues:
    """Lanes that are filled and emptied as the store does it: ids by arrival, tags kept from batch to batch."""

    def __init__(self, *env_queues: EnvQueue) -> None:
        self.env_queues = {env_queue.env_id: env_queue for env_queue in env_queues}
        self.groups: dict[int | None, list[Waiting]] = {env_queue.env_id: [] for env_queue in env_queues}
        self.arrived = 0

    def post(self, env_id: int | None, size: int, count: int = 1) -> None:
        for _ in range(count):
            self.groups[env_id].append(Waiting(self.arrived, size))
            self.arrived += 1

    def view(self, batch_size: int) -> list[EnvQueue]:
        """Of each size as many of the oldest as a batch can use, and how many there are in all."""
        seen = []
        for env_id, env_queue in self.env_queues.items():
            kept: list[Waiting] = []
            num_kept: Counter[int] = Counter()
            for group in self.groups[env_id]:
                if num_kept[group.size] < batch_size // group.size:
                    kept.append(group)
                    num_kept[group.size] += 1
            sizes = Counter(group.size for group in self.groups[env_id])
            seen.append(replace(env_queue, waiting=kept, sizes=sizes))
        return seen

    def next(self, batch_size: int) -> tuple[Plan, list[tuple[int | None, Waiting]]]:
        made = plan(self.view(batch_size), batch_size)
        gone = {*(made.ids or ()), *made.misfits}
        taken = [(env, group) for env, line in self.groups.items() for group in line if group.id in (made.ids or ())]
        if made.ids is not None:
            self.env_queues = {
                env: replace(env_queue, tag=made.tags.get(env, 0.0)) for env, env_queue in self.env_queues.items()
            }
        self.groups = {env: [group for group in line if group.id not in gone] for env, line in self.groups.items()}
        return made, taken

    def share(self, env_id: int, batch_size: int, num_batches: int) -> float:
        """This environment's share of the sequences of the next `num_batches` batches."""
        of_env: Counter[int | None] = Counter()
        for _ in range(num_batches):
            made, taken = self.next(batch_size)
            assert made.ids is not None, made.reason
            for env, group in taken:
                of_env[env] += group.size
        return of_env[env_id] / of_env.total()


# ---- exact, and the oldest


@given(st.lists(st.integers(1, 9), max_size=11), st.integers(1, 20), st.integers(1, 3))
def test_a_choice_is_the_oldest_of_all_exact_ones(sizes, batch_size, num_lanes):
    """Against brute force, in the order of arrival whichever env_queues the groups are in."""
    waiting = [Waiting(index, size) for index, size in enumerate(sizes) if size <= batch_size]
    env_queues = [
        EnvQueue(env, [group for group in waiting if group.id % num_lanes == env]) for env in range(num_lanes)
    ]
    exact = [
        [group.id for group in subset]
        for count in range(1, len(waiting) + 1)
        for subset in combinations(waiting, count)
        if sum(group.size for group in subset) == batch_size
    ]
    oldest = min(exact, key=lambda ids: [group.id not in ids for group in waiting], default=None)
    assert plan(env_queues, batch_size).ids == oldest


@st.composite
def lanes_of_any_kind(draw):
    ids = iter(range(1000))
    env_queues = []
    for env_id in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 6), max_size=8))
        env_queues.append(
            EnvQueue(
                env_id,
                [Waiting(next(ids), size) for size in sizes],
                name=f"env{env_id}",
                weight=draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])),
                tag=draw(st.sampled_from([0.0, 3.0, 1000.0])),
                minimum=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.75, 5.0, -1.0])),
                is_alive=draw(st.booleans()),
                group_size=draw(st.integers(0, 6)),
            )
        )
    return env_queues


@given(lanes_of_any_kind(), st.integers(-1, 20))
def test_whatever_waits_a_batch_is_exact_in_order_and_explained(env_queues, batch_size):
    made = plan(env_queues, batch_size)
    of_id = {group.id: (env_queue, group) for env_queue in env_queues for group in env_queue.waiting}
    if made.ids is None:
        assert made.reason
        assert not made.tags
        return
    assert len(set(made.ids)) == len(made.ids)
    assert sum(of_id[group_id][1].size for group_id in made.ids) == batch_size
    assert not set(made.misfits) & set(made.ids)
    for group_id in made.ids:  # by arrival within a env_queue, among groups of one size
        env_queue, group = of_id[group_id]
        assert all(each.id in made.ids for each in env_queue.waiting if each.size == group.size and each.id < group_id)
    for env_queue in env_queues:
        need = int(batch_size * min(1.0, max(0.0, env_queue.minimum)))
        got = sum(group.size for group in env_queue.waiting if group.id in made.ids)
        assert env_queue.name in made.waived or got >= need or _promised(env_queues, batch_size) > batch_size or got
        assert env_queue.name not in made.waived or need > 0
    assert all(tag >= 0 for tag in made.tags.values())
    assert (
        min((made.tags[env_queue.env_id] for env_queue in env_queues if env_queue.waiting and made.tags), default=0.0)
        == 0.0
    )


def _promised(env_queues, batch_size) -> int:
    return sum(int(batch_size * min(1.0, max(0.0, env_queue.minimum))) for env_queue in env_queues)


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=12), st.integers(0, 2**30))
def test_nobody_starves_while_others_keep_posting(sizes, seed):
    """The first group is trained within as many batches as it takes to find it company."""
    rng = random.Random(seed)
    queues = Queues(EnvQueue(0, [], weight=1.0), EnvQueue(1, [], weight=1.0))
    queues.post(0, sizes[0])
    for _ in range(12):
        for size in sizes:
            queues.post(rng.randrange(2), size, rng.randrange(3))
        queues.post(1, 12 - sizes[0])
        made, _ = queues.next(12)
        if made.ids is not None and 0 in made.ids:
            return
    raise AssertionError("the oldest group still waits")


# ---- weights


@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4, unique=True),
       st.sampled_from([1, 2, 4]), st.integers(0, 2**30))  # fmt: skip
def test_the_mix_follows_the_weights_while_all_have_enough(weights, largest, seed):
    rng = random.Random(seed)
    queues = Queues(*(EnvQueue(env, [], weight=weight) for env, weight in enumerate(weights)))
    for env in range(len(weights)):  # one after the other: the order of arrival must not matter
        for _ in range(300):
            queues.post(env, rng.choice([size for size in (1, 2, 4) if size <= largest]))
    of_env: Counter[int | None] = Counter()
    for _ in range(40):
        _, taken = queues.next(8)
        for env, group in taken:
            of_env[env] += group.size
    assert all(queues.groups.values()), "no env_queue may run dry here"
    for env, weight in enumerate(weights):
        assert of_env[env] / of_env.total() == pytest.approx(weight / sum(weights), abs=0.05)


@pytest.mark.parametrize("was_known", [False, True], ids=["new", "known"])
def test_a_lane_that_was_empty_gains_no_credit(was_known):
    queues = Queues(EnvQueue(0, [], weight=1.0), EnvQueue(1, [], weight=3.0), EnvQueue(2, [], weight=2.0))
    if was_known:
        queues.post(2, 1, 8)
    for env in (0, 1):
        queues.post(env, 1, 1500)
    queues.share(0, 8, 100)
    queues.post(2, 1, 1000)
    assert queues.share(2, 8, 6) == pytest.approx(2 / 6, abs=0.1)
    assert queues.share(0, 8, 60) == pytest.approx(1 / 6, abs=0.03)


def test_a_lane_that_leaves_the_list_and_comes_back_has_no_claim_either():
    """The store forgets the tag of who neither waits nor is connected: 0 is where the busy ones are."""
    queues = Queues(EnvQueue(0, [], weight=1.0), EnvQueue(1, [], weight=3.0))
    for env in (0, 1):
        queues.post(env, 1, 1500)
    queues.share(0, 8, 100)
    assert max(env_queue.tag for env_queue in queues.env_queues.values()) < 10
    queues.env_queues[2] = EnvQueue(2, [], weight=4.0)
    queues.groups[2] = []
    queues.post(2, 1, 1000)
    assert queues.share(2, 8, 8) == pytest.approx(0.5, abs=0.1)


def test_weight_zero_is_served_when_alone_and_hardly_else():
    queues = Queues(EnvQueue(0, [], weight=0.0), EnvQueue(1, [], weight=1.0))
    queues.post(0, 2, 100)
    assert queues.share(0, 8, 5) == 1.0
    queues.post(1, 2, 400)
    assert queues.share(0, 8, 50) < 0.02
    queues.groups[1].clear()
    assert queues.share(0, 8, 5) == 1.0


def test_equal_weights_leave_the_order_of_arrival():
    queues = Queues(EnvQueue(0, [], weight=2.0), EnvQueue(1, [], weight=2.0))
    queues.post(0, 2, 6)
    queues.post(1, 2, 6)
    assert [queues.next(8)[0].ids for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# ---- minimum allocations


def test_a_minimum_is_waited_for_and_kept():
    """The examples that Atropos' own server answers: batch of 8, A (at least half, groups of 2), B (groups of 4)."""
    queues = Queues(EnvQueue(0, [], name="A", minimum=0.5, group_size=2), EnvQueue(1, [], name="B", group_size=4))
    queues.post(1, 4, 3)
    made, _ = queues.next(8)
    assert made.ids is None
    assert "waiting for A: its minimum is 4 of 8 sequences and none waits" in made.reason
    queues.post(0, 2)
    assert queues.next(8)[0].ids is None
    queues.post(0, 2)
    assert queues.next(8)[0].ids == [3, 4, 0]


def test_minimums_that_promise_more_than_all_are_shared_out():
    queues = Queues(*(EnvQueue(env, [], name=str(env), minimum=0.75, group_size=2) for env in (0, 1)))
    queues.post(0, 2, 8)
    queues.post(1, 2, 8)
    _, taken = queues.next(8)
    assert Counter(env for env, _ in taken) == {0: 2, 1: 2}


def test_a_minimum_of_less_than_one_sequence_is_not_waited_for():
    queues = Queues(EnvQueue(0, [], name="A", minimum=0.1, group_size=2), EnvQueue(1, [], name="B"))
    queues.post(1, 4, 2)
    assert queues.next(8)[0].ids == [0, 1]


def test_a_minimum_of_who_is_gone_is_waived_with_the_reason():
    queues = Queues(EnvQueue(0, [], name="A", minimum=0.5, is_alive=False), EnvQueue(1, [], name="B"))
    queues.post(1, 4, 2)
    made, _ = queues.next(8)
    assert (made.ids, dict(made.waived)) == ([0, 1], {"A": "the environment has not been heard of for a while"})


def test_a_minimum_that_whole_groups_cannot_reach_is_met_as_far_as_they_go():
    """Three quarters of 8 with groups of 5: one fits, a second never does."""
    queues = Queues(EnvQueue(0, [], name="A", minimum=0.75, group_size=5), EnvQueue(1, [], name="B"))
    queues.post(0, 5, 9)
    queues.post(1, 1, 9)
    made, taken = queues.next(8)
    assert made.ids is not None
    assert Counter(env for env, _ in taken) == {0: 1, 1: 3}


def test_an_odd_group_in_front_does_not_cost_the_minimum():
    queues = Queues(EnvQueue(0, [], name="A", minimum=0.5, group_size=4), EnvQueue(1, [], name="B", group_size=4))
    queues.post(0, 3)
    queues.post(1, 4, 9)
    queues.post(0, 4, 9)
    for _ in range(4):
        made, taken = queues.next(8)
        assert (Counter(env for env, _ in taken), dict(made.waived)) == ({0: 1, 1: 1}, {})


def test_who_rounds_up_to_the_whole_batch_takes_turns_with_the_others():
    queues = Queues(*(EnvQueue(env, [], name=str(env), minimum=0.5, group_size=8 - 4 * env) for env in (0, 1)))
    for _ in range(20):
        queues.post(0, 8)
        queues.post(1, 4, 2)
    assert 0.3 < queues.share(1, 8, 20) < 0.7


@given(st.sampled_from([6, 8, 12, 24]), st.data())
def test_with_enough_of_everything_there_is_always_a_batch(batch_size, data):
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    queues = Queues(
        *(
            EnvQueue(
                env,
                [],
                name=str(env),
                weight=data.draw(st.sampled_from([0.0, 1.0, 2.0])),
                minimum=data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 1.0])),
                is_alive=data.draw(st.booleans()),
                group_size=data.draw(st.integers(0, batch_size)),
            )
            for env in range(data.draw(st.integers(1, 4)))
        )
    )
    for env in queues.env_queues:
        sizes = data.draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=3))
        while sum(group.size for group in queues.groups[env]) < HOARD_BATCHES * batch_size:
            queues.post(env, data.draw(st.sampled_from(sizes)))
    made, taken = queues.next(batch_size)
    assert made.ids is not None, made.reason
    assert not made.misfits
    assert sum(group.size for _, group in taken) == batch_size


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=40), st.integers(1, 9))
def test_what_can_never_be_used_does_not_fill_the_queue(posts, batch_size):
    """However groups of all sizes come, those that wait stay within a few batches' worth of each size's company."""
    queues = Queues(*(EnvQueue(env, []) for env in range(3)))
    for _ in range(30):
        for env, size in posts:
            if size <= batch_size:
                queues.post(env, size)
        while True:
            made, _ = queues.next(batch_size)
            if made.ids is None and not made.misfits:
                break
    left = sum(group.size for line in queues.groups.values() for group in line)
    assert left < 2 * HOARD_BATCHES * batch_size


# ---- cost


def test_the_cost_does_not_depend_on_how_much_waits():
    def seconds(depth: int) -> float:
        env_queues = [EnvQueue(env, [Waiting(env + 4 * i, 8) for i in range(8)], sizes={8: depth}, weight=1.0 + env)
                 for env in range(4)]  # fmt: skip
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            assert plan(env_queues, 64).ids is not None
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(100_000) < 10 * seconds(8)
    assert seconds(100_000) < 0.01


@pytest.mark.parametrize("sizes", [(8,), (1, 2, 4, 8)])
@pytest.mark.parametrize("batch_size", [64, 512])
def test_two_hundred_environments_are_planned_in_time(batch_size, sizes):
    rng = random.Random(1)
    queues = Queues(*(EnvQueue(env, [], name=str(env), weight=1.0 + env % 5, minimum=0.001 * (env % 5), group_size=8)
                      for env in range(200)))  # fmt: skip
    for _ in range(batch_size // min(sizes)):
        for env in range(200):
            queues.post(env, rng.choice(sizes))
    env_queues = queues.view(batch_size)
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        made = plan(env_queues, batch_size)
        seconds.append(time.thread_time() - began)
    assert made.ids is not None
    assert min(seconds) < 0.1, seconds  # 0.03 to 0.05 on slow processors


# ---- staleness


@given(st.none() | st.integers(0, 1000), st.none() | st.integers(0, 1000))
def test_older_groups_never_count_more(age, max_age):
    step = 2001
    version = None if age is None else step - 1 - age
    weight = freshness(version, step, max_age)
    assert 0 < weight <= 1
    if age is None or max_age is None or age <= max_age:
        assert weight == 1
    else:
        assert weight == 1 / (1 + age - max_age)
        assert weight < freshness(version + 1, step, max_age)
