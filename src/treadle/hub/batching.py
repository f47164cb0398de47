"""Which groups make the next batch, and in words why none can be made. Pure: no clock, no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.store import Waiting

# The exact search keeps one bit for each (group, number of sequences); this bounds its memory to 16 MiB.
MAX_SEARCH_BITS = 2**27


def choose(waiting: Sequence[Waiting], size: int) -> list[int] | None:
    """Ids of groups whose sizes sum to exactly `size`, oldest first; None when no choice does.

    The plain line is taken when it fits. When it does not, groups are passed over, as few of the old ones as
    can be: the oldest is in the batch whenever any exact batch has it, then the second oldest, and so on.
    Groups larger than a batch can never be used and never stand in the way.

        choose([Waiting(1, 4), Waiting(2, 3), Waiting(3, 4)], 8)  # [1, 3]
    """
    usable = [group for group in waiting if 0 < group.size <= size]
    num_plain, total = _plain_line(usable, size)
    if total == size:
        return [group.id for group in usable[:num_plain]]
    if sum(group.size for group in usable) < size:  # also keeps the search's memory in proportion to the data
        return None
    num_searched = max(2, MAX_SEARCH_BITS // (size + 1))
    # Beyond the search's reach (batches of many thousand sequences) the oldest groups are taken unasked.
    start = max(0, num_plain - num_searched // 2) if len(usable) > num_searched else 0
    taken = usable[:start]
    rest = _oldest_exact(usable[start : start + num_searched], size - sum(group.size for group in taken))
    return None if rest is None else [group.id for group in (*taken, *rest)]


def explain(sizes: Mapping[int, int], batch_size: int) -> str:
    """Why no batch can be formed now, from how many groups of each size wait ({8: 3}: three groups of 8)."""
    if batch_size <= 0:
        return f"the trainer registered batch_size {batch_size}: no batch can have so many sequences"
    usable = {size: count for size, count in sizes.items() if 0 < size <= batch_size}
    num_groups = sum(usable.values())
    num_sequences = sum(size * count for size, count in usable.items())
    needed = [batch_size // size for size in usable if batch_size % size == 0]
    of_groups = f" of {needed[0]}" if len(usable) == 1 and needed and num_sequences < batch_size else ""
    noun = "group waits" if num_groups == 1 and not of_groups else "groups wait"
    told = f"{num_groups or 'no'}{of_groups} {noun} ({num_sequences} of {batch_size} sequences)"
    if num_sequences >= batch_size:
        listed = ", ".join(f"{count} of size {size}" for size, count in sorted(usable.items()))
        told += f"; no choice of them sums to exactly {batch_size}: {listed}"
    oversize = sum(sizes.values()) - num_groups
    if oversize:
        told += f"; {oversize} more can never be used, being larger than the batch"
    return told


def _plain_line(usable: Sequence[Waiting], size: int) -> tuple[int, int]:
    """How many groups from the front fit, and how many sequences they have."""
    total = 0
    for index, group in enumerate(usable):
        if total + group.size > size:
            return index, total
        total += group.size
    return len(usable), total


def _oldest_exact(candidates: Sequence[Waiting], size: int) -> list[Waiting] | None:
    """The exact choice that has the oldest groups.

    Bit n of `reachable[i]` is set when some of the candidates from the i-th on have n sequences together.
    With that known, one walk from the oldest takes every group after which the remainder can still be
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
