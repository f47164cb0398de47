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
from treadle.train.optimizer import Optimizer, derive_seed, part_of
from treadle.train.sharding import join_parts, num_shards, own_part, own_rows, rows_of, shard_number

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
        return self.decode(self.codes[blocks], self.peaks[blocks])

    def decode(self, codes: Tensor, peaks: Tensor) -> Tensor:
        signed = codes.float()
        return self._share(signed.abs()).mul_(peaks).copysign_(signed)

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
        self._own = {name: own_part(p.detach()) for name, p in policy.live.items()}
        self._num_shards = max(num_shards(p) for p in policy.live.values())
        num_blocks = {name: count_blocks(p, self._num_shards) for name, p in policy.live.items()}
        device = policy.device
        # The mean has a sign; of the square only the root matters, so it gets the steeper map.
        self._means, self._squares = (
            {name: QuantizedMoment(count, device, dtype=dtype, num_squarings=n) for name, count in num_blocks.items()}
            for dtype, n in ((torch.int8, 1), (torch.uint8, 2))
        )
        self._has_kernel = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self._generator = torch.Generator("cpu" if self._has_kernel else device)
        self._num_moves = 0
        self._pending_rate: float | None = None  # of a step that is not yet in the live weights
        self._pending_weights: Mapping[str, Tensor] = {}  # of a restored checkpoint

    def state(self) -> dict[str, Tensor]:
        tensors = super().state() | {"counter.num_moves": torch.tensor(self._num_moves)}
        tensors["counter.num_shards"] = torch.tensor(self._num_shards)
        for name, p in self._live.items():
            for part, value in self._parts(name).items():
                full = (self._num_shards * value.shape[0], value.shape[1])
                tensors[f"{part}.{name}"] = join_parts(p, value, full)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        num_shards_then = int(tensors["counter.num_shards"])
        rows = {name: num_shards_then * count_blocks(p, num_shards_then) for name, p in self._live.items()}
        saved = {
            part: part_of(tensors, part, {name: torch.empty(n, size, device="meta") for name, n in rows.items()})
            for part, size in (("mean_codes", BLOCK), ("mean_peaks", 1), ("square_codes", BLOCK), ("square_peaks", 1))
        }
        weights = part_of(tensors, "live", self._live)
        super().load_state(tensors)
        self._pending_weights = {name: value[own_rows(self._live[name])] for name, value in weights}
        self._num_moves = int(tensors["counter.num_moves"])
        self._pending_rate = None
        self._seed()
        for moments, kind in ((self._means, "mean"), (self._squares, "square")):
            for (name, codes), (_, peaks) in zip(saved[f"{kind}_codes"], saved[f"{kind}_peaks"], strict=True):
                shards = list(zip(codes.chunk(num_shards_then), peaks.chunk(num_shards_then), strict=True))
                self._load_moment(moments[name], self._live[name], shards)

    def _load_moment(self, moment: QuantizedMoment, parameter: Tensor, shards: list[tuple[Tensor, Tensor]]) -> None:
        """Blocks do not end where shards end, so a moment of another number of shards is rounded again."""
        if len(shards) == self._num_shards:
            codes, peaks = shards[shard_number(parameter)]
            moment.codes.copy_(codes)
            moment.peaks.copy_(peaks)
            return
        own = _join_shards([moment.decode(*shard) for shard in shards], parameter)[own_rows(parameter)]
        moment.write(slice(None), _in_blocks(own.to(moment.codes.device), len(moment.codes)), self._generator)

    def _seed(self) -> None:
        """Random numbers depend on the step, so that a resumed run draws the same ones, and on the shard, so that the
        ranks that hold the same rows (replicas) round them alike."""
        shard = max(shard_number(p) for p in self._live.values())
        self._generator.manual_seed(derive_seed("adamw_8bit", self._config.seed, self._num_moves, shard))

    def _parts(self, name: str) -> dict[str, Tensor]:
        mean, square = self._means[name], self._squares[name]
        return {
            "mean_codes": mean.codes,
            "mean_peaks": mean.peaks,
            "square_codes": square.codes,
            "square_peaks": square.peaks,
        }

    def _move(self, rate: float) -> None:
        if self._pending_rate is not None:
            raise RuntimeError("the step before this one was not published")
        self._pending_rate = rate

    @torch.no_grad()
    def _write(self) -> None:
        for name, weights in self._pending_weights.items():
            self._own[name].copy_(weights)
        self._pending_weights = {}
        if self._pending_rate is not None:
            self._num_moves += 1
            self._seed()
            move = self._move_by_kernel if self._has_kernel else self._move_by_chunks
            for name in self._own:
                move(name, self._pending_rate)
            self._pending_rate = None
            self._gradients.zero()

    def _move_by_kernel(self, name: str, rate: float) -> None:
        from treadle.train import kernels

        mean, square, c = self._means[name], self._squares[name], self._config
        kernels.adamw_8bit_update(
            self._own[name],
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
        weights, gradient = self._own[name].view(-1), self.gradients[name].view(-1)
        chunk = CPU_CHUNK if weights.device.type == "cpu" else DEVICE_CHUNK
        for first in range(0, weights.numel(), chunk):
            part = slice(first, min(first + chunk, weights.numel()))
            blocks = slice(first // BLOCK, -(-part.stop // BLOCK))
            self._move_chunk(name, blocks, weights[part], gradient[part], rate)

    def _move_chunk(self, name: str, blocks: slice, weights: Tensor, gradient: Tensor, rate: float) -> None:
        c = self._config
        beta1, beta2 = c.betas
        fresh = _in_blocks(gradient.float())
        mean = self._means[name].read(blocks).lerp_(fresh, 1 - beta1)
        square = self._squares[name].read(blocks).lerp_(fresh.square(), 1 - beta2)
        self._means[name].write(blocks, mean, self._generator)
        self._squares[name].write(blocks, square, self._generator)
        root = square.div_(1 - beta2**self._num_moves).sqrt_().add_(EPSILON)
        step = mean.div_(root).mul_(rate / (1 - beta1**self._num_moves)).view(-1)[: weights.numel()]
        moved = weights.float().mul_(1 - rate * c.weight_decay).sub_(step)
        weights.copy_(round_stochastically(moved, self._generator) if weights.dtype == torch.bfloat16 else moved)


def count_blocks(parameter: Tensor, num_shards: int) -> int:
    """Blocks of a shard: as many as the first one needs, which is the largest."""
    num_rows = parameter.shape[0]
    rows = rows_of(num_rows, num_shards, 0)
    return -(-(rows.stop - rows.start) * (parameter.numel() // num_rows) // BLOCK)


def _in_blocks(values: Tensor, num_blocks: int = 0) -> Tensor:
    """The values in rows of BLOCK, padded with zeros; `num_blocks`: at least as many rows."""
    missing = max(num_blocks * BLOCK - values.numel(), -values.numel() % BLOCK)
    return pad(values.reshape(-1), (0, missing)).view(-1, BLOCK)


def _join_shards(shards: list[Tensor], parameter: Tensor) -> Tensor:
    """The full tensor like `parameter` of the shards' blocks, which are padded."""
    num_rows = parameter.shape[0]
    row_size = parameter.numel() // max(num_rows, 1)
    rows = (rows_of(num_rows, len(shards), number) for number in range(len(shards)))
    parts = [blocks.view(-1)[: (r.stop - r.start) * row_size] for blocks, r in zip(shards, rows, strict=True)]
    return torch.cat(parts).view(parameter.shape)


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
