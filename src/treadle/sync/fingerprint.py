"""Compute fingerprints that show whether two processes have the same weights, cheap enough for every publish.

The bytes of a weight are read as 64-bit words and summed with odd factors, modulo 2^64: a changed, moved or swapped
word changes the sum. Of a large weight only the first and the last block and a sixteenth of the others are read, which
differs with every version: a publish reads about a tenth of the model, and two dozen publishes read all of it.

The blocks of many weights are gathered and summed together. Weight by weight, a GPU would run thousands of small
kernels, during a tenth of a second in which the engine samples nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 11  # 16 KiB: its factors fit the first-level cache of a core
PARTS = 16
BATCH_BYTES = 256 << 20  # weights that are computed for this exist at the same time up to this size
CACHED_BATCH_BYTES = 1 << 30  # of weights in fixed memory; about 150 MB of it are copied, and a GPU may be full
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as a signed number


def fingerprints(weights: Iterable[tuple[str, Tensor]], policy_version: int) -> dict[str, str]:
    """Equal for equal bytes in any process and on any device.

    >>> a, b = torch.arange(12, dtype=torch.float32), torch.ones(5)
    >>> fingerprints([("a", a), ("b", b)], 0) == fingerprints([("a", a.clone())], 0) | fingerprints([("b", b)], 0)
    True
    >>> fingerprints([("a", a)], 0) == fingerprints([("a", a.flip(0))], 0)
    False
    """
    return begin_fingerprints(weights, policy_version)()


def begin_fingerprints(
    weights: Iterable[tuple[str, Tensor]], policy_version: int, cache: FingerprintCache | None = None
) -> Callable[[], dict[str, str]]:
    """Start to compute fingerprints of the current weights; the returned function waits for the GPU and returns them.
    `cache`: makes repeated calls cheaper for weights whose memory does not move."""
    names: list[str] = []

    def named_weights() -> Iterator[Tensor]:
        for name, weight in weights:
            names.append(name)
            yield weight

    parts = [sampled_part(policy_version)]
    if cache is None:
        sums = []
        for batch in _in_batches(named_weights(), BATCH_BYTES):
            sums.append(_WeightBatch(batch).begin_sums(parts))
            batch.clear()  # frees weights that are computed on demand (merged with adapters) before the next ones
    else:
        sums = [batch.begin_sums(parts) for batch in cache.batches(list(named_weights()))]
    return lambda: dict(zip(names, itertools.chain.from_iterable(read() for read in sums), strict=True))


class FingerprintCache:
    """Keeps the views of weights whose memory does not move; making them is most of the CPU cost of a fingerprint. They
    are made again if a weight has moved.

    It keeps the weights alive, so it is not for temporary weights, such as those merged with adapters.
    """

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._addresses: list[int] = []
        self._batches: list[_WeightBatch] = []

    def batches(self, weights: list[Tensor]) -> list[_WeightBatch]:
        addresses = [weight.data_ptr() for weight in weights]  # a tensor may have been given other memory
        if addresses == self._addresses and all(map(_have_same_bytes, weights, self._weights)):
            return self._batches
        self._weights, self._addresses, self._batches = [], [], []
        batches = [_WeightBatch(batch) for batch in _in_batches(weights, CACHED_BATCH_BYTES)]
        if all(_can_be_viewed(weight) for weight in weights):  # cached copies would give old results
            self._weights, self._addresses, self._batches = weights, addresses, batches
            for batch in batches:
                batch.prepare()
        return batches


def whole_fingerprint(weight: Tensor) -> str:
    """Fingerprint of all blocks; to find changes, not for every publish."""
    (found,) = _WeightBatch([weight]).begin_sums(range(PARTS))()
    return found


def sampled_part(policy_version: int) -> int:
    """Which sixteenth is read: scattered, so that publishing every 2nd, 4th or 8th version covers all of them too.

    >>> [len({sampled_part(step * number) for number in range(24)}) for step in (1, 2, 4, 8)] == [PARTS] * 4
    True
    """
    return ((policy_version * _GOLDEN) % 2**64) >> 60


def _in_batches(weights: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Batches of weights on one device."""
    batch: list[Tensor] = []
    num_bytes = 0
    for weight in weights:
        if batch and (num_bytes + weight.nbytes > max_bytes or batch[0].device != weight.device):
            yield batch
            batch, num_bytes = [], 0
        batch.append(weight)
        num_bytes += weight.nbytes
    if batch:
        yield batch


