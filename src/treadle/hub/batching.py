"""Which groups make the next batch, and in words why none can be made. Pure: no clock, no database.

env_queues, one per environment  ->  an order of preference  ->  the first exact choice in that order
(oldest first in each)          (arrival, or by weight;       (sizes mixed freely)
                                 minimums stand in front)
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from treadle.store import EnvQueue, Plan, Waiting

# The exact search keeps one bit for each (group, number of sequences); this bounds its memory to 16 MiB.
MAX_SEARCH_BITS = 2**27
MIN_WEIGHT = 1e-3  # an environment of weight 0 is served when nobody else has anything, not never
HOARD_BATCHES = 4  # groups that fit no batch are set aside when this many batches' worth of them wait


def plan(env_queues: Sequence[EnvQueue], size: int) -> Plan:
    """The groups whose sizes sum to exactly `size`, by preference; or the reason why there are none.

    plan([EnvQueue(None, [Waiting(1, 4), Waiting(2, 3), Waiting(3, 4)])], 8).ids == [1, 3]
    """
    if size <= 0:
        return Plan(None, f"the trainer registered batch_size {size}: no batch can have that many sequences")
    if _supply(env_queues) < size:
        return Plan(None, _describe(env_queues, size))
    first, waived, lacking = _minimums(env_queues, size)
    if lacking:
        return Plan(None, "; ".join([_describe(env_queues, size), *lacking]), waived=waived)
    reserved = {group.id for group in first}
    arrival = heapq.merge(*(env_queue.waiting for env_queue in env_queues))
    is_weighted = len({env_queue.weight for env_queue in env_queues if env_queue.env_id is not None}) > 1
    order = _weighted(env_queues) if is_weighted else arrival
    order = _useful((group for group in order if group.id not in reserved), _sizes(env_queues), size)
    chosen = _exact([*first, *order], size)
    misfits = _misfits(env_queues, size)
    if chosen is None:
        return Plan(None, _why_none(env_queues, size), waived=waived, misfits=misfits)
    missed = reserved - {group.id for group in chosen}
    if missed:
        missing = [env_queue.name for env_queue in env_queues if any(group.id in missed for group in env_queue.waiting)]
        if _supply(env_queues) < HOARD_BATCHES * size:
            reason = f"with the minimum of {', '.join(missing)} no choice sums to {size} yet"
            return Plan(None, f"{_describe(env_queues, size)}; {reason}", waived=waived)
        waived |= dict.fromkeys(missing, f"with its groups no choice sums to {size}, and {HOARD_BATCHES} batches wait")
    tags = _tags_after(env_queues, chosen) if is_weighted else {}
    return Plan([group.id for group in chosen], "", tags, waived, misfits)


def freshness(policy_version: int | None, step: int, max_age: int | None) -> float:
    """The weight of a group at `step`: 1 up to the age `max_age`, then a half, a third, ... Unknown ages count in full.

    The trainer of step s is at version s - 1.
    """
    if policy_version is None or max_age is None or step - 1 - policy_version <= max_age:
        return 1.0
    return 1.0 / (step - policy_version - max_age)


# ---- the order of preference


def _useful(order: Iterable[Waiting], sizes: Mapping[int, int], size: int) -> list[Waiting]:
    """Of each size the first, as many as a batch can hold. An exact choice by preference never has others, and so its
    cost is that of a batch, however many environments there are."""
    missing = {one: min(count, size // one) for one, count in sizes.items()}
    num_missing = sum(missing.values())
    kept = []
    for group in order:
        if num_missing == 0:
            break
        if missing.get(group.size):
            missing[group.size] -= 1
            num_missing -= 1
            kept.append(group)
    return kept


def _weighted(env_queues: Sequence[EnvQueue]) -> Iterable[Waiting]:
    """Start-time fair queueing: a queue's tag grows by size / weight with each of its groups; the lowest is next."""
    heap: list[tuple[float, Waiting, int, int]] = []
    now = min((env_queue.tag for env_queue in env_queues if env_queue.waiting), default=0.0)
    for index, env_queue in enumerate(env_queues):
        if env_queue.waiting:
            heapq.heappush(heap, (max(env_queue.tag, now), env_queue.waiting[0], index, 0))
    while heap:
        tag, group, index, place = heapq.heappop(heap)
        env_queue = env_queues[index]
        tag += group.size / max(env_queue.weight, MIN_WEIGHT)
        yield group
        if place + 1 < len(env_queue.waiting):
            heapq.heappush(heap, (tag, env_queue.waiting[place + 1], index, place + 1))


