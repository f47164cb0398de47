"""The loss at its edges: huge ratios, NaN, missing logprobs, no tokens; and what its metrics say."""

from __future__ import annotations

import math

import pytest
import torch

from treadle.config.train import MISMATCHES, OBJECTIVES, ObjectiveOptions
from treadle.train.loss import LossStats, LossTokens, policy_loss

NAN = math.nan
NEUTRAL_ONES = {
    "mean_ratio", "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/max", "rollout_corr/rollout_is_eff_sample_size",
}  # fmt: skip


def make_tokens(rollout, advantages=None, *, old=None, reference=None, sequences=None):
    """Tokens of weight 1, each a sequence of its own unless said otherwise."""
    count = len(rollout)
    sequences = list(range(count)) if sequences is None else sequences
    return LossTokens(
        rollout_logprobs_L=torch.tensor(rollout, dtype=torch.float32),
        old_logprobs_L=None if old is None else torch.tensor(old),
        reference_logprobs_L=None if reference is None else torch.tensor(reference),
        advantages_L=torch.tensor([1.0] * count if advantages is None else advantages),
        weights_L=torch.ones(count),
        sequences_L=torch.tensor(sequences, dtype=torch.long),
        num_sequences=max(sequences, default=-1) + 1,
    )


def score(logprobs, tokens, **settings):
    """Loss, gradient and metrics."""
    logprobs_L = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    loss, stats = policy_loss(logprobs_L, torch.zeros(len(logprobs)), tokens, ObjectiveOptions(**settings))
    loss.backward()
    return loss.item(), logprobs_L.grad, stats.metrics()


class TestExtremes:
    @pytest.mark.parametrize("objective", OBJECTIVES)
    @pytest.mark.parametrize("mismatch", MISMATCHES)
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    @pytest.mark.parametrize("epoch", [1, 2])
    def test_log_ratios_of_a_thousand_give_finite_numbers(self, objective, mismatch, estimator, epoch):
        far = [0.0, -1000.0, 0.0, -1000.0, 0.0, -1000.0]
        tokens = make_tokens(
            far[::-1], [1.0, 1.0, -1.0, -1.0, 0.0, 0.0], reference=far[::-1], old=far[::-1] if epoch == 2 else None
        )
        for against in ("rollout", "reference"):
            kl = {"kl_coef": 0.1, "kl_estimator": estimator, "kl_against": against}
            loss, gradient, metrics = score(far, tokens, objective=objective, mismatch=mismatch, **kl)
            assert math.isfinite(loss)
            assert gradient.isfinite().all()
            assert all(math.isfinite(value) for value in metrics.values()), metrics

    @pytest.mark.parametrize("ratio", ["token", "sequence_mean", "sequence_sum"])
    @pytest.mark.parametrize("log_ratio", [19.9, 20.0, 20.1, 1000.0])
    def test_a_bad_token_that_became_vastly_likelier_is_still_pushed_back(self, ratio, log_ratio):
        _, gradient, _ = score([0.0], make_tokens([-log_ratio], [-1.0]), ratio=ratio)
        assert gradient.item() == pytest.approx(math.exp(min(log_ratio, 20)), rel=1e-5)

    def test_k3_pulls_a_token_that_became_vastly_rarer_up_again(self):
        settings = {"kl_coef": 1.0, "kl_estimator": "k3"}
        _, gradient, _ = score([-1000.0], make_tokens([0.0], [0.0]), **settings)
        assert gradient.item() == pytest.approx(1 - math.exp(20), rel=1e-5)
        _, gradient, _ = score([0.0], make_tokens([-1000.0], [0.0]), **settings)
        assert gradient.item() == pytest.approx(1.0)

    def test_k3_keeps_its_digits_near_the_target(self):
        loss, _, _ = score([0.001], make_tokens([0.0], [0.0]), kl_coef=1.0)
        assert loss == pytest.approx(math.expm1(-0.001) + 0.001, rel=1e-3)

    @pytest.mark.parametrize("objective", OBJECTIVES)
    @pytest.mark.parametrize("mismatch", MISMATCHES)
    @pytest.mark.parametrize("rollout", [-1.0, NAN])
    @pytest.mark.parametrize("old", [None, -1.0])
    def test_nan_in_the_logprobs_is_not_hidden(self, objective, mismatch, rollout, old):
        tokens = make_tokens([rollout, -1.0], old=None if old is None else [old, -1.0])
        loss, gradient, _ = score([NAN, -1.0], tokens, objective=objective, mismatch=mismatch)
        assert math.isnan(loss)
        assert gradient[1].isfinite()


