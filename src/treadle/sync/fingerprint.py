"""A number that says whether two processes have the same weight, cheap enough for every publish.

A weight's bytes are read as 64-bit words and summed with odd factors, modulo 2^64: one changed, moved or swapped word
changes the sum. Of a large weight a part is read, its first and last block always and another part with every version,
so that a publish reads about a tenth of the model and two dozen publishes read all of it.

The blocks of many weights are gathered and summed together: weight by weight, a GPU would be given thousands of small
kernels, a tenth of a second in which the engine samples nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 11  # 16 KiB: its factors stay in a core's first cache
PARTS = 16
TURN_BYTES = 256 << 20  # of weights that are there at a time, where they are made to be read
STANDING_TURN_BYTES = 1 << 30  # of those that are there anyway; about 150 MB are copied, and a GPU may be full
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def fingerprints(weights: Iterable[tuple[str, Tensor]], policy_version: int) -> dict[str, str]:
    """The same for equal bytes in any process and on any device.

    >>> a, b = torch.arange(12, dtype=torch.float32), torch.ones(5)
    >>> fingerprints([("a", a), ("b", b)], 0) == {"a": fingerprint(a.clone(), 0), "b": fingerprint(b, 0)}
    True
    """
    return begin_fingerprints(weights, policy_version)()


def begin_fingerprints(
    weights: Iterable[tuple[str, Tensor]], policy_version: int, standing: StandingWeights | None = None
) -> Callable[[], dict[str, str]]:
    """Of the weights as they are now. A GPU computes them while its process does something else; the call waits.
    `standing`: kept by the caller for weights that stay where they are, which makes it cheaper the next time."""
    names: list[str] = []

    def told() -> Iterator[Tensor]:
        for name, weight in weights:
            names.append(name)
            yield weight

    parts = [part_of(policy_version)]
    if standing is None:
        sums = _begin_made(told(), parts)
    else:
        sums = [turn.begin_sums(parts) for turn in standing.turns(list(told()))]
    return lambda: dict(zip(names, itertools.chain.from_iterable(read() for read in sums), strict=True))


class StandingWeights:
    """Weights that stay where they are: how they are gathered is worked out again only when one has moved. Most of what
    a fingerprint costs beside a GPU is making these views.

    It holds on to them, so it is not for weights that are made to be looked at, merged with adapters.
    """

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._addresses: list[int] = []
        self._turns: list[_Turn] = []

    def turns(self, weights: list[Tensor]) -> list[_Turn]:
        addresses = [weight.data_ptr() for weight in weights]  # a tensor may be given other memory
        if addresses == self._addresses and all(map(_are_alike, weights, self._weights)):
            return self._turns
        self._weights, self._addresses, self._turns = [], [], []
        turns = [_Turn(turn) for turn in _in_turns(weights, STANDING_TURN_BYTES)]
        if all(_can_be_viewed(weight) for weight in weights):  # of a copy, the next question would get old answers
            self._weights, self._addresses, self._turns = weights, addresses, turns
            for turn in turns:
                turn.prepare()
        return turns


def fingerprint(weight: Tensor, policy_version: int) -> str:
    """Of one.

    >>> a = torch.arange(12, dtype=torch.float32)
    >>> fingerprint(a, 0) == fingerprint(a.clone(), 0), fingerprint(a, 0) == fingerprint(a.flip(0), 0)
    (True, False)
    """
    (found,) = _Turn([weight]).begin_sums([part_of(policy_version)])()
    return found


def whole_fingerprint(weight: Tensor) -> str:
    """Of every block; for finding out what changed, not for every publish."""
    (found,) = _Turn([weight]).begin_sums(range(PARTS))()
    return found


def part_of(policy_version: int) -> int:
    """Which sixteenth is read: scattered, so that publishing every 2nd, 4th or 8th version reads all of them too.

    >>> [len({part_of(step * number) for number in range(24)}) for step in (1, 2, 4, 8)] == [PARTS] * 4
    True
    """
    return ((policy_version * _GOLDEN) % 2**64) >> 60


def _begin_made(weights: Iterable[Tensor], parts: Sequence[int]) -> list[Callable[[], list[str]]]:
    """Of weights that may be made as they are asked for, merged with adapters, and must not be there all at once."""
    sums = []
    for turn in _in_turns(weights, TURN_BYTES):
        sums.append(_Turn(turn).begin_sums(parts))
        turn.clear()  # before the next ones are made
    return sums


def _in_turns(weights: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Of one device each."""
    turn: list[Tensor] = []
    num_bytes = 0
    for weight in weights:
        if turn and (num_bytes + weight.nbytes > max_bytes or turn[0].device != weight.device):
            yield turn
            turn, num_bytes = [], 0
        turn.append(weight)
        num_bytes += weight.nbytes
    if turn:
        yield turn


@dataclass(frozen=True, eq=False)
class _Shares:
    """Which weight each of M values belongs to, and what it counts in its sum."""

    row_M: Tensor
    factor_M: Tensor

    def add(self, total_N: Tensor, values_M: Tensor) -> None:
        total_N.index_add_(0, self.row_M, values_M * self.factor_M)


