"""Decode one token per running sequence, with a dense KV cache and, on a GPU, a captured CUDA graph.

The cache plugs into transformers through its public attention interface: the model's own code computes queries, keys
and rotary positions; `KVCache.attend` does what lies between them and the output projection.

A decode step of a small model launches about a thousand kernels, most of which finish before Python launches the next.
A CUDA graph launches all of them at once. The addresses it reads and writes are fixed, so a graph stays valid while the
batch keeps its rows and the longest row fits. It is captured once that has been true for a few steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from treadle.log import get_logger

_numbers = count()  # there may be several models in one process; each registers an attention name of its own
# Positions by which the cache grows. On a CPU its rows are copied when they are split; a CUDA graph ends when it grows.
GROWTH = {"cpu": 16, "cuda": 64}
log = get_logger("engine")
CAPTURE_AFTER = 3  # steps without a change of the batch; a capture takes as long as two steps
MIN_REPLAYS = 8  # a graph that was replayed less often doubles the wait for the next capture
MAX_WAIT = 48  # steps
# Largest relative difference between the hidden states of a captured and a plain step that rounding explains.
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


class KVCache:
    """A dense cache: one row per sequence, each with its own length.

    A prefill computes the keys of prompts (a second one continues the first, for prompts with a common prefix), and
    `add_rows` then gives each completion its row. A decode adds one position to every row.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.revision = 0  # changes whenever the addresses of keys and values change
        self.clear()

    @property
    def capacity(self) -> int:
        """Positions per row before the cache must grow."""
        return self._keys[0].shape[2]

    def clear(self) -> None:
        self.revision += 1
        self._keys = [torch.empty(0)] * self._num_layers
        self._values = [torch.empty(0)] * self._num_layers
        self.begin_prefill()

    def begin_prefill(self) -> None:
        self._positions_B: Tensor | None = None  # positions a decode writes to; None during a prefill
        self._prompt_keys = [torch.empty(0)] * self._num_layers
        self._prompt_values = [torch.empty(0)] * self._num_layers
        self._mask: Tensor | None = None

    def continue_prefill(self, num_before: int, num_more: int, device: torch.device) -> None:
        """The next forward continues the last prefill, which had one row, in several rows."""
        mask = torch.ones(num_more, num_before + num_more, dtype=torch.bool, device=device)
        self._mask = mask.tril(diagonal=num_before)

    def add_rows(self, copies: list[int]) -> None:
        """Append `copies[i]` rows for prompt i of the last prefill."""
        self.revision += 1
        repeats = torch.tensor(copies, device=self._prompt_keys[0].device)
        for stored, prompts in ((self._keys, self._prompt_keys), (self._values, self._prompt_values)):
            for layer, prompt in enumerate(prompts):
                old, new = stored[layer], prompt.repeat_interleave(repeats, 0)
                length = max(old.shape[2] if old.numel() else 0, new.shape[2] + 1)
                new = _grow(new, length)
                stored[layer] = torch.cat([_grow(old, length), new]) if old.numel() else new
        self.begin_prefill()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows and drop all others."""
        self.revision += 1
        for layer in range(len(self._keys)):
            self._keys[layer] = self._keys[layer][rows]
            self._values[layer] = self._values[layer][rows]

    def ensure_capacity(self, length: int) -> None:
        if length <= self.capacity:
            return
        self.revision += 1
        for layer in range(len(self._keys)):
            self._keys[layer] = _grow(self._keys[layer], length)
            self._values[layer] = _grow(self._values[layer], length)

    def begin_decode(self, positions_B: Tensor, length: int, *, is_ragged: bool) -> None:
        """The next forward adds one position to each row and attends to `length` positions.

        `is_ragged`: rows have different lengths, so mask what lies beyond each row's own.
        """
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
        num_rows, num_heads, _, size = query.shape
        # The query heads of a key head as its queries: on a CPU twice as fast as enable_gqa, which repeats the keys.
        out = F.scaled_dot_product_attention(
            query.view(num_rows, key.shape[1], -1, size), seen_keys, seen_values, attn_mask=self._mask, scale=scaling
        )
        return out.view(num_rows, 1, num_heads, size)

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


def install_attention(model: Any, cache: KVCache) -> None:
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
    growth = GROWTH[tensor.device.type]
    room = -(-length // growth) * growth
    return F.pad(tensor, (0, 0, 0, room - tensor.shape[2]))


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A decode step that can be replayed; `out` is overwritten by every replay."""

    replay: Callable[[], object]
    out: Tensor


CaptureStep = Callable[[Callable[[], Tensor]], CapturedStep]


