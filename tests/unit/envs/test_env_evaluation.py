import asyncio
import contextlib
import json
import math
import random
import re
from dataclasses import replace

import pytest
from env_doubles import EngineDouble, FlakyNetwork, save_tokenizer

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, Item, Score, stable_seed
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.eval_statistics import mean_interval, pass_at_k, pass_interval, wilson_interval, worthwhile_ks
from treadle.envs.evaluation import (
    eval_metrics,
    eval_temperature,
    evaluate_policy,
    format_result,
    save_for_atropos,
    save_result,
)
from treadle.envs.main import open_context
from treadle.errors import ConfigError, ScoringError
from treadle.report.history import read_evaluation


class Digits(Environment):
    """Say the digit; for 9 scoring fails."""

    def eval_items(self):
        return [Item.ask(f"Say {digit}", answer=str(digit)) for digit in range(10)]

    def score(self, item, completion_text, completion):
        if item.answer == "9":
            raise RuntimeError("no idea")
        return Score(reward=float(completion_text == item.answer), is_right=completion_text == item.answer)


class DigitsInTurns(Digits):
    async def rollout(self, item, model):
        chat = model.chat(item.messages)
        await chat.ask()
        chat.add({"role": "user", "content": "Again"})
        return float((await chat.ask()).text == item.answer)


def right_in_half(prompt, request):
    """Right in every second answer, and always for 0 and 1."""
    digit = re.search(r"Say (\d)", prompt)[1]
    return [digit if digit in "01" or i % 2 == 0 else "?" for i in range(request.n)]


class Harness:
    def __init__(self, tmp_path, kind, write=right_in_half, **settings):
        self.environment = kind(EnvConfig(name="digits", task="", max_token_length=8, **settings))
        self.engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
        self.reported = []

    @contextlib.asynccontextmanager
    async def context(self):
        async with EngineClient(ServerConfig(), transport=FlakyNetwork(self.engine.app)) as engine:
            tokenizer = ChatTokenizer.load(self.engine.folder)
            async with open_context(self.environment, engine, tokenizer) as context:
                yield context

    def evaluate(self):
        async def work():
            async with self.context() as context:
                report_progress = lambda done, note: self.reported.append((done, note))  # noqa: E731
                return await evaluate_policy(context, 3, wave_prefix="digits-eval-3", report_progress=report_progress)

        return asyncio.run(work())


def test_several_answers_give_pass_at_k(tmp_path):
    harness = Harness(tmp_path, Digits, eval_samples=4, seed=5)
    result = harness.evaluate()
    # 0 and 1: 4 of 4 right; 2 to 8: 2 of 4; 9: none can be scored.
    assert (result.num_prompts, result.num_answers, result.num_right, result.num_unscored) == (9, 36, 22, 4)
    assert result.pass_at_k == pytest.approx({"1": 22 / 36, "2": (2 + 7 * 5 / 6) / 9, "4": 1.0})
    assert result.accuracy == result.pass_at_k["1"]
    assert result.interval_95 == result.pass_at_k_interval_95["1"]
    for k, (low, high) in result.pass_at_k_interval_95.items():
        assert low < result.pass_at_k[k] <= high
    assert result.generation_params == {"n": 4, "temperature": 1.0, "max_tokens": 8}
    assert len(result.samples) == 40
    assert harness.reported[-1] == (10, "61.1% right, mean score 0.611 so far")


def test_single_turns_go_in_waves_of_128_rollouts_with_a_seed_each(tmp_path):
    harness = Harness(tmp_path, Digits, eval_samples=16, seed=5, eval_temperature=0.7)
    harness.evaluate()
    asked = sorted((r.wave.id, r.wave.index, r.wave.size, r.n, r.temperature, r.seed) for r in harness.engine.requests)
    assert asked == [
        *[("digits-eval-3-0", i, 8, 16, 0.7, stable_seed(5, "eval", i)) for i in range(8)],
        *[("digits-eval-3-1", i, 2, 16, 0.7, stable_seed(5, "eval", 8 + i)) for i in range(2)],
    ]


def test_what_could_not_be_scored_is_counted_and_in_no_figure(tmp_path):
    result = Harness(tmp_path, Digits).evaluate()
    assert (result.num_right, result.num_prompts, result.num_unscored, result.unscored) == (9, 9, 1, {"raised": 1})
    assert (result.accuracy, result.interval_95) == (1.0, wilson_interval(9, 9))
    assert (len(result.samples), result.samples[9].reward) == (10, None)
    assert "no idea" in result.samples[9].error
    words = format_result(result, num_samples=10)
    assert "digits at policy version 0: 9 of 9 right = 100.0% (95 % interval 70.1% to 100.0%)" in words
    assert "not scored, and not in these figures: 1 of 10 (raised: 1)" in words
    assert re.search(r"\(not scored: RuntimeError: no idea, at \S*test_env_evaluation\.py:\d+\)", words)
    assert "digits/digits" not in words


