"""Advantages and loss against an independent reference in numpy, written from the formulas and not from our code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.train.advantage import group_advantages
from treadle.train.loss import LossConfig, policy_loss


def reference_loss(logprobs, rollout, advantages, low, high, kl_coef):
    """PPO's clipped surrogate, token by token, with Schulman's k3 estimate of KL(rollout || policy)."""
    total = 0.0
    for new, old, advantage in zip(logprobs, rollout, advantages, strict=True):
        ratio = np.exp(new - old)
        unclipped = ratio * advantage
        clipped = min(max(ratio, 1 - low), 1 + high) * advantage
        total -= min(unclipped, clipped)
        total += kl_coef * (np.exp(old - new) - (old - new) - 1)
    return total


def reference_gradient(logprobs, *rest):
    """Central differences in float64."""
    steps = np.eye(len(logprobs)) * 1e-6
    return np.array([(reference_loss(logprobs + s, *rest) - reference_loss(logprobs - s, *rest)) / 2e-6 for s in steps])


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_reference(seed, kl_coef):
    random = np.random.default_rng(seed)
    rollout = -random.exponential(2.0, 64)
    logprobs = rollout + random.normal(0, 0.4, 64)
    advantages = random.normal(0, 1, 64)
    new = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    config = LossConfig(clip_low=0.2, clip_high=0.28, kl_coef=kl_coef)
    loss, _ = policy_loss(new, torch.tensor(rollout), torch.tensor(advantages), config)
    loss.backward()
    arguments = (rollout, advantages, 0.2, 0.28, kl_coef)
    assert loss.item() == pytest.approx(reference_loss(logprobs, *arguments), rel=1e-9)
    np.testing.assert_allclose(new.grad.numpy(), reference_gradient(logprobs, *arguments), atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "pushes"),
    [
        (1.0, 1.0, -1.0, True),
        (3.0, 1.0, -1.28, False),  # good and already much likelier: no further push
        (0.1, 1.0, -0.1, True),  # good but became rare: pull it back
        (3.0, -1.0, 3.0, True),  # bad and became likelier: must be pushed down
        (0.1, -1.0, 0.8, False),  # bad and already rare: no further push
    ],
)
def test_clip_takes_the_minimum_for_both_signs(ratio, advantage, loss, pushes):
    logprob = torch.tensor([ratio]).log().requires_grad_()
    value, _ = policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), LossConfig(0.2, 0.28))
    value.backward()
    assert value.item() == pytest.approx(loss, rel=1e-5)
    assert (logprob.grad.item() != 0) == pushes


def test_metrics_are_sums_over_tokens():
    new, old = torch.tensor([0.5, 2.0, 1.1]).log(), torch.zeros(3)
    _, sums = policy_loss(new, old, torch.tensor([-1.0, 1.0, 1.0]), LossConfig(0.2, 0.28))
    assert sums["tokens"] == 3
    assert sums["ratio"] == pytest.approx(3.6, rel=1e-5)
    assert sums["clipped"] == 2
    assert sums["kl"] == pytest.approx(sum(1 / r + np.log(r) - 1 for r in (0.5, 2.0, 1.1)), rel=1e-5)


@pytest.mark.parametrize(
    ("scores", "normalized", "centred"),
    [
        ([1.0, 0.0, 0.0, 1.0], [0.9998, -0.9998, -0.9998, 0.9998], [0.5, -0.5, -0.5, 0.5]),
        ([1.0, 0.0, 0.0, 0.0], [1.731651, -0.577217, -0.577217, -0.577217], [0.75, -0.25, -0.25, -0.25]),
        ([0.3, 0.3, 0.3], [0, 0, 0], [0, 0, 0]),
        ([5.0], [0], [0]),
        ([0.0, 1e-6], [-0.004975, 0.004975], [-5e-7, 5e-7]),  # a tiny spread is not blown up to one
    ],
)
def test_advantages(scores, normalized, centred):
    np.testing.assert_allclose(group_advantages(scores, normalize_std=True), normalized, atol=1e-5)
    np.testing.assert_allclose(group_advantages(scores, normalize_std=False), centred, atol=1e-12)


def reference_advantages(scores, normalize_std):
    """Mean and population standard deviation written out, without numpy's own."""
    count = len(scores)
    mean = sum(scores) / count
    deviation = (sum((s - mean) ** 2 for s in scores) / count) ** 0.5
    if count < 2 or max(scores) == min(scores):
        return [0.0] * count
    return [(s - mean) / (deviation + 1e-4) if normalize_std else s - mean for s in scores]


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_the_reference(seed, normalize_std):
    random = np.random.default_rng(seed)
    for size in (1, 2, 3, 8, 64):
        scores = random.choice([0.0, 0.1, 1.0, -1.0], size).tolist()
        ours = group_advantages(scores, normalize_std=normalize_std)
        np.testing.assert_allclose(ours, reference_advantages(scores, normalize_std), rtol=1e-9, atol=1e-12)
        assert abs(ours.sum()) < 1e-9
