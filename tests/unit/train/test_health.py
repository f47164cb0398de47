"""Warnings when a metric leaves its healthy range: value, meaning and remedy, without too many repetitions."""

from __future__ import annotations

import math
import random

import pytest

from treadle.train.health import HealthCheck

# A healthy step of the built-in job, two minutes into it.
HEALTHY = {
    "reward": 0.39, "frac_reward_zero_std": 0.25, "by_group/frac_all_good": 0.125, "by_group/frac_all_bad": 0.125,
    "completions/clipped_ratio": 0.17, "sample/staleness_mean": 1.0, "sample/staleness_max": 1.0,
    "batch/forwarded_tokens_per_step": 655, "batch/without_logprobs_frac": 0.0, "entropy": 0.69, "mean_ratio": 1.0,
    "mean_kl": 0.002, "clipped_fraction": 0.016, "grad_norm": 1.8, "skipped_steps": 0, "skipped_in_a_row": 0,
    "sampling/sampling_logp_difference/mean": 0.028, "rollout_corr/training_ppl": 1.9, "rollout_corr/rollout_ppl": 1.88,
    "rollout_corr/rollout_is_eff_sample_size": 0.99, "rollout_corr/rollout_rs_masked_fraction": 0.0,
}  # fmt: skip
ON_POLICY = {"sample/staleness_mean": 0.0, "sample/staleness_max": 0.0}


def warnings_of(health: HealthCheck, steps: range, **changed: float) -> dict[int, list[str]]:
    """Warnings by step; a slash in a name is written __."""
    values = {name.replace("__", "/"): value for name, value in changed.items()}
    return {step: lines for step in steps if (lines := health.check(step, HEALTHY | values))}


def test_a_healthy_run_gets_no_warning() -> None:
    assert warnings_of(HealthCheck(max_age=1), range(1, 60)) == {}


def test_a_reward_that_stays_flat_is_no_alarm() -> None:
    assert warnings_of(HealthCheck(max_age=1), range(1, 60), reward=0.0) == {}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("mean_ratio", 1.31, "mean_ratio 1.31 (healthy 0.8 to 1.2): the policy is far from the sampling policy; "
         "lower --lr or --max-age"),
        ("mean_ratio", 0.71, "mean_ratio 0.71 (healthy 0.8 to 1.2): the policy is far from the sampling policy; "
         "lower --lr or --max-age"),
        ("mean_kl", 0.61, "mean_kl 0.61 (healthy below 0.1): the policy moves away from the sampling policy too "
         "fast; lower --lr or raise --kl-coef"),
        ("clipped_fraction", 0.42, "clipped_fraction 0.42 (healthy below 0.3): 42 % of the tokens have no "
         "gradient; lower --lr"),
        ("sample/staleness_mean", 6.2, "rollouts are 6.2 policy versions old on average: environments sample faster "
         "than the trainer trains; run fewer of them, or set --hub.max-age"),
        ("rollout_corr/rollout_is_eff_sample_size", 0.31, "a few tokens outweigh the rest (effective sample size 31 %, "
         "healthy above 50 %): engine and trainer disagree; --mismatch strict bounds it"),
        ("rollout_corr/rollout_rs_masked_fraction", 0.64, "64 % of the tokens are left out because engine and trainer "
         "disagree on them; find out why (dtype, age, temperature) before widening the mask"),
        ("batch/without_logprobs_frac", 0.005, "0.5 % of the tokens came without the engine's logprobs and count as "
         "sampled just now; let the environment post them (server_type vllm)"),
        ("skipped_in_a_row", 2, "the update was skipped because a gradient was not finite (2 in a row, 0 in all); "
         "if this goes on, lower --lr or --max-grad-norm"),
    ],
)  # fmt: skip
def test_a_value_outside_its_range_is_reported_at_once(name: str, value: float, line: str) -> None:
    health = HealthCheck(max_age=1)
    assert health.check(1, HEALTHY) == []
    assert health.check(2, {**HEALTHY, name: value}) == [line]
    assert health.check(3, {**HEALTHY, name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean_ratio", 1.2), ("mean_ratio", 0.8), ("mean_kl", 0.5), ("clipped_fraction", 0.29),
     ("sample/staleness_mean", 4.0), ("rollout_corr/rollout_is_eff_sample_size", 0.5)],
)  # fmt: skip
def test_the_edge_of_a_range_is_inside(name: str, value: float) -> None:
    assert HealthCheck(max_age=1).check(1, {**HEALTHY, name: value}) == []


def test_lasting_problems_are_repeated_and_growing_ones_at_once() -> None:
    health = HealthCheck(max_age=1)
    assert list(warnings_of(health, range(1, 45), clipped_fraction=0.34)) == [1, 21, 41]
    assert list(warnings_of(health, range(45, 50), clipped_fraction=0.5)) == []
    assert list(warnings_of(health, range(50, 55), clipped_fraction=0.52)) == [50]


