"""Define the optimizer base class, gradient accumulation and the learning rate schedule.

    backward ──> parameter.grad ──hook──> accumulator += grad, parameter.grad freed

A gradient has the number format of its parameter, often bf16, and exists only until its hook has run. Sums over micros
are in fp32 (or in bf16 if configured), and low-precision gradients never accumulate.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.train.model_files import shape_in
from treadle.train.ranks import ALONE, Ranks
from treadle.train.sharding import join_parts, num_shards, own_part

if TYPE_CHECKING:
    from treadle.train.policy import Policy


PIECE_BYTES = 256 << 20  # fp32 copies of low-precision accumulators that exist at the same time
MAX_SKIPPED_IN_A_ROW = 5
NUM_THRESHOLDS = 65_536  # of rounding: bf16 lacks 16 bits of fp32. A weight's depends on its index modulo this.
THRESHOLD_STEP = 40_503  # odd and near the golden ratio: all values occur, and those of neighbours differ widely
NAN_BITS = 0x7FC0  # of bf16
ROUNDED_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}  # multiples of NUM_THRESHOLDS
COUNTERS = ("num_skipped", "num_skipped_in_a_row")
Adder = Callable[[Tensor, Tensor], object]


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 1: linear warm-up, then the schedule until the last step.

    >>> from treadle.config import TrainConfig
    >>> c = TrainConfig(lr=3.0, warmup_steps=3, steps=10, schedule="constant")
    >>> [learning_rate(s, c) for s in (1, 2, 3, 4)]
    [1.0, 2.0, 3.0, 3.0]
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * max(left, 0.0)


def derive_seed(*parts: object) -> int:
    """A seed for one purpose and step: equal parts give equal random numbers, before and after a resume.

    >>> derive_seed("dropout", 0, 1) == derive_seed("dropout", 0, 1) != derive_seed("dropout", 0, 2)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())