class JudgedByChance(Digits):
    """Right for even digits; of three answers of four to 1 and 2 the judge fails, and it fails for all of source b."""

    def eval_items(self):
        return [replace(item, source="b" if item.answer == "9" else "a") for item in super().eval_items()]

    def score(self, item, completion_text, completion):
        if item.answer == "9" or (item.answer in "12" and completion_text != "first"):
            return Score(None, is_right=False, outcome="judge_failed", error="no answer of the judge")
        return Score(reward=1.0 - int(item.answer) % 2, is_right=int(item.answer) % 2 == 0)


def test_a_judge_that_fails_does_not_lower_the_accuracy(tmp_path):
    write = lambda prompt, request: ["first", *["other"] * (request.n - 1)]  # noqa: E731
    result = Harness(tmp_path, JudgedByChance, write, eval_samples=4).evaluate()
    assert (result.num_prompts, result.num_answers, result.num_right) == (9, 4 * 7 + 2, 4 * 4 + 1)
    assert (result.num_unscored, result.unscored) == (10, {"judge_failed": 10})
    assert result.accuracy == pytest.approx(5 / 9)
    # 1 and 2 have one scored answer each, so they tell nothing of pass@2 and pass@4.
    assert result.pass_at_k == pytest.approx({"1": 5 / 9, "2": 4 / 7, "4": 4 / 7})
    assert list(result.by_source) == ["a"], "nothing is known of a source without a score"
    assert result.by_source["a"].accuracy == result.accuracy


class Shaped(Digits):
    """Points for a part of the answer, as a plain number."""

    def score(self, item, completion_text, completion):
        return 1.0 if item.answer == "0" else 0.4


@pytest.mark.parametrize(("right", "num_right"), [(1.0, 1), (0.4, 10), (1.5, 0)])
def test_a_number_counts_as_right_from_the_threshold_on(tmp_path, right, num_right):
    result = Harness(tmp_path, Shaped, right=right).evaluate()
    assert result.num_right == num_right
    assert result.mean_score == pytest.approx(0.46)
    assert "mean score 0.460" in format_result(result)


def test_a_graded_score_has_an_interval_over_prompts(tmp_path):
    class Graded(Digits):
        def score(self, item, completion_text, completion):
            return int(item.answer) / 10

    result = Harness(tmp_path, Graded).evaluate()
    # 0.45 +- 2.262 * sqrt(0.091667 / 10): Student's t with 9 degrees of freedom
    assert result.mean_score_interval_95 == pytest.approx((0.2334, 0.6666), abs=1e-4)
    assert "mean score 0.450 (0.233 to 0.667), " in format_result(result)
    metrics = eval_metrics(result)
    assert (metrics["eval/mean_score_low"], metrics["eval/mean_score_high"]) == result.mean_score_interval_95


def test_answers_to_one_prompt_are_one_sample_of_the_mean_score(tmp_path):
    class Graded(Digits):
        def score(self, item, completion_text, completion):
            return 0.2 if completion_text == "?" else 0.4

    result = Harness(tmp_path, Graded, eval_samples=4).evaluate()
    assert result.mean_score_interval_95 == pytest.approx(mean_interval([0.4] * 2 + [0.3] * 8))


def test_scores_that_only_say_right_or_wrong_have_no_interval(tmp_path):
    class Signed(Digits):
        def score(self, item, completion_text, completion):
            return Score(reward=1.0 if item.answer == "0" else -1.0, is_right=item.answer == "0")

    result = Harness(tmp_path, Signed).evaluate()
    assert (result.mean_score, result.mean_score_interval_95) == (pytest.approx(-0.8), None)
    assert "eval/mean_score_low" not in eval_metrics(result)


class AlwaysRaises(Digits):
    def score(self, item, completion_text, completion):
        return float(item.metadata["level"])


class AlwaysRaisesInTurns(AlwaysRaises):
    async def rollout(self, item, model):
        await model.chat(item.messages).ask()
        return float(item.metadata["level"])


@pytest.mark.parametrize("kind", [AlwaysRaises, AlwaysRaisesInTurns])
def test_a_reward_that_always_raises_ends_the_evaluation_after_a_group(tmp_path, kind):
    harness = Harness(tmp_path, kind, eval_samples=16, group_size=8)
    words = r"none of \d+ answers could be scored: KeyError: 'level', at \S*test_env_evaluation.py:\d+"
    with pytest.raises(ScoringError, match=words):
        harness.evaluate()
    assert not harness.reported, "not even one wave is counted"