def test_the_end_is_reported_once_and_not_while_values_waver() -> None:
    health = HealthCheck(max_age=1)
    assert list(warnings_of(health, range(1, 2), mean_ratio=1.3)) == [1]
    assert warnings_of(health, range(2, 4)) == {}
    assert warnings_of(health, range(4, 5), mean_ratio=1.3) == {}
    assert warnings_of(health, range(5, 20)) == {7: ["mean_ratio is back in its healthy range"]}
    assert list(warnings_of(health, range(20, 21), mean_ratio=1.3)) == [20]


def test_groups_without_gradient_are_reported_by_kind_with_a_remedy() -> None:
    too_easy = warnings_of(
        HealthCheck(max_age=1), range(1, 12),
        frac_reward_zero_std=0.62, by_group__frac_all_good=0.40, by_group__frac_all_bad=0.22,
    )  # fmt: skip
    assert too_easy == {
        10: [
            "62 % of the groups of the last 10 steps carry no gradient: 40 % all right, 22 % all wrong; "
            "use harder prompts"
        ]
    }
    too_hard = warnings_of(
        HealthCheck(max_age=1), range(1, 12),
        frac_reward_zero_std=0.9, by_group__frac_all_good=0.1, by_group__frac_all_bad=0.8,
    )  # fmt: skip
    assert too_hard[10][0].endswith("10 % all right, 80 % all wrong; use easier prompts, or a larger --env.group-size")


def test_a_hard_start_that_gets_better_is_not_reported() -> None:
    """The built-in job starts like this: at first no group has a right answer."""
    health = HealthCheck(max_age=1)
    dead = [1.0, 1.0, 0.875, 0.875, 0.75, 0.75, 0.625, 0.5, 0.375, 0.375, 0.25, 0.25, 0.125, 0.25, 0.25]
    lines = [health.check(step, {**HEALTHY, "frac_reward_zero_std": share}) for step, share in enumerate(dead, 1)]
    assert lines == [[]] * len(dead)


def test_cut_off_completions_are_reported_with_the_flag_to_raise() -> None:
    lines = warnings_of(HealthCheck(max_age=1), range(1, 12), completions__clipped_ratio=0.61)
    assert list(lines) == [10]
    assert lines[10][0].startswith("61 % of the completions of the last 10 steps were cut off at the length limit")
    assert "--env.max-token-length" in lines[10][0]


def test_entropy_may_fall_far_but_not_to_nothing() -> None:
    """A run that learned sums went from 1.9 to 0.12 nats and was fine."""
    health = HealthCheck(max_age=1)
    assert warnings_of(health, range(1, 11), entropy=1.9) == {}
    assert warnings_of(health, range(11, 40), entropy=0.12) == {}
    lines = warnings_of(health, range(40, 52), entropy=0.004)
    [line] = [line for lines_of_step in lines.values() for line in lines_of_step if line.startswith("entropy fell")][:1]
    assert line.startswith("entropy fell from 1.90 to 0.0")


def test_a_jump_of_the_gradient_is_reported_and_its_end_is_not() -> None:
    health = HealthCheck(max_age=1)
    warnings_of(health, range(1, 15))
    assert warnings_of(health, range(15, 16), grad_norm=45.0) == {
        15: ["grad_norm 45 is 25 times its usual 1.8; it was clipped to --max-grad-norm. If this goes on, lower --lr"]
    }
    assert warnings_of(health, range(16, 40)) == {}


def test_skipped_updates_are_counted() -> None:
    health = HealthCheck(max_age=1)
    lines = warnings_of(health, range(1, 2), skipped_in_a_row=1, skipped_steps=5)
    assert "(1 in a row, 5 in all)" in lines[1][0]
    assert warnings_of(health, range(2, 6), skipped_steps=5) == {4: ["skipped_steps is back in its healthy range"]}


def test_a_step_that_trained_nothing_says_nothing_about_the_policy() -> None:
    """Its groups all scored the same: no token was forwarded, and there is no value where nothing was measured."""
    health = HealthCheck(max_age=1)
    nothing = {
        "batch/forwarded_tokens_per_step": 0, "entropy": math.nan, "grad_norm": math.nan,
        "rollout_corr/rollout_ppl": math.nan, "sampling/sampling_logp_difference/mean": math.nan,
    }  # fmt: skip
    for step in range(1, 30):
        assert health.check(step, HEALTHY | ON_POLICY | nothing) == []
    assert health.check(30, HEALTHY | ON_POLICY) == [
        "LogProb Alignment: OK (trainer and engine differ by 0.028 per token)"
    ]


def test_alignment_is_confirmed_once_at_the_first_on_policy_step() -> None:
    health = HealthCheck(max_age=1)
    assert health.check(1, HEALTHY) == []
    assert health.check(2, HEALTHY | ON_POLICY) == [
        "LogProb Alignment: OK (trainer and engine differ by 0.028 per token)"
    ]
    assert health.check(3, HEALTHY | ON_POLICY) == []


