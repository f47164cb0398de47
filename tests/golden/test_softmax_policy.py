"""A policy small enough to write down: gradients of our losses in its parameters, against those of the objectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treadle.config.train import ObjectiveOptions
from treadle.train.loss import LossTokens, kl_terms, policy_loss

VOCAB = 5
SEQUENCES = [[0, 3, 1], [2, 2, 4, 1, 0], [1], [4, 0, 3, 3]]  # each token is drawn from the row of the one before
ADVANTAGES = [1.0, -0.7, 0.4, -1.3]


def tables(seed: int, distance: float) -> tuple[Tensor, Tensor]:
    """Logits of the old policy, and of one at some distance from it that is trained."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    moved = old + distance * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    return old, moved.requires_grad_()


def probability(table: Tensor, sequence: list[int]) -> Tensor:
    """pi(sequence): the product of its tokens' probabilities."""
    result = torch.ones((), dtype=torch.float64)
    for before, token in zip([0, *sequence], sequence, strict=False):
        weights = table[before].exp()
        result = result * weights[token] / weights.sum()
    return result


def our_gradient(objective: str, old: Tensor, table: Tensor) -> Tensor:
    before = torch.tensor([b for s in SEQUENCES for b in [0, *s[:-1]]])
    token = torch.tensor([t for s in SEQUENCES for t in s])
    logprobs_L = table.log_softmax(-1)[before, token]
    tokens = LossTokens(
        rollout_logprobs_L=old.log_softmax(-1)[before, token],
        old_logprobs_L=None,
        reference_logprobs_L=None,
        advantages_L=torch.tensor(
            [a for a, s in zip(ADVANTAGES, SEQUENCES, strict=True) for _ in s], dtype=torch.float64
        ),
        weights_L=torch.tensor([1 / (len(SEQUENCES) * len(s)) for s in SEQUENCES for _ in s], dtype=torch.float64),
        sequences_L=torch.tensor([i for i, s in enumerate(SEQUENCES) for _ in s]),
        num_sequences=len(SEQUENCES),
    )
    loss, _ = policy_loss(logprobs_L, torch.zeros_like(logprobs_L), tokens, ObjectiveOptions(objective=objective))
    return torch.autograd.grad(loss, table)[0]


@pytest.mark.parametrize(("objective", "low", "high"), [("gspo", 3e-4, 4e-4), ("rl_max", 0.2, 0.2)])
@pytest.mark.parametrize("distance", [1e-4, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_objective_of_whole_sequences(objective, low, high, distance, seed):
    """J = mean over sequences of min(s A, clip(s) A), s = pi / pi_old of the sequence, for GSPO to the 1 / length."""
    old, table = tables(seed, distance)
    gains = []
    for sequence, advantage in zip(SEQUENCES, ADVANTAGES, strict=True):
        s = probability(table, sequence) / probability(old, sequence)
        s = s ** (1 / len(sequence)) if objective == "gspo" else s
        gains.append(torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    expected = torch.autograd.grad(-torch.stack(gains).mean(), table)[0]
    assert expected.abs().max() > 0
    torch.testing.assert_close(our_gradient(objective, old, table), expected, rtol=1e-9, atol=1e-12)


def expected_gradient(table: Tensor, target: Tensor, estimator: str) -> Tensor:
    """What the KL term's gradient is on average over tokens that the policy itself samples: every token enumerated."""
    logprobs = table.log_softmax(-1)
    loss = (logprobs.exp().detach() * kl_terms(logprobs - target.log_softmax(-1), estimator)).sum()
    return torch.autograd.grad(loss, table)[0]


def test_what_each_kl_estimator_gives_on_average():
    """The values of k1 and k3 are KL(policy, target). As losses, k1 does nothing, k2 lowers it, k3 the reverse."""
    target, table = tables(0, 0.5)
    policy, other = table.log_softmax(-1), target.log_softmax(-1)
    kl = (policy.exp() * (policy - other)).sum()
    reverse = (other.exp() * (other - policy)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_terms(policy - other, estimator)).sum(), kl)
    zero = torch.zeros_like(table)
    torch.testing.assert_close(expected_gradient(table, target, "k1"), zero, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        expected_gradient(table, target, "k2"), torch.autograd.grad(kl, table, retain_graph=True)[0]
    )
    torch.testing.assert_close(expected_gradient(table, target, "k3"), torch.autograd.grad(reverse, table)[0])