def test_an_evaluation_without_a_single_score_is_not_zero_percent(tmp_path):
    class TimesOut(Digits):
        def score(self, item, completion_text, completion):
            return Score(None, is_right=False, outcome="timed_out", error="took longer than 10 s")

    with pytest.raises(ScoringError, match="none of 10 answers could be scored: took longer than 10 s"):
        Harness(tmp_path, TimesOut).evaluate()


def test_what_every_prompt_begins_with_is_not_shown_with_every_example(tmp_path):
    class WithSystemPrompt(Digits):
        def eval_items(self):
            return [Item.ask("Say 1", answer="1", system="You have one task in life.")]

    result = Harness(tmp_path, WithSystemPrompt).evaluate()
    words = format_result(result)
    assert "  'Say 1' -> '1' (right)" in words
    assert "task in life" not in words
    assert result.samples[0].prompt == "You have one task in life.\nSay 1", "the file has all of it"


def test_environments_with_turns_are_evaluated_too(tmp_path):
    harness = Harness(
        tmp_path, DigitsInTurns, lambda prompt, request: [re.search(r"Say (\d)", prompt)[1]], eval_samples=3
    )
    result = harness.evaluate()
    assert (result.num_prompts, result.num_answers, result.num_right, result.num_unscored) == (10, 30, 30, 0)
    assert result.pass_at_k == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert len(harness.engine.requests) == 10 * 3 * 2
    assert len({request.seed for request in harness.engine.requests}) == 60, "no two turns draw the same numbers"
    assert harness.reported[-1][0] == 10


def test_one_answer_in_turns_is_greedy(tmp_path):
    harness = Harness(tmp_path, DigitsInTurns, lambda prompt, request: ["0"], num_eval=4)
    assert harness.evaluate().num_right == 1
    assert {(request.temperature, request.seed) for request in harness.engine.requests} == {(0.0, None)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.0),
        ({"eval_samples": 4}, 1.0),
        ({"eval_samples": 4, "temperature": 0.8}, 0.8),
        ({"eval_samples": 4, "eval_temperature": 0.6}, 0.6),
        ({"eval_temperature": 0.6}, 0.6),
    ],
)
def test_the_temperature_of_an_evaluation(settings, expected):
    assert eval_temperature(EnvConfig(**settings)) == expected


def test_several_greedy_answers_are_refused():
    with pytest.raises(ConfigError, match="all 4 answers to a prompt are the same") as caught:
        eval_temperature(EnvConfig(eval_samples=4, eval_temperature=0))
    assert "--env.eval-temperature" in caught.value.fix


def test_the_launcher_reads_a_result_of_several_answers(tmp_path):
    result = Harness(tmp_path, Digits, eval_samples=4).evaluate()
    read = read_evaluation(save_result(result, tmp_path))
    assert (read.step, read.accuracy, read.low, read.high) == (3, result.accuracy, *result.interval_95)


