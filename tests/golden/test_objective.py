"""Every objective against an independent reference: loss, gradient and metrics, in float64 and in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from treadle.config.train import MISMATCHES, OBJECTIVES, ObjectiveOptions
from treadle.train.loss import LossTokens, policy_loss, policy_terms

from . import reference
from .reference import Token

CONSTANT = 7.0  # what sequence_constant divides by
VARIANTS = {
    "as named": {},
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "sequence_constant": {"aggregation": "sequence_constant"},
    "dual clip": {"dual_clip": 1.5},
    "trainer's old logprobs": {"old_logprobs": "trainer"},
    "mask alone": {"importance_mask": (0.7, 1.4)},
    **{name: {"mismatch": name, "kl_coef": 0.05} for name in MISMATCHES},
    **{
        f"{estimator} against {target}": {"kl_coef": 0.3, "kl_estimator": estimator, "kl_against": target}
        for estimator in ("k1", "k2", "k3")
        for target in ("rollout", "reference")
    },
}


class Case:
    """Random sequences, some without the engine's logprobs; numbers that fp32 holds exactly."""

    def __init__(self, seed: int, *, epoch: int, spread: float, distill_coef: float = 0.0) -> None:
        random = np.random.default_rng(seed)

        def near(value: float, scale: float) -> float:
            return float(np.float32(value + random.normal(0, scale)))

        self.logprobs: list[list[float]] = []
        self.entropies: list[list[float]] = []
        self.sequences: list[list[Token]] = []
        for _ in range(6):
            is_known = random.random() < 0.8
            advantage = near(0, 1) if random.random() < 0.85 else 0.0
            self.logprobs.append([])
            self.entropies.append([])
            self.sequences.append([])
            for _ in range(random.integers(1, 6)):
                sampled = float(np.float32(-random.exponential(2.0)))
                old = near(sampled, spread)
                self.logprobs[-1].append(near(old, spread) if epoch > 1 else old)
                self.entropies[-1].append(float(np.float32(random.exponential(1.0))))
                token = Token(advantage, sampled if is_known else None, old if epoch > 1 else None, near(sampled, 0.3))
                if distill_coef:
                    has_teacher = random.random() < 0.8
                    token = replace(
                        token, teacher=near(sampled, 1.0) if has_teacher else None, distill_coef=distill_coef
                    )
                self.sequences[-1].append(token)

    def weights(self, aggregation: str) -> list[float]:
        """Each token's share in the mean, as the trainer hands it to the loss."""
        lengths = [len(sequence) for sequence in self.sequences]
        share = {
            "token_mean": [1 / sum(lengths)] * len(lengths),
            "sequence_mean": [1 / (len(lengths) * length) for length in lengths],
            "sequence_constant": [1 / (len(lengths) * CONSTANT)] * len(lengths),
        }[aggregation]
        return [weight for weight, length in zip(share, lengths, strict=True) for _ in range(length)]

    def ours(self, options: ObjectiveOptions, dtype: torch.dtype) -> tuple[float, np.ndarray, dict[str, float]]:
        tokens = [token for sequence in self.sequences for token in sequence]
        is_first_epoch = tokens[0].old is None

        def row(values: list[float | None]) -> torch.Tensor:
            return torch.tensor([np.nan if value is None else value for value in values], dtype=dtype)

        teacher = {}
        if any(token.distill_coef for token in tokens):
            teacher["teacher_logprobs_L"] = row([token.teacher for token in tokens])
            teacher["teacher_coefs_L"] = row([token.distill_coef for token in tokens])
        logprobs_L = row([value for values in self.logprobs for value in values]).requires_grad_()
        loss, stats = policy_loss(
            logprobs_L,
            row([value for values in self.entropies for value in values]),
            LossTokens(
                rollout_logprobs_L=row([token.rollout for token in tokens]),
                old_logprobs_L=None if is_first_epoch else row([token.old for token in tokens]),
                reference_logprobs_L=row([token.reference for token in tokens]),
                advantages_L=row([token.advantage for token in tokens]),
                weights_L=row(self.weights(options.aggregation)),
                sequences_L=torch.tensor([i for i, sequence in enumerate(self.sequences) for _ in sequence]),
                num_sequences=len(self.sequences),
                **teacher,
            ),
            options,
        )
        loss.backward()
        return loss.item(), logprobs_L.grad.numpy(), stats.metrics()


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_gradient_and_metrics_equal_the_reference(objective, variant, epoch):
    compare(ObjectiveOptions(objective=objective, **VARIANTS[variant]), epoch=epoch)


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("variant", ["as named", "strict", "k3 against reference"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_reverse_kl_to_a_teacher_equals_the_reference(objective, variant, epoch):
    compare(ObjectiveOptions(objective=objective, **VARIANTS[variant]), epoch=epoch, distill_coef=0.75)


def compare(options: ObjectiveOptions, *, epoch: int, distill_coef: float = 0.0) -> None:
    # the second is near the old policy; GSPO's bounds are a thousand times nearer to 1 than the others'
    for seed, spread in enumerate((0.4, 4e-4 if options.objective == "gspo" else 0.1)):
        case = Case(seed, epoch=epoch, spread=spread, distill_coef=distill_coef)
        loss, _ = reference.losses(case.logprobs, case.logprobs, case.sequences, options, CONSTANT)
        gradient = reference.gradient(case.logprobs, case.sequences, options, CONSTANT)
        metrics = reference.metrics(case.logprobs, case.entropies, case.sequences, options, CONSTANT)
        for dtype, rtol, atol in ((torch.float64, 1e-7, 1e-9), (torch.float32, 1e-5, 3e-7)):
            our_loss, our_gradient, our_metrics = case.ours(options, dtype)
            assert our_loss == pytest.approx(loss, rel=rtol, abs=atol)
            np.testing.assert_allclose(our_gradient, gradient, rtol=rtol, atol=atol)
            assert our_metrics == pytest.approx(metrics, rel=rtol, abs=atol)


def one_token(times: float, advantage: float, **settings: object) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and metrics of one token of weight 1 whose probability has changed by the factor `times`."""
    logprobs_L = torch.tensor([times]).log().requires_grad_()
    tokens = LossTokens(
        rollout_logprobs_L=torch.zeros(1),
        old_logprobs_L=None,
        reference_logprobs_L=None,
        advantages_L=torch.tensor([advantage]),
        weights_L=torch.ones(1),
        sequences_L=torch.zeros(1, dtype=torch.long),
        num_sequences=1,
    )
    loss, stats = policy_loss(logprobs_L, torch.zeros(1), tokens, ObjectiveOptions(**settings))
    loss.backward()
    return loss.item(), logprobs_L.grad.item(), stats.metrics()


@pytest.mark.parametrize("ratio_of", ["token", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, None),
        (1.0, -1.0, 1.0, 1.0, None),
        (3.0, 1.0, -1.2, 0.0, "high"),  # good and already much likelier: no further push
        (0.1, 1.0, -0.1, -0.1, None),  # good but became rare: it is pulled back
        (3.0, -1.0, 3.0, 3.0, None),  # bad and became likelier: it is pushed down, all the harder
        (0.1, -1.0, 0.8, 0.0, "low"),  # bad and already rare: no further push
        (1.199, 1.0, -1.199, -1.199, None),
        (1.201, 1.0, -1.2, 0.0, "high"),
        (0.801, -1.0, 0.801, 0.801, None),
        (0.799, -1.0, 0.8, 0.0, "low"),
        (1.201, -1.0, 1.201, 1.201, None),
        (0.799, 1.0, -0.799, -0.799, None),
        (3.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_clip_takes_the_smaller_gain_for_both_signs(ratio, advantage, loss, gradient, clipped, ratio_of):
    value, slope, metrics = one_token(ratio, advantage, ratio=ratio_of, clip_low=0.2, clip_high=0.2)
    assert (value, slope) == pytest.approx((loss, gradient), rel=1e-5)
    assert metrics["clip_ratio/low_mean"] == (clipped == "low")
    assert metrics["clip_ratio/high_mean"] == (clipped == "high")


@pytest.mark.parametrize(("bound", "advantage"), [(1.2, 1.0), (0.8, -1.0)])
def test_a_ratio_exactly_on_the_bound_still_pushes(bound, advantage):
    ratio_L = torch.tensor([bound], requires_grad=True)
    options = ObjectiveOptions(clip_low=0.2, clip_high=0.2)
    policy_terms(ratio_L, torch.zeros(1), torch.tensor([advantage]), options).sum().backward()
    assert ratio_L.grad.item() == -advantage


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.9, -1.0, 2.9, 2.9),
        (3.1, -1.0, 3.0, 0.0),  # bounded, and without gradient: one wild token does not rule the step
        (1000.0, -2.0, 6.0, 0.0),
        (0.1, -1.0, 0.8, 0.0),
        (1000.0, 1.0, -1.2, 0.0),  # good tokens are as without it
        (0.1, 1.0, -0.1, -0.1),
    ],
)
def test_dual_clip_bounds_what_a_bad_token_costs(ratio, advantage, loss, gradient):
    value, slope, _ = one_token(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert (value, slope) == pytest.approx((loss, gradient), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1.0, -1.0),
        (3.0, 1.0, -3.0),
        (7.0, 1.0, -5.0),  # the weight is cut at 1 + 4, the token still learns
        (7.0, -1.0, 5.0),
        (0.01, -1.0, 0.01),  # no bound below
    ],
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, advantage, gradient):
    loss, slope, _ = one_token(ratio, advantage, objective="cispo")
    assert slope == pytest.approx(gradient, rel=1e-5)
    assert loss == pytest.approx(gradient * np.log(ratio), rel=1e-5, abs=1e-7)