class TestMissingLogprobs:
    def test_the_token_counts_as_sampled_from_the_old_policy(self):
        for old, ratio in ((None, 1.0), ([-2.0], math.e**0.1)):
            loss, gradient, metrics = score([-1.9], make_tokens([NAN], old=old))
            assert loss == pytest.approx(-ratio, rel=1e-5)
            assert gradient.item() == pytest.approx(-ratio, rel=1e-5)
            assert metrics["batch/without_logprobs_frac"] == 1.0
            assert {name for name in NEUTRAL_ONES if metrics[name] == 1.0} >= NEUTRAL_ONES - {"mean_ratio"}

    def test_it_is_neither_weighted_nor_masked(self):
        tokens = make_tokens([NAN, -1.0], old=[-3.0, -3.0])
        _, gradient, metrics = score([-3.0, -3.0], tokens, mismatch="strict")
        assert gradient.tolist() == [-1.0, 0.0]
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0  # of those that have logprobs
        assert metrics["batch/without_logprobs_frac"] == 0.5

    @pytest.mark.parametrize(("estimator", "gradient"), [("k1", 1.0), ("k2", 0.0), ("k3", 0.0)])
    def test_its_kl_against_the_rollout_policy_is_zero(self, estimator, gradient):
        loss, slope, metrics = score([-2.0], make_tokens([NAN], [0.0]), kl_coef=1.0, kl_estimator=estimator)
        assert (loss, slope.item(), metrics["kl"]) == (0.0, gradient, 0.0)


class TestMismatch:
    # trainer / engine probability: 0.25, 0.5, 1, 2, 4, 8
    ROLLOUT = [math.log(x) for x in (4, 2, 1, 1 / 2, 1 / 4, 1 / 8)]  # noqa: RUF012

    def gradient(self, **settings):
        # a policy that is scored for the first time: every ratio is 1
        _, gradient, metrics = score([0.0] * 6, make_tokens(self.ROLLOUT), old_logprobs="trainer", **settings)
        return pytest.approx([-value for value in gradient.tolist()], rel=1e-5), metrics

    def test_the_cap_weights_what_the_engine_sampled_too_rarely_or_too_often(self):
        gradient, metrics = self.gradient(importance_cap=3.0)
        assert gradient == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
        assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(3 / 6)
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0

    def test_the_mask_takes_the_loss_from_tokens_outside(self):
        gradient, metrics = self.gradient(importance_mask=(0.3, 5.0))
        assert gradient == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
        assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 6)

    def test_a_mask_may_be_open_to_either_side(self):
        gradient, metrics = self.gradient(importance_mask=(0.0, 2.0))
        assert gradient == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 6)
        gradient, _ = self.gradient(importance_mask=(0.5, math.inf))
        assert gradient == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def test_a_masked_token_has_no_kl_term_either(self):
        tokens = make_tokens([-5.0, -1.0], [0.0, 0.0], reference=[-9.0, -0.5])
        settings = {"kl_coef": 1.0, "kl_estimator": "k2", "kl_against": "reference", "importance_mask": (0.0, 2.0)}
        loss, gradient, _ = score([-1.0, -1.0], tokens, **settings)
        assert loss == 0.125
        assert gradient.tolist() == [0.0, -0.5]

    def test_the_cap_does_not_weight_the_kl_term(self):
        settings = {"kl_coef": 1.0, "kl_estimator": "k1", "old_logprobs": "trainer", "importance_cap": 2.0}
        _, gradient, _ = score([0.0], make_tokens([math.log(4)], [0.0]), **settings)
        assert gradient.item() == 1.0

    def test_later_epochs_keep_the_weights_of_the_first(self):
        _, gradient, metrics = score(
            [0.1], make_tokens([math.log(2)], old=[0.0]), old_logprobs="trainer", importance_cap=2.0
        )
        assert gradient.item() == pytest.approx(-0.5 * math.exp(0.1), rel=1e-5)
        assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(0.5)
        assert metrics["mean_ratio"] == pytest.approx(math.exp(0.1))


class TestSequenceRatio:
    def test_tokens_of_a_sequence_share_one_ratio_wherever_they_lie(self):
        tokens = make_tokens([0.0] * 5, sequences=[0, 1, 0, 1, 3])
        logprobs = [0.1, -0.2, 0.05, 0.0, 0.02]
        _, _, mean = score(logprobs, tokens, ratio="sequence_mean", clip_high=1.0)
        assert mean["mean_ratio"] == pytest.approx((2 * math.exp(0.075) + 2 * math.exp(-0.1) + math.exp(0.02)) / 5)
        _, _, total = score(logprobs, tokens, ratio="sequence_sum", clip_high=1.0)
        assert total["mean_ratio"] == pytest.approx((2 * math.exp(0.15) + 2 * math.exp(-0.2) + math.exp(0.02)) / 5)

    def test_the_gradient_flows_through_all_its_tokens(self):
        tokens = make_tokens([0.0, 0.0], [1.0, 0.0], sequences=[0, 0])
        _, gradient, _ = score([0.1, 0.1], tokens, ratio="sequence_mean")
        assert gradient.tolist() == pytest.approx([-math.exp(0.1) / 2] * 2, rel=1e-5)