class Decoder:
    """Decodes one position per row, and captures steps where it can.

    `forward(tokens, positions)` is the model's forward, which attends through `cache`. `capture` captures a step; None:
    never capture.
    """

    def __init__(
        self, forward: Callable[[Tensor, Tensor], Tensor], cache: KVCache, capture: CaptureStep | None = None
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._capture = capture
        self._wait = CAPTURE_AFTER
        self._captured: CapturedStep | None = None
        self._num_replays = 0
        self._reset()

    def step(self, tokens_B: Tensor, positions: list[int]) -> Tensor:
        """The last hidden state of every row after its token; valid until the next step.

        `positions` is a list, because reading a tensor back from the GPU would synchronize.
        """
        length = max(positions) + 1
        self._cache.ensure_capacity(length)
        if self._cache.revision != self._revision or (self._captured is not None and length > self._span):
            self._reset()
        positions_B = torch.tensor(positions, device=tokens_B.device)
        if self._captured is not None:
            self._tokens_B.copy_(tokens_B)
            self._positions_B.copy_(positions_B)
            self._captured.replay()
            self._num_replays += 1
            return self._captured.out
        compute = partial(self._compute, tokens_B, positions_B, length, is_ragged=min(positions) + 1 < length)
        hidden_B = compute()
        self._num_same += 1
        if self._capture is None or self._num_same < self._wait:
            return hidden_B
        if self._try_capture(self._capture, tokens_B, positions_B, length, hidden_B):
            return hidden_B
        return compute()  # a failed capture may have written wrong keys and values

    def _reset(self) -> None:
        if self._captured is not None:
            self._wait = CAPTURE_AFTER if self._num_replays >= MIN_REPLAYS else min(2 * self._wait, MAX_WAIT)
        self._revision = self._cache.revision
        self._num_same = self._num_replays = self._span = 0
        self._captured = None
        self._tokens_B = self._positions_B = torch.empty(0)

    def _compute(self, tokens_B: Tensor, positions_B: Tensor, length: int, *, is_ragged: bool) -> Tensor:
        self._cache.begin_decode(positions_B, length, is_ragged=is_ragged)
        return self._forward(tokens_B[:, None], positions_B[:, None])[:, -1]

    def _try_capture(
        self, capture: CaptureStep, tokens_B: Tensor, positions_B: Tensor, length: int, expected_B: Tensor
    ) -> bool:
        """Capture a step that covers more positions than are used yet, masked beyond each row's end.

        The replay is compared with the step that was just computed; it writes the same keys and values again.
        """
        tokens_B, positions_B = tokens_B.clone(), positions_B.clone()
        growth = GROWTH[tokens_B.device.type]
        span = min(-(-length // growth) * growth, self._cache.capacity)
        try:
            captured = capture(lambda: self._compute(tokens_B, positions_B, span, is_ragged=True))
            captured.replay()
            # relative, of the row that differs most
            difference_B = (captured.out.float() - expected_B.float()).norm(dim=-1) / expected_B.float().norm(dim=-1)
            difference = float(difference_B.max())
        except RuntimeError as error:
            # If a capture is aborted because memory runs out, that is the error's context.
            if any(isinstance(found, torch.OutOfMemoryError) for found in (error, error.__context__)):
                self._num_same, self._wait = 0, min(2 * self._wait, MAX_WAIT)
                log.warning("cuda_graph_not_captured", reason="out of memory", fix="nothing: it is retried later")
                return False
            # For example a model whose code reads values back from the GPU.
            problem: str | None = str(error).splitlines()[0]
        else:
            is_equal = difference <= MAX_DIFFERENCE[expected_B.dtype]  # False for NaN
            problem = None if is_equal else f"its result differs by {difference:.2g}"
        if problem is not None:
            self._capture = None
            log.warning(
                "cuda_graph_not_captured", reason=problem, fix="nothing: decoding continues without CUDA graphs"
            )
            return False
        self._captured, self._span, self._tokens_B, self._positions_B = captured, span, tokens_B, positions_B
        return True


class CudaGraphCapture:
    """Captures a step as a CUDA graph.

    A capture that fails halfway leaves torch 2.11 in a broken state. What makes it fail is a synchronization with the
    GPU, so the step is first run once with synchronization forbidden.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        warnings.filterwarnings("ignore", message="Synchronization debug mode")  # it warns that it is a prototype

    def __call__(self, work: Callable[[], Tensor]) -> CapturedStep:
        current, mode = torch.cuda.current_stream(self._device), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    work()  # also does what libraries set up at their first call on a stream, which cannot be captured
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
                torch.cuda.synchronize(self._device)
                # Return the memory of that run and of earlier graphs; torch would keep it and allocate the same again.
                torch.cuda.empty_cache()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")  # other threads may keep using the GPU
                try:
                    out = work()
                finally:
                    graph.capture_end()
                return CapturedStep(graph.replay, out)
        finally:
            current.wait_stream(self._stream)
