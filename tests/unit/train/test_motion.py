"""Do small steps arrive? Each optimizer on bf16 weights against itself on fp32 weights; `pytest -s` prints a table."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.processors import NEEDS_BF16
from tests.tiny_policy import TinyPolicy, gradients_of
from treadle.config import TrainConfig
from treadle.train.optimizers import OPTIMIZERS, MasterOptimizer, Optimizer, build_optimizer

NUM_STEPS = 50
NUM_MICROS = 2  # whose gradients add up to that of a step
NAMES = [pytest.param(name, marks=NEEDS_BF16) if name == "muon" else name for name in OPTIMIZERS]
SMALL_STEP = {"lr": 1e-6, "warmup_steps": 0, "schedule": "constant"}


class Trained(NamedTuple):
    policy: TinyPolicy
    optimizer: Optimizer
    motion: Tensor  # of what is exact: the masters, where there are any
    shown: Tensor  # motion of the live weights


@functools.cache
def train(optimizer_name: str, dtype: torch.dtype, gradient_dtype: str) -> Trained:
    policy = TinyPolicy(dtype)
    config = TrainConfig(optimizer=optimizer_name, gradient_dtype=gradient_dtype, **SMALL_STEP)
    optimizer = build_optimizer(policy, config)
    before = policy.snapshot()
    for step in range(1, NUM_STEPS + 1):
        for micro in range(NUM_MICROS):
            policy.backward(gradients_of(policy, NUM_MICROS * step + micro))
        optimizer.step(step)
        policy.write_live_weights()
    shown = motion = difference(policy.snapshot(), before)
    if isinstance(optimizer, MasterOptimizer):
        motion = difference({name: master.detach() for name, master in optimizer.masters.items()}, before)
    return Trained(policy, optimizer, motion, shown)


def difference(after: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def realised(motion: Tensor, wanted: Tensor) -> float:
    """Share of the intended change that happened: 1.0 if all of it did, regardless of noise."""
    return float(motion.double() @ wanted.double() / (wanted.double() @ wanted.double()))


def bytes_per_parameter(policy, optimizer) -> float:
    state = [tensor for name, tensor in optimizer.state().items() if name != "rounding.generator"]
    tensors = [*policy.live.values(), *optimizer.gradients.values(), *state]
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in policy.live.values())


def report(name: str, moved: float, shown: float, size: float) -> None:
    print(f"\n{name:<22} realised {moved:8.2%}   shown by bf16 weights {shown:8.2%}   {size:5.2f} bytes per parameter")


@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps_of_a_millionth_arrive(name, gradient_dtype):
    wanted = train(name, torch.float32, "float32").motion
    policy, optimizer, motion, shown = train(name, torch.bfloat16, gradient_dtype)
    size = bytes_per_parameter(policy, optimizer)
    report(f"{name} {gradient_dtype}", realised(motion, wanted), realised(shown, wanted), size)
    assert wanted.abs().mean() > 5e-6  # it had somewhere to go
    assert realised(motion, wanted) == pytest.approx(1, abs=0.05)
    assert realised(shown, wanted) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw_8bit"])  # which has no masters
def test_live_weights_are_neighbours_of_the_masters(name):
    policy, optimizer, *_ = train(name, torch.bfloat16, "float32")
    for parameter, master in zip(policy.live.values(), optimizer.masters.values(), strict=True):
        distance = 2.0 ** (torch.frexp(master).exponent - 8)  # between bf16 numbers, which have 8 significant bits
        assert bool(((parameter.float() - master).abs() < distance).all())


def test_eight_bit_moments_move_the_weights_as_fp32_moments_do():
    wanted = train("adamw", torch.float32, "float32").motion
    motion = train("adamw_8bit", torch.bfloat16, "float32").motion
    exact_weights = train("adamw_8bit", torch.float32, "float32").motion
    report("adamw_8bit to adamw", realised(exact_weights, wanted), realised(motion, wanted), 8.03)
    assert realised(motion, wanted) == pytest.approx(1, abs=0.05)
    assert realised(exact_weights, wanted) == pytest.approx(1, abs=0.01)
    # and not only on average: on fp32 weights there is no other noise, and the two paths end close together
    assert torch.linalg.vector_norm(exact_weights - wanted) < 0.1 * torch.linalg.vector_norm(wanted)


def test_plain_adamw_on_bf16_weights_hardly_moves_them():
    """For comparison: this is why masters or stochastic rounding are needed."""
    wanted = train("adamw", torch.float32, "float32").motion
    policy = TinyPolicy()
    before = policy.snapshot()
    plain = torch.optim.AdamW(policy.live.values(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, NUM_STEPS + 1):
        for micro in range(NUM_MICROS):
            policy.backward(gradients_of(policy, NUM_MICROS * step + micro))
        plain.step()
        plain.zero_grad()
    share = realised(difference(policy.snapshot(), before), wanted)
    report("plain bf16 AdamW", share, share, 2 + 2 + 4)
    assert share < 0.10