@dataclass(frozen=True, eq=False)
class _Shares:
    """Which weight each of M values belongs to, and its factor in the sum."""

    row_M: Tensor
    factor_M: Tensor

    def add(self, total_N: Tensor, values_M: Tensor) -> None:
        total_N.index_add_(0, self.row_M, values_M * self.factor_M)


class _WeightBatch:
    """Weights that are summed together, as words. Words after the last whole block of a weight are a short block."""

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
        rests = [(own, length, length % BLOCK_WORDS) for own, length in pairs if length % BLOCK_WORDS]
        self._rests = [own.as_strided((n,), (1,), own.storage_offset() + length - n) for own, length, n in rests]
        self._ends = [_ends(own, num) for own, num in self._whole]
        self._num_ends = sum(map(len, self._ends))
        rest_row_M, rest_position_M = _rows_and_positions(num_rest_N, sum(map(len, self._rests)))
        end_row_M, end_position_M = _rows_and_positions(self._num_blocks_N.clamp(max=2), self._num_ends)
        self._always = _Shares(
            torch.cat([rest_row_M, end_row_M]),
            torch.cat([self._factors[rest_position_M], self._factors[5:7][end_position_M]]),
        )
        self._parts: dict[int, tuple[list[Tensor], _Shares]] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Prepare every part, so that none of the next publishes is slower."""
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
        read, numbers = _read_later(total_N), self._numbers  # no reference to the weights: they may be freed
        return lambda: [f"{(total + num) & (2**64 - 1):016x}" for total, num in zip(read(), numbers, strict=True)]

    def _part(self, part: int) -> tuple[list[Tensor], _Shares]:
        """The blocks of a part and their factors: different odd numbers, so that swapped blocks are detected."""
        if part not in self._parts:
            blocks = [_every_16th(own, part, num) for own, num in self._whole if num > part]
            num_N = (self._num_blocks_N - part + PARTS - 1).clamp(min=0) // PARTS
            row_M, position_M = _rows_and_positions(num_N, sum(map(len, blocks)))
            self._parts[part] = blocks, _Shares(row_M, position_M * (2 * PARTS) + 2 * part + 7)
        return self._parts[part]

    def _of_blocks(self, blocks: list[Tensor]) -> Tensor:
        """Sums of each block's words times the factors of their positions; CUDA has no integer matrix product."""
        gathered = torch.cat([self._nothing.view(0, BLOCK_WORDS), *blocks])
        if gathered.is_cuda:
            return (gathered * self._factors).sum(-1)
        return gathered @ self._factors


def _have_same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors with the same address have the same bytes in the same order."""
    if one is other:
        return True
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _can_be_viewed(weight: Tensor) -> bool:
    """Whether a weight can be viewed as words without a copy: contiguous and aligned."""
    return weight.is_contiguous() and weight.nbytes % 8 == 0 and weight.data_ptr() % 8 == 0


def _words(weight: Tensor) -> Tensor:
    flat = weight.contiguous().view(-1)
    if _can_be_viewed(flat):
        return flat.view(torch.int64)
    raw = flat.view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)  # a copy


def _ends(words: Tensor, num_blocks: int) -> Tensor:
    """The first and the last whole block; one block if there is only one."""
    return words.as_strided((min(num_blocks, 2), BLOCK_WORDS), ((num_blocks - 1) * BLOCK_WORDS, 1))


def _every_16th(words: Tensor, first: int, num_blocks: int) -> Tensor:
    num = len(range(first, num_blocks, PARTS))
    begin = words.storage_offset() + first * BLOCK_WORDS
    return words.as_strided((num, BLOCK_WORDS), (PARTS * BLOCK_WORDS, 1), begin)


def _rows_and_positions(num_N: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """For `num` values, of which each weight has `num_N` in order: the weight's index, and the position among its
    values. Does not synchronize with the device.
    """
    begin_N = num_N.cumsum(0) - num_N
    row_M = torch.repeat_interleave(num_N, output_size=num)
    return row_M, torch.arange(num, device=num_N.device) - begin_N[row_M]


def _read_later(total_N: Tensor) -> Callable[[], list[int]]:
    """A function that waits for these numbers only, not for work that was queued later."""
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
    """(words after the last whole block, number of whole blocks)."""
    length_N = torch.tensor(lengths)
    return (length_N % BLOCK_WORDS).to(device), (length_N // BLOCK_WORDS).to(device)


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(BLOCK_WORDS, dtype=torch.int64, device=device) * _GOLDEN * 2 + 1