class Gradients:
    """The accumulators of `live`, in `dtype`, on `device` (host memory for an optimizer that works there).

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> gradients = Gradients({"w": weight}, torch.float32, torch.device("cpu"))
    >>> for _ in range(2):
    ...     (weight * torch.tensor([3.0, 4.0])).sum().backward()
    >>> gradients.norm(), weight.grad
    (10.0, None)
    """

    def __init__(
        self, live: Mapping[str, nn.Parameter], dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self._live = live
        self._ranks = ranks
        self.by_name = {
            name: torch.zeros(own_part(p).shape, dtype=dtype, device=device) for name, p in live.items()
        }  # of this rank's rows
        buffer = PinnedBuffer(live, device)
        for name, parameter in live.items():
            accumulator = self.by_name[name]
            hook = partial(_accumulate, choose_adder(accumulator), accumulator, buffer)
            parameter.register_post_accumulate_grad_hook(hook)

    def norm(self) -> float:
        """The norm over all parameters, in fp32; synchronizes with the device once."""
        norms = torch._foreach_norm(list(self.by_name.values()), 2, dtype=torch.float32)
        own = float(torch.linalg.vector_norm(torch.stack(norms)))
        if self._ranks.size == 1:
            return own
        copies = self._ranks.size / max(num_shards(p) for p in self._live.values())  # ranks that have the same rows
        return math.sqrt(self._ranks.reduce(own**2, "sum") / copies)

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(list(self.by_name.values()), factor)

    def zero(self) -> None:
        torch._foreach_zero_(list(self.by_name.values()))

    def pieces(self) -> Iterator[dict[str, Tensor]]:
        """The gradients in fp32, by name and divided like their parameters: all at once if they are fp32, else copies
        of a few at a time."""
        if all(g.dtype == torch.float32 for g in self.by_name.values()):
            yield {name: join_parts(self._live[name], gradient) for name, gradient in self.by_name.items()}
            return
        piece: dict[str, Tensor] = {}
        num_bytes = 0
        for name, gradient in self.by_name.items():
            wide = gradient.float()
            piece[name] = join_parts(self._live[name], wide)
            num_bytes += wide.nbytes
            if num_bytes >= PIECE_BYTES:
                yield piece
                piece, num_bytes = {}, 0
        if piece:
            yield piece


class PinnedBuffer:
    """Pinned host memory for one parameter, used for copies between the device and host memory.

    Copies through pinned memory are several times faster. One buffer of the size of the largest parameter is enough;
    pinning all masters and accumulators could take most of the machine's memory.
    """

    def __init__(self, live: Mapping[str, nn.Parameter], device: torch.device) -> None:
        parts = [own_part(p) for p in live.values()]
        largest = max((part.nbytes for part in parts if part.device != device), default=0)
        self._buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=largest > 0)

    def buffer_for(self, parameter: Tensor) -> Tensor:
        """The pinned memory as a tensor like `parameter`."""
        return self._buffer[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def fetch(self, value: Tensor, device: torch.device) -> Tensor:
        """`value`, or a copy on `device`; in host memory it is in the buffer, and valid until the next copy."""
        if value.device == device:
            return value
        return self.buffer_for(value).copy_(value) if device.type == "cpu" else value.to(device)

    def put(self, target: Tensor, value: Tensor, first: int = 0) -> None:
        """Copy `value` into `target`; it is rounded before the transfer, which halves the bytes. `first`: see
        `write_rounded`."""
        near = target if value.device == target.device else self.buffer_for(target)
        write_rounded(near, value, first)
        if near is not target:
            target.copy_(near)


def write_rounded(target: Tensor, values: Tensor, first: int = 0) -> None:
    """Copy fp32 `values` into bf16 `target`; a value is rounded away from zero if the bits that bf16 lacks reach the
    threshold of its place.

    Rounding to the nearest would hide every step that is smaller than half of the distance between two bf16 numbers,
    and a pretrained weight is such a number exactly. The thresholds are spread evenly over all weights, so the mean of
    a step is written from the first step on. A weight keeps its threshold: it changes once on the way, not at every
    step. `first`: index of `values` in the whole tensor, so that the number of ranks makes no difference. Other formats
    are copied.

    >>> moved = torch.full((65_536,), 1.0 + 2**-9)  # a quarter of the way to the next bf16 number
    >>> rounded = torch.empty(65_536, dtype=torch.bfloat16)
    >>> write_rounded(rounded, moved)
    >>> (rounded > 1).float().mean().item()
    0.25
    """
    if target.dtype != torch.bfloat16 or values.dtype != torch.float32:
        target.copy_(values)
        return
    rounded = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    numbers, flat = rounded.view(torch.int16).view(-1), values.contiguous().view(-1)
    piece = ROUNDED_AT_ONCE["cuda" if values.is_cuda else "cpu"]
    thresholds = _thresholds(values.device)[first % NUM_THRESHOLDS :][:NUM_THRESHOLDS]
    for start in range(0, len(numbers), piece):
        _round_piece(numbers[start : start + piece], flat[start : start + piece], thresholds)
    if rounded is not target:
        target.copy_(rounded)


def _round_piece(numbers: Tensor, values: Tensor, thresholds: Tensor) -> None:
    """Write the upper halves of `values` plus thresholds into `numbers`, the bits of bf16. A NaN stays one."""
    bits, num_periods = values.view(torch.int32), len(values) // NUM_THRESHOLDS
    end = num_periods * NUM_THRESHOLDS
    if num_periods:
        periods = bits[:end].view(num_periods, NUM_THRESHOLDS) + thresholds
        numbers[:end].view(num_periods, NUM_THRESHOLDS).copy_(periods.bitwise_right_shift_(16))
    if end < len(bits):
        numbers[end:] = (bits[end:] + thresholds[: len(bits) - end]).bitwise_right_shift_(16)
    # The sum of a NaN's bits overflows, into 0 or infinity. On a GPU, to wait for the check costs more than to fill.
    if values.is_cuda or values.sum().isnan():
        numbers.masked_fill_(values.isnan(), NAN_BITS)


@lru_cache(maxsize=8)
def _thresholds(device: torch.device) -> Tensor:
    """The thresholds of two periods, so that a whole one begins at any index of the first."""
    indices = torch.arange(2 * NUM_THRESHOLDS, dtype=torch.int64, device=device)
    return (indices * THRESHOLD_STEP % NUM_THRESHOLDS).int()


def _accumulate(add: Adder, accumulator: Tensor, buffer: PinnedBuffer, parameter: Tensor) -> None:
    if parameter.grad is not None:
        gradient = own_part(parameter.grad)
        if not gradient.is_cuda and gradient.is_pinned():  # offloaded: torch 2.11 may still be copying it
            torch.cuda.current_stream().synchronize()
        add(accumulator, buffer.fetch(gradient, accumulator.device))
        parameter.grad = None


def choose_adder(accumulator: Tensor) -> Adder:
    """accumulator += gradient; on CUDA by a Triton kernel, because torch is slow at adding bf16 to fp32."""
    if accumulator.is_cuda and accumulator.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from treadle.train import kernels

        return kernels.add_to_fp32
    return Tensor.add_


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the loss or the gradient was not finite: nothing was changed
    num_skipped: int  # skipped steps since the start of the training
    num_skipped_in_a_row: int

    def metrics(self) -> dict[str, float]:
        return {
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "skipped_steps": float(self.num_skipped),
            "skipped_in_a_row": float(self.num_skipped_in_a_row),
        }


class Optimizer(ABC):
    """`step(n)` uses the accumulated gradients; publishing the policy writes the result into the live weights.

    An engine may be reading the live weights, so they change only in `_write`, which the policy calls while the engine
    is paused. Publish after every step.
    """

    def __init__(
        self, policy: Policy, config: TrainConfig, device: torch.device, rate: Callable[[int], float] | None = None
    ) -> None:
        """`rate`: the learning rate of a step, instead of the configured schedule."""
        self.name: str = config.optimizer
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._config = config
        self._ranks = policy.ranks
        self._gradients = Gradients(policy.live, getattr(torch, config.gradient_dtype), device, policy.ranks)
        self.gradients: Mapping[str, Tensor] = self._gradients.by_name  # accumulated since the last step
        self._rate = rate or partial(learning_rate, config=config)
        policy.write_step = self._write

    def step(self, step: int, *, loss_is_finite: bool = True) -> StepOutcome:
        """Clip the gradients and take step `step`, counted from 1.

        A gradient of exactly zero (no group had a signal) changes nothing: momentum alone is not evidence. A loss or
        gradient that is not finite is skipped; five in a row end the training.
        """
        rate = self._rate(step)
        norm = self._gradients.norm()
        skipped = not (loss_is_finite and math.isfinite(norm))
        if skipped:
            self._gradients.zero()
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
            if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise TrainingError(
                    f"the loss or the gradient was not a finite number in {MAX_SKIPPED_IN_A_ROW} steps in a row; "
                    "the weights were left alone",
                    fix="lower --train.lr, or look at the rewards and logprobs of the last batches",
                )
        else:
            self.num_skipped_in_a_row = 0
            if norm > self._config.max_grad_norm:
                self._gradients.scale(self._config.max_grad_norm / norm)
            if norm > 0:
                self._move(rate)
        return StepOutcome(norm, rate, skipped, self.num_skipped, self.num_skipped_in_a_row)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on, by name: `<part>.<parameter>`, which is sharded if the parameter
        is, and counters."""
        return {f"counter.{name}": torch.tensor(getattr(self, name)) for name in COUNTERS}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, and `live.<name>` of the weights; publish after it."""
        for name in COUNTERS:
            setattr(self, name, int(tensors[f"counter.{name}"]))

    @abstractmethod
    def _move(self, rate: float) -> None:
        """Take the step with the clipped gradients, or leave it to `_write`; zero the gradients after use."""

    @abstractmethod
    def _write(self) -> None:
        """Write the last step into the live weights."""


def part_of(tensors: Mapping[str, Tensor], part: str, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each `<part>.<name>`, read one at a time. They must have exactly the names and full shapes of
    `like`, which is checked before the first is read."""
    names = {key.removeprefix(f"{part}.") for key in tensors if key.startswith(f"{part}.")}
    wrong = names ^ like.keys()
    wrong |= {name for name in names & like.keys() if shape_in(tensors, f"{part}.{name}") != tuple(like[name].shape)}
    if wrong:
        raise TrainingError(
            f"the checkpoint does not fit what is trained now: {len(wrong)} tensors differ, {sorted(wrong)[0]} for one",
            fix="resume with the model, layers and adapters it was saved with, or choose another --train.save-path",
        )
    return ((name, tensors[f"{part}.{name}"]) for name in like)