class _Turn:
    """Weights that are summed together, as words. What is left over after the whole blocks of one is a block too, and a
    short one."""

    @torch.inference_mode()  # views cost half as much
    def __init__(self, weights: list[Tensor]) -> None:
        words = [_words(weight) for weight in weights]
        self._numbers = [weight.numel() for weight in weights]
        lengths = tuple(own.numel() for own in words)
        pairs = list(zip(words, lengths, strict=True))
        self._whole = [(own, length // BLOCK_WORDS) for own, length in pairs if length >= BLOCK_WORDS]
        self._nothing = words[0].new_empty(0)
        self._factors = _factors(self._nothing.device)
        num_rest_N, self._num_blocks_N = _divided(lengths, self._nothing.device)
        self._rests = [_rest(own, length) for own, length in pairs if length % BLOCK_WORDS]
        self._ends = [_ends(own, num) for own, num in self._whole]
        self._num_ends = sum(map(len, self._ends))
        rest_row_M, rest_place_M = _rows_and_places(num_rest_N, sum(map(len, self._rests)))
        end_row_M, end_place_M = _rows_and_places(self._num_blocks_N.clamp(max=2), self._num_ends)
        self._always = _Shares(
            torch.cat([rest_row_M, end_row_M]),
            torch.cat([self._factors[rest_place_M], self._factors[5:7][end_place_M]]),
        )
        self._parts: dict[int, tuple[list[Tensor], _Shares]] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Every part, so that none of the next publishes is slower than the others."""
        for part in range(PARTS):
            self._part(part)

    @torch.inference_mode()
    def begin_sums(self, parts: Sequence[int]) -> Callable[[], list[str]]:
        (blocks, shares), *others = map(self._part, parts)
        end_sums_M, sums_M = self._of_blocks([*self._ends, *blocks]).tensor_split([self._num_ends])
        total_N = torch.zeros_like(self._num_blocks_N)
        self._always.add(total_N, torch.cat([*self._rests, end_sums_M]))
        shares.add(total_N, sums_M)
        for blocks, shares in others:
            shares.add(total_N, self._of_blocks(blocks))
        read, numbers = _read_later(total_N), self._numbers  # and not the weights: they may go now
        return lambda: [f"{(total + num) & (2**64 - 1):016x}" for total, num in zip(read(), numbers, strict=True)]

    def _part(self, part: int) -> tuple[list[Tensor], _Shares]:
        """Its blocks, and what they count: for each of a weight another odd number, so that swapped ones are seen."""
        if part not in self._parts:
            blocks = [_every_16th(own, part, num) for own, num in self._whole if num > part]
            num_N = (self._num_blocks_N - part + PARTS - 1).clamp(min=0) // PARTS
            row_M, place_M = _rows_and_places(num_N, sum(map(len, blocks)))
            self._parts[part] = blocks, _Shares(row_M, place_M * (2 * PARTS) + 2 * part + 7)
        return self._parts[part]

    def _of_blocks(self, blocks: list[Tensor]) -> Tensor:
        """Each block's words times the factors for their places; a GPU multiplies no matrices of whole numbers."""
        gathered = torch.cat([self._nothing.view(0, BLOCK_WORDS), *blocks])
        if gathered.is_cuda:
            return (gathered * self._factors).sum(-1)
        return gathered @ self._factors


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """The same tensor, or another that begins where it begins: of the same bytes in the same order?"""
    if one is other:
        return True
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _can_be_viewed(weight: Tensor) -> bool:
    """As words, where they are: a word must begin where words begin."""
    return weight.is_contiguous() and weight.nbytes % 8 == 0 and weight.data_ptr() % 8 == 0


def _words(weight: Tensor) -> Tensor:
    flat = weight.contiguous().view(-1)
    if _can_be_viewed(flat):
        return flat.view(torch.int64)
    raw = flat.view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)  # a copy


def _rest(words: Tensor, num: int) -> Tensor:
    rest = num % BLOCK_WORDS
    return words.as_strided((rest,), (1,), words.storage_offset() + num - rest)


def _ends(words: Tensor, num_blocks: int) -> Tensor:
    """The first and the last whole block, which may be one."""
    return words.as_strided((min(num_blocks, 2), BLOCK_WORDS), ((num_blocks - 1) * BLOCK_WORDS, 1))


def _every_16th(words: Tensor, first: int, num_blocks: int) -> Tensor:
    num = len(range(first, num_blocks, PARTS))
    begin = words.storage_offset() + first * BLOCK_WORDS
    return words.as_strided((num, BLOCK_WORDS), (PARTS * BLOCK_WORDS, 1), begin)


def _rows_and_places(num_N: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """For `num` values, of which each weight has `num_N` in a row: whose they are, and where in that row.

    Nothing here asks the device for a number: it would be waited for.
    """
    begin_N = num_N.cumsum(0) - num_N
    row_M = torch.repeat_interleave(num_N, output_size=num)
    return row_M, torch.arange(num, device=num_N.device) - begin_N[row_M]


def _read_later(total_N: Tensor) -> Callable[[], list[int]]:
    """The call waits for these numbers, not for what the device was given to do after them."""
    if not total_N.is_cuda:
        return total_N.tolist
    host_N = torch.empty(total_N.shape, dtype=total_N.dtype, pin_memory=True)
    host_N.copy_(total_N, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(total_N.device))

    def read() -> list[int]:
        arrived.synchronize()
        return host_N.tolist()

    return read


@lru_cache(4096)
def _divided(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many words are left over after whole blocks, and how many of those there are."""
    length_N = torch.tensor(lengths)
    return (length_N % BLOCK_WORDS).to(device), (length_N // BLOCK_WORDS).to(device)


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) * _GOLDEN * 2 + 1
