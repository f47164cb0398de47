"""Decode one token per running sequence, with a dense KV cache and, on a GPU, a captured CUDA graph.

The cache plugs into transformers through its public attention interface: the model's own code computes queries, keys
and rotary positions; `KVCache.attend` does what lies between them and the output projection.

A decode step of a small model launches about a thousand kernels, most of which finish before Python launches the next.
A CUDA graph launches all of them at once. The addresses it reads and writes are fixed, so a graph stays valid while the
batch keeps its rows and the longest row fits. It is captured once that has been true for a few steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from treadle.log import get_logger

_numbers = count()  # several engines may live in one process; each model attends through a name of its own
GROWTH = 64  # the cache grows in steps of so many positions
log = get_logger("engine")
RECORD_AFTER = 3  # steps: a recording takes as long as two of them
WORTH_IT = 8  # replays of a recording; after fewer, the next one is waited for twice as long
LONGEST_WAIT = 48  # steps
# How far a recorded step may be from a plain one, as a share of a row's hidden state: what rounding explains.
MAX_APART = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class KVCache:
    """A dense cache: one row a sequence, each with its own length.

    Two kinds of forward: a prefill remembers the keys of prompts (a second one continues the first, for prompts that
    begin alike), `adopt` then gives each completion a row of its own; a decode adds one position to every row.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.number = 0  # another one whenever keys and values lie elsewhere
        self.clear()

    @property
    def room(self) -> int:
        """Positions that a row can have without growing."""
        return self._keys[0].shape[2]

    def clear(self) -> None:
        self.number += 1
        self._keys = [torch.empty(0)] * self._num_layers
        self._values = [torch.empty(0)] * self._num_layers
        self._positions_B: Tensor | None = None  # where a decode writes; None during a prefill
        self._mask: Tensor | None = None
        self._forget_prompts()

    def begin_prefill(self) -> None:
        self._positions_B = None
        self._forget_prompts()

    def continue_prefill(self, num_before: int, num_more: int, device: torch.device) -> None:
        """The next forward goes on where the last prefill (one row) ended, in several rows."""
        mask = torch.ones(num_more, num_before + num_more, dtype=torch.bool, device=device)
        self._mask = mask.tril(diagonal=num_before)

    def adopt(self, copies: list[int]) -> None:
        """Give prompt i of the last prefill `copies[i]` rows, behind the rows that are already there."""
        self.number += 1
        repeats = torch.tensor(copies, device=self._prompt_keys[0].device)
        for layer, (keys, values) in enumerate(zip(self._prompt_keys, self._prompt_values, strict=True)):
            self._keys[layer] = self._append(self._keys[layer], keys.repeat_interleave(repeats, 0))
            self._values[layer] = self._append(self._values[layer], values.repeat_interleave(repeats, 0))
        self._forget_prompts()

    def keep(self, rows: Tensor) -> None:
        """Forget every row but these."""
        self.number += 1
        for layer in range(len(self._keys)):
            self._keys[layer] = self._keys[layer][rows]
            self._values[layer] = self._values[layer][rows]

    def make_room(self, length: int) -> None:
        if length <= self.room:
            return
        self.number += 1
        for layer in range(len(self._keys)):
            self._keys[layer] = _grow(self._keys[layer], length)
            self._values[layer] = _grow(self._values[layer], length)

    def begin_decode(self, positions_B: Tensor, length: int, *, is_ragged: bool) -> None:
        """The next forward adds one position to each row, and looks at `length` of them; ragged: up to its own."""
        self._positions_B = positions_B
        self._rows = torch.arange(len(positions_B), device=positions_B.device)
        steps = torch.arange(length, device=positions_B.device)
        self._mask = (steps[None, :] <= positions_B[:, None])[:, None, None, :] if is_ragged else None
        self._length = length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [B, heads, T, D], key and value [B, kv heads, T, D] -> [B, T, heads, D]."""
        if self._positions_B is None:
            return self._attend_to_prompts(layer, query, key, value, scaling)
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows, :, self._positions_B] = key[:, :, 0]
        values[self._rows, :, self._positions_B] = value[:, :, 0]
        seen_keys, seen_values = keys[:, :, : self._length], values[:, :, : self._length]
        out = F.scaled_dot_product_attention(
            query, seen_keys, seen_values, attn_mask=self._mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _attend_to_prompts(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self._prompt_keys[layer].numel():
            shared = (len(key), -1, -1, -1)
            key = torch.cat([self._prompt_keys[layer].expand(shared), key], 2)
            value = torch.cat([self._prompt_values[layer].expand(shared), value], 2)
        self._prompt_keys[layer], self._prompt_values[layer] = key, value
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self._mask, is_causal=self._mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _forget_prompts(self) -> None:
        self._prompt_keys = [torch.empty(0)] * self._num_layers
        self._prompt_values = [torch.empty(0)] * self._num_layers
        self._mask = None

    @staticmethod
    def _append(old: Tensor, new: Tensor) -> Tensor:
        if old.numel() == 0:
            return _grow(new, new.shape[2] + 1)
        length = max(old.shape[2], new.shape[2] + 1)
        return torch.cat([_grow(old, length), _grow(new, length)])


def plug_in(model: Any, cache: KVCache) -> None:
    """Make `model` attend through `cache`."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer: int = module.layer_idx  # type: ignore[assignment]
        return cache.attend(layer, query, key, value, scaling), None

    name = f"treadle_decode_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def _grow(tensor: Tensor, length: int) -> Tensor:
    if tensor.shape[2] >= length:
        return tensor
    room = -(-length // GROWTH) * GROWTH
    return F.pad(tensor, (0, 0, 0, room - tensor.shape[2]))


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
