"""One more position for every running sequence; on a GPU as one recorded piece of work.

A decode step of a small model is a thousand kernels, most of them over before Python has asked for the next one. A CUDA
graph asks for all of them at once. What it reads and writes is fixed, so a recording is good for as long as the batch
has the same rows and its longest one fits, and is made once that has lasted a few steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treadle.engines.kv_cache import GROWTH, KVCache
from treadle.log import get_logger

log = get_logger("engine")
RECORD_AFTER = 3  # steps: a recording takes as long as two of them
WORTH_IT = 8  # replays of a recording; after fewer, the next one is waited for twice as long
LONGEST_WAIT = 48  # steps
# How far a recorded step may be from a plain one, as a share of a row's hidden state: what rounding explains.
MAX_APART = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True, eq=False)
class Recorded:
    replay: Callable[[], object]
    out: Tensor  # the same memory after every replay


Recorder = Callable[[Callable[[], Tensor]], Recorded]


class Decoder:
    """`forward(tokens, positions)` is the model's, through `cache`; `record` makes work repeatable, where it can be."""

    def __init__(
        self, forward: Callable[[Tensor, Tensor], Tensor], cache: KVCache, record: Recorder | None = None
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._record = record
        self._wait = RECORD_AFTER
        self._recorded: Recorded | None = None
        self._num_replays = 0
        self._forget()

    def step(self, tokens_B: Tensor, positions: list[int]) -> Tensor:
        """The last hidden state of every row, after its token at its position. (What must be known of these here is not
        asked of a GPU, which would be waited for.) Good until the next step."""
        length = max(positions) + 1
        self._cache.make_room(length)
        if self._cache.number != self._number or (self._recorded is not None and length > self._span):
            self._forget()
        positions_B = torch.tensor(positions, device=tokens_B.device)
        if self._recorded is not None:
            self._tokens_B.copy_(tokens_B)
            self._positions_B.copy_(positions_B)
            self._recorded.replay()
            self._num_replays += 1
            return self._recorded.out
        compute = partial(self._compute, tokens_B, positions_B, length, is_ragged=min(positions) + 1 < length)
        hidden_B = compute()
        self._num_alike += 1
        if self._record is None or self._num_alike < self._wait:
            return hidden_B
        if self._try_to_record(self._record, tokens_B, positions_B, length, hidden_B):
            return hidden_B
        return compute()  # a recording that computes something else has left its keys and values behind

    def _forget(self) -> None:
        if self._recorded is not None:
            self._wait = RECORD_AFTER if self._num_replays >= WORTH_IT else min(2 * self._wait, LONGEST_WAIT)
        self._number = self._cache.number
        self._num_alike = self._num_replays = self._span = 0
        self._recorded = None
        self._tokens_B = self._positions_B = torch.empty(0)

    def _compute(self, tokens_B: Tensor, positions_B: Tensor, length: int, *, is_ragged: bool) -> Tensor:
        self._cache.begin_decode(positions_B, length, is_ragged=is_ragged)
        return self._forward(tokens_B[:, None], positions_B[:, None])[:, -1]

    def _try_to_record(
        self, record: Recorder, tokens_B: Tensor, positions_B: Tensor, length: int, expected_B: Tensor
    ) -> bool:
        """Over some positions more than there are, with what lies beyond a row's end masked. It must compute what this
        step just did: to write the same keys and values again changes nothing."""
        tokens_B, positions_B = tokens_B.clone(), positions_B.clone()
        span = min(-(-length // GROWTH) * GROWTH, self._cache.room)
        try:
            recorded = record(lambda: self._compute(tokens_B, positions_B, span, is_ragged=True))
            recorded.replay()
            apart = _apart(recorded.out, expected_B)
        except RuntimeError as error:
            if _lacks_memory(error):
                self._num_alike, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
                log.warning("decoding_not_recorded", reason="no memory for it", fix="nothing: it is tried again later")
            else:  # of a model whose code asks the GPU for numbers on the way
                self._give_up(str(error).splitlines()[0])
            return False
        if not apart <= MAX_APART[expected_B.dtype]:
            self._give_up(f"it computes something else, {apart:.2g} apart")
            return False
        self._recorded, self._span, self._tokens_B, self._positions_B = recorded, span, tokens_B, positions_B
        return True

    def _give_up(self, reason: str) -> None:
        self._record = None
        log.warning("decoding_not_recorded", reason=reason, fix="nothing: it decodes as it did, step by step")


def _lacks_memory(error: BaseException) -> bool:
    """Also where that it ended a recording is what is said."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError)


def _apart(found_B: Tensor, expected_B: Tensor) -> float:
    """The row that differs most."""
    difference_B = (found_B.float() - expected_B.float()).norm(dim=-1)
    return float((difference_B / expected_B.float().norm(dim=-1)).max())


class CudaGraphs:
    """`record` of a GPU. A recording that begins and fails leaves torch 2.11 in disorder; so what makes it
    fail, waiting for a number of the GPU, is looked for before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # that it is a prototype

    def __call__(self, work: Callable[[], Tensor]) -> Recorded:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return self._record(work)
        finally:
            current.wait_stream(self._stream)

    def _record(self, work: Callable[[], Tensor]) -> Recorded:
        with _refusing_to_wait():
            work()  # also: what libraries set up at their first call on a stream cannot be recorded
        torch.cuda.synchronize(self._device)
        # What that took, and earlier recordings had: torch would keep both, and ask for as much again.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on speaking to the GPU
        try:
            out = work()
        finally:
            graph.capture_end()
        return Recorded(graph.replay, out)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
