"""Keys and values of the running sequences, and the attention that reads them.

Plugged into transformers through its public attention interface: the model's own code computes queries, keys and
rotary positions; what happens between them and the output projection is ours.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

_numbers = count()  # several engines may live in one process; each model attends through a name of its own
GROWTH = 64  # the cache grows in steps of so many positions


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
