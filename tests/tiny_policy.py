"""What an optimizer sees of a policy, around a handful of tensors and no transformer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from treadle.train.ranks import ALONE


class TinyPolicy(nn.Module):
    """An embedding, three matrices (one that is no multiple of 256) and two vectors; bf16 numbers from N(0, 0.02)."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 256)
        self.square, self.tall, self.odd = (nn.Linear(*size, bias=False) for size in ((256, 256), (256, 300), (61, 37)))
        self.scale, self.short = nn.Parameter(torch.empty(256)), nn.Parameter(torch.empty(100))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = (0.02 * torch.randn(parameter.shape, generator=generator)).bfloat16().to(dtype)
        self.to(device)
        self.device = self.scale.device
        self.model = self
        self.adapter = None
        self.ranks = ALONE
        self.live = self.weights = dict(self.named_parameters())
        self.write_step: Callable[[], None] = lambda: None

    def write_live_weights(self) -> None:
        self.write_step()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> None:
        return None

    def backward(self, gradients: dict[str, Tensor]) -> None:
        """A backward pass whose gradients are these, in each parameter's number format."""
        torch.stack([(p * gradients[name].to(p)).sum() for name, p in self.live.items()]).sum().backward()

    def snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().float().clone() for name, p in self.live.items()}


def gradients_of(policy: TinyPolicy, step: int, *, size: float = 1e-3) -> dict[str, Tensor]:
    """As in training: a direction that lasts, smaller in some rows than in others, under noise of each step's own."""
    gradients = {}
    for number, (name, p) in enumerate(policy.live.items()):
        lasting, noise = _normal(p.shape, number), _normal(p.shape, 1000 * step + number)
        rows = 10 ** -_normal((p.shape[0], *[1] * (p.ndim - 1)), number).abs()
        gradients[name] = size * rows * (lasting + noise)
    return gradients


@functools.cache
def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