def test_engine_and_trainer_that_disagree_are_reported_loudly() -> None:
    health = HealthCheck()
    wrong = {"sampling/sampling_logp_difference/mean": 0.31}
    [line] = health.check(1, HEALTHY | ON_POLICY | wrong)
    assert line.startswith(
        "LogProb Alignment: MISMATCH! Trainer and engine differ by 0.310 per token on rollouts of the same version "
        "(healthy below 0.05); likely: a temperature that was not sent along"
    )
    assert "--model and --dtype" in line
    for first in (2, 20):  # each recovery is reported
        recovered = [line for step in range(first, first + 9) for line in health.check(step, HEALTHY | ON_POLICY)]
        assert recovered == ["LogProb Alignment: OK (trainer and engine differ by 0.028 per token)"]
        assert len(health.check(first + 9, HEALTHY | ON_POLICY | wrong)) == 1


def test_another_model_is_distinguished_from_rounding() -> None:
    wrong = {"sampling/sampling_logp_difference/mean": 4.1, "rollout_corr/training_ppl": 60.0}
    [line] = HealthCheck().check(1, HEALTHY | ON_POLICY | wrong)
    assert "likely: another model or another tokenizer, or weights that never arrived" in line


def test_rollouts_of_an_older_version_may_differ() -> None:
    assert HealthCheck(max_age=1).check(1, {**HEALTHY, "sampling/sampling_logp_difference/mean": 0.31}) == []


def test_rollouts_of_an_unknown_version_are_not_judged() -> None:
    unknown = {"sample/staleness_mean": float("nan"), "sample/staleness_max": float("nan")}
    assert HealthCheck().check(1, HEALTHY | unknown | {"sampling/sampling_logp_difference/mean": 0.31}) == []


def test_values_that_are_no_logprobs_are_recognised_at_any_age() -> None:
    [line] = HealthCheck(max_age=1).check(1, {**HEALTHY, "batch/positive_logprobs_frac": 0.5})
    assert line.startswith("LogProb Alignment: MISMATCH! The engine's logprobs are positive at 50 % of the tokens")


def test_a_collapsing_reward_is_reported_once_it_is_not_noise() -> None:
    health = HealthCheck(max_age=1)
    assert warnings_of(health, range(1, 11), reward=0.2) == {}
    assert warnings_of(health, range(11, 31), reward=0.8) == {}
    lines = warnings_of(health, range(31, 51), reward=0.1)
    [(step, [first]), *_] = lines.items()
    assert step <= 45
    assert first.startswith("reward fell from 0.80 to 0.")
    assert "the policy has collapsed; resume from an earlier checkpoint with a lower --lr or a --kl-coef" in first


@pytest.mark.parametrize("values", [(0.2, 0.8, 0.5), (-0.9, 0.1, -0.3), (0.0, 0.0, 0.0)])
def test_a_reward_that_falls_a_little_is_no_alarm(values: tuple[float, ...]) -> None:
    health = HealthCheck(max_age=1)
    for number, value in enumerate(values):
        assert warnings_of(health, range(20 * number + 1, 20 * number + 21), reward=value) == {}


def test_rewards_that_vary_by_chance_are_no_collapse() -> None:
    health = HealthCheck(max_age=1)
    draw = random.Random(1)
    for step in range(1, 300):  # batches of eight rollouts, of which a third are right
        reward = sum(draw.random() < 1 / 3 for _ in range(8)) / 8
        assert health.check(step, HEALTHY | {"reward": reward}) == []


def test_a_loss_that_jumps_is_reported() -> None:
    health = HealthCheck(max_age=1)
    assert warnings_of(health, range(1, 15), loss=-0.02) == {}
    [lines] = warnings_of(health, range(15, 16), loss=7.0).values()
    assert lines[0].startswith("loss 7 is 70 times its usual size; if this goes on, lower --lr")
    assert warnings_of(health, range(16, 30), loss=0.05) == {}


def test_repetitive_completions_are_reported() -> None:
    health = HealthCheck(max_age=1)
    assert warnings_of(health, range(1, 11), completions__repetition=0.1) == {}
    [first, *_] = warnings_of(health, range(11, 31), completions__repetition=0.9).values()
    assert first[0].endswith("raise --kl-coef, or penalize repetition")
    assert "(at the beginning 10 %)" in first[0]


def test_text_that_repeated_itself_from_the_beginning_is_no_alarm() -> None:
    assert warnings_of(HealthCheck(max_age=1), range(1, 40), completions__repetition=0.6) == {}


def test_text_and_values_that_are_not_finite_are_passed_over() -> None:
    odd = {"mean_ratio": float("nan"), "mean_kl": float("inf"), "note": "text", "clipped_fraction": None}
    assert HealthCheck(max_age=1).check(1, HEALTHY | odd) == []


def test_no_torch_is_needed() -> None:
    import subprocess
    import sys

    code = "import sys, treadle.train.health; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