def _tags_after(env_queues: Sequence[EnvQueue], chosen: Sequence[Waiting]) -> dict[int | None, float]:
    """The tags once `chosen` are gone, as what each queue is ahead of the busy queue that got least.

    So a queue that was empty for a while, or that is new, starts where the others are: it has no claim on what it
    missed.
    """
    ids = {group.id for group in chosen}
    began = min((env_queue.tag for env_queue in env_queues if env_queue.waiting), default=0.0)
    tags = {}
    for env_queue in env_queues:
        taken = sum(group.size for group in env_queue.waiting if group.id in ids)
        tags[env_queue.env_id] = max(env_queue.tag, began) + taken / max(env_queue.weight, MIN_WEIGHT)
    now = min((tags[env_queue.env_id] for env_queue in env_queues if env_queue.waiting), default=0.0)
    return {env_id: max(0.0, tag - now) for env_id, tag in tags.items()}


# ---- minimum allocations


def _minimums(env_queues: Sequence[EnvQueue], size: int) -> tuple[list[Waiting], dict[str, str], list[str]]:
    """(groups that must be in the batch, minimums that are waived and why, minimums that lack groups).

    A minimum is in whole groups: `int(size * minimum)` sequences, rounded up to a group where the batch has room for
    it. Whose oldest group waits longest comes first: where there is no room for all, they take turns.
    """
    needs = {index: int(size * min(1.0, max(0.0, env_queue.minimum))) for index, env_queue in enumerate(env_queues)}
    needs = {index: need for index, need in needs.items() if need > 0}
    total = sum(needs.values())
    if total > size:  # more than everything was promised: each gets its part of it
        needs = {index: max(1, need * size // total) for index, need in needs.items()}
    must: list[Waiting] = []
    waived, lacking = {}, []
    room = size
    sizes = _sizes(env_queues) if needs else ()
    oldest_ids = {index: env_queues[index].waiting[0].id if env_queues[index].waiting else math.inf for index in needs}
    for index in sorted(needs, key=oldest_ids.__getitem__):
        env_queue, need = env_queues[index], needs[index]
        if not env_queue.is_alive:
            waived[env_queue.name] = "the environment has not been heard of for a while"
            continue
        has = _supply([env_queue])
        # The smallest group that waits; where none does, the size that is to be expected.
        smallest = min(_sizes([env_queue]), default=max(1, env_queue.group_size))
        if has < need and smallest <= room - has:
            some = f"{has} wait" if has else "none waits"
            lacking.append(f"waiting for {env_queue.name}: its minimum is {need} of {size} sequences and {some}")
            continue
        # An odd group in front must not make the whole minimum impossible: then groups of one size are tried.
        fronts = [_front(waiting, need, room) for waiting in (env_queue.waiting, *_by_size(env_queue))]
        fitting = [front for front in fronts if front and _reachable(sizes, room - _num_sequences(front))]
        if fitting:
            taken = max(fitting, key=lambda front: min(need, _num_sequences(front)))
            must += taken
            room -= _num_sequences(taken)
        elif fronts[0]:
            waived[env_queue.name] = f"with its groups, what waits cannot make a batch of exactly {size} sequences"
        else:
            waived[env_queue.name] = f"its groups do not fit beside the other minimums in a batch of {size}"
    return must, waived, lacking


def _num_sequences(groups: Iterable[Waiting]) -> int:
    return sum(group.size for group in groups)


def _by_size(env_queue: EnvQueue) -> Iterable[list[Waiting]]:
    """The queue's groups of each size apart, the size whose first group is oldest before the others."""
    apart: dict[int, list[Waiting]] = {}
    for group in env_queue.waiting:
        apart.setdefault(group.size, []).append(group)
    return apart.values() if len(apart) > 1 else ()


def _front(waiting: Sequence[Waiting], need: int, room: int) -> list[Waiting]:
    """The oldest groups until `need` sequences are met, as long as there is room."""
    taken: list[Waiting] = []
    for group in waiting:
        if need <= 0:
            break
        if group.size <= room:
            taken.append(group)
            room -= group.size
            need -= group.size
    return taken


# ---- the exact choice


def _exact(preferred: Sequence[Waiting], size: int) -> list[Waiting] | None:
    """The plain line when it fits. Else groups are passed over, as few of the preferred ones as can be: the first
    is in the batch whenever any exact batch has it, then the second, and so on."""
    sums = list(accumulate(group.size for group in preferred))
    num_plain = bisect_right(sums, size)  # groups from the front that fit
    if num_plain and sums[num_plain - 1] == size:
        return list(preferred[:num_plain])
    if not sums or sums[-1] < size:  # also keeps the search's memory in proportion to the data
        return None
    num_searched = max(2, MAX_SEARCH_BITS // (size + 1))
    # Beyond the search's reach (batches of many thousand sequences) the first groups are taken unasked.
    start = max(0, num_plain - num_searched // 2) if len(preferred) > num_searched else 0
    taken = list(preferred[:start])
    rest = _first_exact(preferred[start : start + num_searched], size - _num_sequences(taken))
    return None if rest is None else taken + rest


def _first_exact(candidates: Sequence[Waiting], size: int) -> list[Waiting] | None:
    """The exact choice that has the first groups.

    Bit n of `reachable[i]` is set when some of the candidates from the i-th on have n sequences together.
    With that known, one walk from the first takes every group after which the remainder can still be
    reached.
    """
    mask = (1 << (size + 1)) - 1
    reachable = [1]
    for group in reversed(candidates):
        reachable.append((reachable[-1] | reachable[-1] << group.size) & mask)
    reachable.reverse()
    if not reachable[0] >> size & 1:
        return None
    chosen = []
    missing = size
    for index, group in enumerate(candidates):
        if group.size <= missing and reachable[index + 1] >> (missing - group.size) & 1:
            chosen.append(group)
            missing -= group.size
    return chosen


def _reachable(sizes: Iterable[int], size: int) -> bool:
    """Whether groups of these sizes, any number of each, can sum to `size`."""
    sizes = set(sizes)
    if size == 0 or any(size % one == 0 for one in sizes):
        return True
    if size > MAX_SEARCH_BITS:  # so far out, everything that their divisor allows can be reached
        return bool(sizes) and size % math.gcd(*sizes) == 0
    sums, mask = 1, (1 << (size + 1)) - 1
    for one in sizes:
        step = one
        while step <= size:  # doubling covers every number of copies
            sums |= (sums << step) & mask
            step *= 2
    return bool(sums >> size & 1)


def _expected(env_queues: Sequence[EnvQueue]) -> set[int]:
    """The sizes that wait, or that live environments registered."""
    return {
        *_sizes(env_queues),
        *(env_queue.group_size for env_queue in env_queues if env_queue.is_alive and env_queue.group_size > 0),
    }


def _misfits(env_queues: Sequence[EnvQueue], size: int) -> list[int]:
    """Groups to set aside: they pile up, and no batch can ever have a group of their size.

    Left alone they would fill the queue, and then nobody could post any more.
    """
    odd = {one: count for one, count in _sizes(env_queues).items() if size % one}
    if sum(one * count for one, count in odd.items()) < HOARD_BATCHES * size:  # seldom more, so this is cheap
        return []
    expected = _expected(env_queues)
    hopeless = {one for one in odd if one > size or not _reachable(expected, size - one)}
    piled_up = sum(one * odd[one] for one in hopeless)
    if piled_up < HOARD_BATCHES * size:
        return []
    return sorted(group.id for env_queue in env_queues for group in env_queue.waiting if group.size in hopeless)


# ---- in words


def _why_none(env_queues: Sequence[EnvQueue], size: int) -> str:
    listed = ", ".join(f"{count} of size {one}" for one, count in sorted(_sizes(env_queues).items()))
    reason = f"{_describe(env_queues, size)}; no choice of them sums to exactly {size}: {listed}"
    if not _reachable(_expected(env_queues), size):
        reason += f"; groups of these sizes never will: choose a group size that divides {size}"
    return reason


def _describe(env_queues: Sequence[EnvQueue], size: int) -> str:
    """How much waits: "3 of 8 groups wait (24 of 64 sequences)"."""
    sizes, num_sequences = _sizes(env_queues), _supply(env_queues)
    num_groups = sum(sizes.values())
    needed = [size // one for one in sizes if size % one == 0]
    of_groups = f" of {needed[0]}" if len(sizes) == 1 and needed and num_sequences < size else ""
    noun = "group waits" if num_groups == 1 and not of_groups else "groups wait"
    return f"{num_groups or 'no'}{of_groups} {noun} ({num_sequences} of {size} sequences)"


def _sizes(env_queues: Sequence[EnvQueue]) -> Counter[int]:
    total: Counter[int] = Counter()
    for env_queue in env_queues:
        total.update(env_queue.sizes or Counter(group.size for group in env_queue.waiting))
    return total


def _supply(env_queues: Sequence[EnvQueue]) -> int:
    return sum(one * count for one, count in _sizes(env_queues).items())