def test_the_files_that_atropos_leaves(tmp_path):
    result = Harness(tmp_path, Digits, eval_samples=2).evaluate()
    save_for_atropos(result, tmp_path / "evals", model_name="tiny")
    metrics = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    general = metrics["config_general"]
    assert general["model_name"] == "tiny"
    assert float(general["total_evaluation_time_seconds"]) == result.seconds
    assert general["generation_parameters"] == {"n": 2, "temperature": 1.0, "max_tokens": 8, "max_new_tokens": 8}
    assert metrics["results"]["all"] == metrics["results"]["atropos|digits_eval|0"]
    assert metrics["results"]["all"]["eval/percent_correct"] == result.accuracy
    assert metrics["results"]["all"]["eval/pass@2"] == result.pass_at_k["2"]
    samples = [json.loads(line) for line in (tmp_path / "evals" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 20
    assert samples[0] | {"prompt": "Say 0", "completion": "0", "gold": "0", "is_right": True} == samples[0]
    assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == ["metrics.json", "samples.jsonl"]
    assert read_evaluation(tmp_path / "evals" / "metrics.json") is None, "the launcher takes it for no evaluation"


@pytest.mark.parametrize(("num", "ks"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_which_ks_are_reported(num, ks):
    assert worthwhile_ks(num) == ks


@pytest.mark.parametrize(
    ("num_right", "num_trials", "low_percent", "high_percent"),
    [
        (4, 256, 0.6, 3.9),
        (0, 10, 0.0, 27.8),
        (10, 10, 72.2, 100.0),
        (1, 10, 1.8, 40.4),
        (0, 0, 0.0, 100.0),
    ],
)
def test_wilson_interval_agrees_with_known_values(num_right, num_trials, low_percent, high_percent):
    bounds = [100 * bound for bound in wilson_interval(num_right, num_trials)]
    assert bounds == pytest.approx([low_percent, high_percent], abs=0.051)


@pytest.mark.parametrize(("num_right", "num_trials"), [(4, 256), (128, 256), (1, 10), (999, 1000)])
def test_both_bounds_are_as_unlikely_as_the_level_says(num_right, num_trials):
    """The definition: from a true share at the bound, the observed one is 1.96 standard deviations away."""
    for bound in wilson_interval(num_right, num_trials):
        deviations = abs(num_right / num_trials - bound) / math.sqrt(bound * (1 - bound) / num_trials)
        assert deviations == pytest.approx(1.959964, abs=1e-6)


def test_more_right_than_asked_is_refused():
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(5, 4)


@pytest.mark.parametrize(("num_right", "num_answers", "k"), [(0, 4, 2), (1, 4, 2), (3, 10, 4), (7, 10, 4), (10, 10, 3)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(num_right, num_answers, k):
    expected = 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)
    assert pass_at_k(num_right, num_answers, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plain_formula_is_not():
    chance, num_answers, k = 0.3, 5, 3
    truth = 1 - (1 - chance) ** k
    weights = [
        math.comb(num_answers, right) * chance**right * (1 - chance) ** (num_answers - right)
        for right in range(num_answers + 1)
    ]
    ours = sum(w * pass_at_k(right, num_answers, k) for right, w in enumerate(weights))
    plain = sum(w * (1 - (1 - right / num_answers) ** k) for right, w in enumerate(weights))
    assert ours == pytest.approx(truth, abs=1e-12)
    assert abs(plain - truth) > 0.02


def test_pass_at_k_of_very_many_answers_neither_overflows_nor_cancels():
    one_right_of_many = pass_at_k(1, 100_000, 1000)
    assert one_right_of_many == pytest.approx(0.01, rel=1e-9)  # k/n
    assert pass_at_k(99_001, 100_000, 1000) == 1.0  # fewer wrong ones than are drawn
    assert pass_at_k(0, 100_000, 1000) == 0.0


@pytest.mark.parametrize(("num_right", "num_answers", "k"), [(5, 4, 1), (-1, 4, 1), (1, 4, 5), (1, 4, 0)])
def test_a_draw_that_cannot_be_made_is_refused(num_right, num_answers, k):
    with pytest.raises(ValueError, match="no pass@"):
        pass_at_k(num_right, num_answers, k)


@pytest.mark.parametrize("num_right", [0, 1, 35, 69, 70])
def test_single_answers_have_wilsons_own_interval(num_right):
    chances = [1.0] * num_right + [0.0] * (70 - num_right)
    assert pass_interval(chances, 1) == pytest.approx(wilson_interval(num_right, 70), abs=1e-12)


def test_all_right_proves_no_more_than_the_prompts_do():
    assert pass_interval([1.0] * 20, answers_per_draw=8) == wilson_interval(20, 20)


def test_more_answers_narrow_the_interval_only_where_prompts_are_alike():
    alike, unlike = [0.5] * 20, [0.0, 1.0] * 10

    def width(chances):
        low, high = pass_interval(chances, answers_per_draw=8)
        return high - low

    assert width(alike) < 0.5 * width(unlike)
    assert width(unlike) == pytest.approx(wilson_interval(10, 20)[1] - wilson_interval(10, 20)[0])


@pytest.mark.parametrize(("num_answers", "k"), [(1, 1), (4, 1), (4, 2), (16, 4)])
def test_nineteen_of_twenty_intervals_hold_the_truth(num_answers, k):
    """Prompts of very different difficulty, drawn 1,000 times."""
    draw = random.Random(3)
    truth = 1 - math.prod((0.7 + i) / (1 + i) for i in range(k))  # the mean of 1 - (1-p)^k where p ~ Beta(0.3, 0.7)
    num_hits = 0
    for _ in range(1000):
        chances = []
        for _ in range(64):
            p = draw.betavariate(0.3, 0.7)
            num_right = sum(draw.random() < p for _ in range(num_answers))
            chances.append(pass_at_k(num_right, num_answers, k))
        low, high = pass_interval(chances, num_answers / k)
        num_hits += low <= truth <= high
    assert 930 <= num_hits <= 970


def test_nothing_asked_is_nothing_known():
    assert pass_interval([], 4) == (0.0, 1.0)
