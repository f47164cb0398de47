"""Where the gradients of a step add up: one accumulator for each parameter that is trained.

    backward ──> parameter.grad ──hook──> accumulator += grad, parameter.grad freed

A gradient has the number format of its parameter, often bf16, and lives only until its hook has run: the sum of many
micros is rounded to bf16 only when that is asked for, and low-precision gradients never pile up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from treadle.train.ranks import ALONE, Ranks

PIECE_BYTES = 256 << 20  # fp32 copies of low-precision accumulators that exist at the same time


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
        self.by_name = {name: torch.zeros(p.shape, dtype=dtype, device=device) for name, p in live.items()}
        self._ranks = ranks
        owned = ranks.owned(live)
        self._own = {name: gradient for name, gradient in self.by_name.items() if name in owned}
        bridge = HostBridge(live, device)
        for name, parameter in live.items():
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(self.by_name[name], bridge))

    def collect(self) -> None:
        """Once per step: what all ranks added up, to where it is needed. The methods below then speak of the whole."""
        self._ranks.sum_to_owners(self.by_name)

    def norm(self) -> float:
        """The norm of all of them together, computed in fp32; waits for the device once."""
        own = 0.0
        if self._own:  # there may be more ranks than parameters
            norms = torch._foreach_norm(list(self._own.values()), 2, dtype=torch.float32)
            own = float(torch.linalg.vector_norm(torch.stack(norms)))
        return self._ranks.total_norm(own)

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(list(self._own.values()), factor)

    def zero(self) -> None:
        torch._foreach_zero_(list(self.by_name.values()))

    def pieces(self) -> Iterator[dict[str, Tensor]]:
        """This rank's gradients in fp32, by name: at once when they are fp32 already, or copies of a few at a time."""
        if all(g.dtype == torch.float32 for g in self._own.values()):
            yield dict(self._own)
            return
        piece: dict[str, Tensor] = {}
        for name, gradient in self._own.items():
            piece[name] = gradient.float()
            if sum(g.nbytes for g in piece.values()) >= PIECE_BYTES:
                yield piece
                piece = {}
        if piece:
            yield piece


class HostBridge:
    """Pinned host memory for one parameter, through which tensors cross between the device and host memory.

    Copies through pinned memory are several times faster than others. One buffer as large as the largest parameter
    gives that speed without pinning masters and accumulators themselves, which may be most of the machine's memory.
    """

    def __init__(self, live: Mapping[str, nn.Parameter], device: torch.device) -> None:
        largest = max((p.nbytes for p in live.values() if p.device != device), default=0)
        self._buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=largest > 0)

    def buffer_for(self, parameter: Tensor) -> Tensor:
        """The pinned memory, seen as a tensor like `parameter`."""
        return self._buffer[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def fetch(self, value: Tensor, device: torch.device) -> Tensor:
        """`value`, or a copy of it in the buffer when `device` is another; valid until the next crossing."""
        return value if value.device == device else self.buffer_for(value).copy_(value)

    def put(self, target: Tensor, value: Tensor) -> None:
        """Copy `value` into `target`; it is rounded before it crosses, so that half as many bytes do."""
        target.copy_(value if value.device == target.device else self.buffer_for(target).copy_(value))


def _move_gradient_to(accumulator: Tensor, bridge: HostBridge) -> Callable[[Tensor], None]:
    add = choose_adder(accumulator)

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            add(accumulator, bridge.fetch(parameter.grad, accumulator.device))
            parameter.grad = None

    return hook


def choose_adder(accumulator: Tensor) -> Callable[[Tensor, Tensor], object]:
    """accumulator += gradient; on CUDA by a kernel, because torch is slow at adding bf16 to fp32."""
    if accumulator.is_cuda and accumulator.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from treadle.train import kernels

        return kernels.add_to_fp32
    return Tensor.add_
