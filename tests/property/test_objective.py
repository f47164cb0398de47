"""The objective does not depend on how the tokens of a step are cut into micros, nor on their order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.config.train import MISMATCHES, OBJECTIVES, ObjectiveOptions
from treadle.train.loss import LossStats, LossTokens, policy_loss


@dataclass(frozen=True)
class Token:
    logprob: float
    rollout: float  # NaN: not sent
    old: float
    reference: float
    advantage: float
    weight: float


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


LOGPROBS = number(-4.0, 0.0)
TOKENS = st.builds(
    Token, LOGPROBS, LOGPROBS | st.just(math.nan), LOGPROBS, LOGPROBS, number(-2.0, 2.0), number(0.0, 1.0)
)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=5)
OPTIONS = st.builds(
    ObjectiveOptions,
    objective=st.sampled_from(sorted(OBJECTIVES)),
    mismatch=st.sampled_from(sorted(MISMATCHES)),
    dual_clip=st.sampled_from([None, 3.0]),
    kl_coef=st.sampled_from([0.0, 0.25]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_against=st.sampled_from(["rollout", "reference"]),
)


def score(sequences: list[list[Token]], options: ObjectiveOptions, *, is_first_epoch: bool, scale: float = 1.0):
    """One micro: its loss, the gradient of each sequence, its stats."""
    tokens = [token for sequence in sequences for token in sequence]

    def row(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float32)

    logprobs_L = row("logprob").requires_grad_()
    loss_tokens = LossTokens(
        rollout_logprobs_L=row("rollout"),
        old_logprobs_L=None if is_first_epoch else row("old"),
        reference_logprobs_L=row("reference"),
        advantages_L=row("advantage"),
        weights_L=row("weight") * scale,
        sequences_L=torch.tensor([i for i, s in enumerate(sequences) for _ in s], dtype=torch.long),
        num_sequences=len(sequences),
    )
    loss, stats = policy_loss(logprobs_L, -row("logprob"), loss_tokens, options)
    loss.backward()
    gradients = [part.tolist() for part in logprobs_L.grad.split([len(s) for s in sequences])]
    return loss.item(), gradients, stats


def nearly(expected, size: float = 1.0):
    """Equal but for the order in which fp32 numbers were added, whose sum may be small while they are not."""
    return pytest.approx(expected, rel=1e-5, abs=1e-6 * max(1.0, size))


def check_ranges(metrics: dict[str, float]) -> None:
    for name in (
        "clipped_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean", "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_is_oob_ratio", "rollout_corr/rollout_rs_masked_fraction", "batch/without_logprobs_frac",
    ):  # fmt: skip
        assert 0 <= metrics[name] <= 1, name
    for name in ("mean_kl", "rollout_corr/k3_kl"):
        assert metrics[name] >= -1e-7, name
    smallest, mean, largest = (
        metrics[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")
    )
    assert smallest <= mean * (1 + 1e-6)
    assert mean <= largest * (1 + 1e-6)


@given(SEQUENCES, OPTIONS, st.booleans(), st.data())
def test_micros_add_up_to_the_step_however_it_is_cut(sequences, options, is_first_epoch, data):
    loss, gradients, stats = score(sequences, options, is_first_epoch=is_first_epoch)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequences)), max_size=4)))
    parts = [
        score(sequences[start:end], options, is_first_epoch=is_first_epoch)
        for start, end in zip([0, *cuts], [*cuts, len(sequences)], strict=True)
    ]
    in_parts = LossStats()
    for _, _, of_part in parts:
        in_parts = in_parts.add(of_part)
    size = sum(abs(value) for row in gradients for value in row)
    assert sum(part[0] for part in parts) == nearly(loss, size)
    for row, expected in zip((row for part in parts for row in part[1]), gradients, strict=True):
        assert row == nearly(expected, size)
    assert in_parts.metrics() == nearly(stats.metrics())
    check_ranges(in_parts.metrics())


@given(SEQUENCES, OPTIONS, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_changes_nothing(sequences, options, is_first_epoch, random):
    loss, gradients, stats = score(sequences, options, is_first_epoch=is_first_epoch)
    order = list(range(len(sequences)))
    random.shuffle(order)
    shuffled_loss, shuffled, shuffled_stats = score(
        [sequences[i] for i in order], options, is_first_epoch=is_first_epoch
    )
    size = sum(abs(value) for row in gradients for value in row)
    assert shuffled_loss == nearly(loss, size)
    for i, row in zip(order, shuffled, strict=True):
        assert row == nearly(gradients[i], size)
    assert shuffled_stats.metrics() == nearly(stats.metrics())


@given(SEQUENCES, OPTIONS, st.booleans(), st.sampled_from([0.0, 0.5, 3.0, 1024.0]))
def test_weights_scale_the_loss_and_nothing_else(sequences, options, is_first_epoch, scale):
    loss, gradients, stats = score(sequences, options, is_first_epoch=is_first_epoch)
    scaled_loss, scaled, scaled_stats = score(sequences, options, is_first_epoch=is_first_epoch, scale=scale)
    size = scale * sum(abs(value) for row in gradients for value in row)
    assert scaled_loss == nearly(scale * loss, size)
    for row, expected in zip(scaled, gradients, strict=True):
        assert row == nearly([scale * value for value in expected], size)
    metrics, scaled_metrics = stats.metrics(), scaled_stats.metrics()
    for name in ("loss", "policy_loss"):
        assert scaled_metrics.pop(name) == nearly(scale * metrics.pop(name), size)
    assert scaled_metrics == metrics