class TestStats:
    def test_without_any_token_sums_are_zero_and_nothing_else_has_a_value(self):
        loss, _, of_no_tokens = score([], make_tokens([]))
        assert loss == 0.0
        for metrics in (of_no_tokens, LossStats().metrics()):
            valued = {name: value for name, value in metrics.items() if not math.isnan(value)}
            assert valued == {"loss": 0.0, "policy_loss": 0.0, "pos_count": 0.0, "neg_count": 0.0}
            assert {"entropy", "kl", "mean_kl", "mean_ratio", "clipped_fraction"} <= metrics.keys() - valued.keys()

    def test_known_numbers(self):
        tokens = make_tokens([math.log(x) for x in (1.0, 0.5, 0.5)], [-1.0, 1.0, 1.0])
        _, _, metrics = score([math.log(x) for x in (0.5, 1.0, 0.5)], tokens, clip_low=0.2, clip_high=0.2)
        assert metrics == pytest.approx(
            {
                "loss": 0.8 - 1.2 - 1.0,
                "policy_loss": 0.8 - 1.2 - 1.0,
                "kl": (2 + math.log(0.5) - 1 + 0.5 + math.log(2) - 1) / 3,
                "entropy": 0.0,
                "mean_ratio": 3.5 / 3,
                "mean_kl": (2 + math.log(0.5) - 1 + 0.5 + math.log(2) - 1) / 3,
                "clipped_fraction": 2 / 3,
                "clip_ratio/low_mean": 1 / 3,
                "clip_ratio/high_mean": 1 / 3,
                "clip_ratio/region_mean": 2 / 3,
                "sampling/sampling_logp_difference/mean": 2 * math.log(2) / 3,
                "sampling/sampling_logp_difference/max": math.log(2),
                "sampling/importance_sampling_ratio/mean": 3.5 / 3,
                "sampling/importance_sampling_ratio/min": 0.5,
                "sampling/importance_sampling_ratio/max": 2.0,
                "rollout_corr/kl": 0.0,
                "rollout_corr/k3_kl": 3.5 / 3 - 1,
                "rollout_corr/chi2_token": (0.25 + 4 + 1) / 3 - 1,
                "rollout_corr/training_ppl": 4 ** (1 / 3),
                "rollout_corr/rollout_ppl": 4 ** (1 / 3),
                "rollout_corr/rollout_is_eff_sample_size": 3.5**2 / (3 * 5.25),
                "rollout_corr/rollout_is_oob_ratio": 0.0,
                "rollout_corr/rollout_rs_masked_fraction": 0.0,
                "batch/without_logprobs_frac": 0.0,
                "pos_logp": math.log(0.5) / 2,
                "neg_logp": math.log(0.5),
                "pos_count": 2,
                "neg_count": 1,
            },
            rel=1e-5,
            abs=1e-6,
        )

    def test_dual_clip_counts_as_clipped_above(self):
        _, _, metrics = score([math.log(4.0)], make_tokens([0.0], [-1.0]), dual_clip=3.0)
        assert (metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"]) == (1.0, 0.0)

    def test_a_token_without_advantage_is_never_clipped(self):
        _, _, metrics = score([math.log(4.0), math.log(0.1)], make_tokens([0.0, 0.0], [0.0, 0.0]), dual_clip=3.0)
        assert metrics["clipped_fraction"] == 0.0

    def test_stats_of_two_micros_combine_to_those_of_all_tokens(self):
        options = ObjectiveOptions()
        _, first = policy_loss(torch.tensor([0.5]), torch.tensor([1.0]), make_tokens([0.0]), options)
        _, second = policy_loss(torch.tensor([-1.5, 0.0]), torch.tensor([2.0, 6.0]), make_tokens([0.0, 0.0]), options)
        for both in (first.add(second), second.add(first)):
            metrics = both.metrics()
            assert metrics["entropy"] == 3.0
            assert metrics["sampling/sampling_logp_difference/max"] == 1.5
            assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(math.exp(-1.5))
            assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(0.5))

    @pytest.mark.parametrize("objective", OBJECTIVES)
    def test_the_loss_does_not_synchronize_with_the_device(self, objective):
        """Tensors on the meta device have no values: code that would synchronize with a GPU fails here."""
        row = torch.zeros(3, device="meta")
        tokens = LossTokens(row, row, row, row, row, row.long(), 2)
        options = ObjectiveOptions(objective=objective, mismatch="strict", dual_clip=3.0, kl_coef=0.1)
        loss, stats = policy_loss(row.clone().requires_grad_(), row, tokens, options)
        loss.backward()
        stats = stats.add(stats)
        with pytest.raises((NotImplementedError, RuntimeError)):
            stats.metrics()

    def test_metrics_do_not_hold_on_to_the_graph(self):
        logprobs_L = torch.zeros(2, requires_grad=True)
        _, stats = policy_loss(logprobs_L, logprobs_L * 2, make_tokens([0.0, 0.0]), ObjectiveOptions(kl_coef=0.1))
        assert not stats.sums.requires_grad
        assert not stats.maxima.requires_grad


def test_a_reference_that_is_needed_and_missing_is_named():
    with pytest.raises(ValueError, match="reference_logprobs_L"):
        score([0.0], make_tokens([0.0]), kl_coef=0.1, kl_against="reference")
    _, _, metrics = score([0.0], make_tokens([-1.0]), kl_coef=0.0, kl_against="reference")
    assert metrics["kl"] == 0.0  # nobody asked
