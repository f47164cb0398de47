"""AdamW with 8-bit moments that updates the live weights in place: 8 bytes per parameter instead of 18.

Rounding could lose small steps, so it is stochastic: moments are rounded to 8 bits (each block of 256 has its own
scale, see `QuantizedMoment`), weights to bf16.

torchao's version is not used: it needs a compiler at run time (a minute for the first step on a CPU), takes gradients
only in the weights' bf16, keeps small tensors' moments in bf16, and rounds moments to the nearest code, so a mean
square that changes by less than half a code per step never changes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.train.optimizer import Optimizer, part_of

if TYPE_CHECKING:
    from treadle.train.policy import Policy


BLOCK = 256
EPSILON = 1e-8
# Elements per chunk, a multiple of BLOCK: what fits a core's cache, or what fills a GPU but not its memory.
CPU_CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 24


class QuantizedMoment:
    """A running mean as 8-bit codes: value = peak of its block x (code / levels) squared `num_squarings` times.

    Squaring spends the codes where values are small: of 255 levels squared twice, the step at 1 % of the peak is an
    eighth of the value, where even levels would give two of them in all.
    """

    def __init__(self, num_blocks: int, device: torch.device, *, dtype: torch.dtype, num_squarings: int) -> None:
        self.codes = torch.zeros(num_blocks, BLOCK, dtype=dtype, device=device)
        self.peaks = torch.zeros(num_blocks, 1, device=device)
        self._num_levels = torch.iinfo(dtype).max
        self._num_squarings = num_squarings

    def read(self, blocks: slice) -> Tensor:
        codes = self.codes[blocks].float()
        return self._share(codes.abs()).mul_(self.peaks[blocks]).copysign_(codes)

    def write(self, blocks: slice, values: Tensor, generator: torch.Generator) -> None:
        """Round each value up or down at random, so that the expected result is the value."""
        sizes = values.abs()
        peaks = sizes.amax(1, keepdim=True)
        share = sizes.div_(peaks.clamp(min=torch.finfo(torch.float32).tiny))
        low = share
        for _ in range(self._num_squarings):
            low = low.sqrt()
        low = low.mul_(self._num_levels).floor_().clamp_(max=self._num_levels - 1)
        below, above = self._share(low), self._share(low + 1)
        chance = torch.rand(share.shape, generator=generator, device=share.device)
        rises = share.sub_(below) > chance.mul_(above.sub_(below))
        self.codes[blocks] = low.add_(rises).copysign_(values)
        self.peaks[blocks] = peaks

    def _share(self, codes: Tensor) -> Tensor:
        """The fraction of the peak that each code represents."""
        share = codes / self._num_levels
        for _ in range(self._num_squarings):
            share.mul_(share)
        return share


class AdamW8bit(Optimizer):
    """The whole update happens in `_write`; until then the clipped gradients stay in their accumulators."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        super().__init__(policy, config, policy.device)
        if any(p.dtype == torch.float16 for p in policy.live.values()):
            raise ConfigError(
                "adamw_8bit moves weights in place, and float16 is too coarse for that",
                fix="use --dtype bfloat16, or another --train.optimizer",
            )
        self._live = policy.live
        owned = policy.ranks.owned(policy.live)
        self._own = {name: p for name, p in policy.live.items() if name in owned}
        num_blocks = {name: -(-p.numel() // BLOCK) for name, p in self._own.items()}
        device = policy.device
        # The mean has a sign; of the square only the root matters, so it gets the steeper map.
        self._means, self._squares = (
            {name: QuantizedMoment(count, device, dtype=dtype, num_squarings=n) for name, count in num_blocks.items()}
            for dtype, n in ((torch.int8, 1), (torch.uint8, 2))
        )
        self._has_kernel = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self._generator = torch.Generator("cpu" if self._has_kernel else device)
        self._generator.manual_seed(config.seed + policy.ranks.rank)
        self._num_moves = 0
        self._pending_rate: float | None = None  # of a step that is not yet in the live weights
        self._pending_weights: Mapping[str, Tensor] = {}  # of a restored checkpoint

    def state(self) -> dict[str, Tensor]:
        tensors = super().state() | {"counter.num_moves": torch.tensor(self._num_moves)}
        tensors["rounding.generator"] = self._generator.get_state()
        for part, values in self._parts().items():
            tensors |= {f"{part}.{name}": value for name, value in values.items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        saved = {part: part_of(tensors, part, values) for part, values in self._parts().items()}
        weights = part_of(tensors, "live", self._live)
        super().load_state(tensors)
        for part, values in self._parts().items():
            for name, value in values.items():
                value.copy_(saved[part][name])
        self._num_moves = int(tensors["counter.num_moves"])
        if "rounding.generator" in tensors:  # absent for a rank that did not exist when it was saved
            self._generator.set_state(tensors["rounding.generator"].clone())
        self._pending_rate = None
        self._pending_weights = weights

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        return {
            "mean_codes": {name: m.codes for name, m in self._means.items()},
            "mean_peaks": {name: m.peaks for name, m in self._means.items()},
            "square_codes": {name: m.codes for name, m in self._squares.items()},
            "square_peaks": {name: m.peaks for name, m in self._squares.items()},
        }

    def _move(self, rate: float) -> None:
        if self._pending_rate is not None:
            raise RuntimeError("the step before this one was not published")
        self._pending_rate = rate

    @torch.no_grad()
    def _write(self) -> None:
        for name, weights in self._pending_weights.items():
            self._live[name].copy_(weights)
        self._pending_weights = {}
        if self._pending_rate is not None:
            self._num_moves += 1
            move = self._move_by_kernel if self._has_kernel else self._move_by_chunks
            for name in self._own:
                move(name, self._pending_rate)
            self._pending_rate = None
            self._gradients.zero()
        self._ranks.broadcast_weights(self._live)

    def _move_by_kernel(self, name: str, rate: float) -> None:
        from treadle.train import kernels

        mean, square, c = self._means[name], self._squares[name], self._config
        kernels.adamw_8bit_update(
            self._live[name].data,
            self.gradients[name],
            (mean.codes, mean.peaks),
            (square.codes, square.peaks),
            seed=int(torch.randint(1 << 31, (), generator=self._generator)),
            betas=c.betas,
            rate=rate,
            decay=1 - rate * c.weight_decay,
            num_moves=self._num_moves,
        )

    def _move_by_chunks(self, name: str, rate: float) -> None:
        weights, gradient = self._live[name].view(-1), self.gradients[name].view(-1)
        chunk = CPU_CHUNK if weights.device.type == "cpu" else DEVICE_CHUNK
        for first in range(0, weights.numel(), chunk):
            blocks = slice(first // BLOCK, (first + chunk) // BLOCK)
            part = slice(first, first + chunk)
            self._move_chunk(name, blocks, weights[part], gradient[part], rate)

    def _move_chunk(self, name: str, blocks: slice, weights: Tensor, gradient: Tensor, rate: float) -> None:
        c = self._config
        beta1, beta2 = c.betas
        fresh = pad(gradient.float(), (0, -weights.numel() % BLOCK)).view(-1, BLOCK)
        mean = self._means[name].read(blocks).lerp_(fresh, 1 - beta1)
        square = self._squares[name].read(blocks).lerp_(fresh.square(), 1 - beta2)
        self._means[name].write(blocks, mean, self._generator)
        self._squares[name].write(blocks, square, self._generator)
        root = square.div_(1 - beta2**self._num_moves).sqrt_().add_(EPSILON)
        step = mean.div_(root).mul_(rate / (1 - beta1**self._num_moves)).view(-1)[: weights.numel()]
        moved = weights.float().mul_(1 - rate * c.weight_decay).sub_(step)
        weights.copy_(round_stochastically(moved, self._generator) if weights.dtype == torch.bfloat16 else moved)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bf16, up or down at random, so that the expected result is the value.

    bf16 is the upper half of fp32. A random number below the lower half's range, added to the bits, carries into the
    upper half exactly as often as the lower half is far from zero.

    >>> third = torch.full((30000,), 1 + 1 / 3 / 128)  # a third of the way from 1 to the next bf16 number
    >>> mean = round_stochastically(third, torch.Generator().manual_seed(0)).float().mean()
    >>> round((float(mean) - 1) * 128, 2)
    0.33
    """
    noise = torch.randint(1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    return noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()
