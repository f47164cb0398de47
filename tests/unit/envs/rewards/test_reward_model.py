"""The reward `reward_model`, with a random model for sequence classification."""

from __future__ import annotations

import asyncio
import math

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from tests.doc_pages import ROOT
from tests.tiny_model import write_tiny_model
from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, load_environment, prepare_task
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import InlineScorer, RewardInput, RewardPool, registry
from treadle.envs.scoring import ScoreRules
from treadle.errors import ConfigError, ModelError

TEXTS = ["yes", "a much longer answer than that", "no", "it is 4", "yes"]
PROMPT = "what is 2 + 2?"


def write_reward_model(folder, num_labels=1):
    write_tiny_model(folder, hidden_size=32, num_layers=1)
    config = LlamaConfig.from_pretrained(folder, num_labels=num_labels)
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    model.score.weight.data.normal_(std=1.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("reward-model") / "one")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("reward-model") / "three", num_labels=3)


def logits_of(folder, texts, prompt=PROMPT):
    """One by one, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        rows = (tokenizer(prompt + text, return_tensors="pt", add_special_tokens=False) for text in texts)
        return [model(input_ids=row["input_ids"]).logits[0].tolist() for row in rows]


def inputs_of(*texts, **fields):
    return [RewardInput(text, prompt=PROMPT, **fields) for text in texts]


def create(folder, **settings):
    return registry.create("reward_model", model=str(folder), **settings)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_batch_gives_what_each_text_gives_alone(folder, batch_size):
    expected = [logits[0] for logits in logits_of(folder, TEXTS)]
    assert len(set(expected)) == 4
    scores = create(folder, batch_size=batch_size).score_group(inputs_of(*TEXTS))
    assert scores == pytest.approx(expected, abs=1e-4)


def test_sigmoid_and_the_chosen_output_of_several(folder, several):
    ((logit,),) = logits_of(folder, TEXTS[:1])
    (score,) = create(folder, activation="sigmoid").score_group(inputs_of(*TEXTS[:1]))
    assert score == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-5)
    (logits,) = logits_of(several, TEXTS[:1])
    expected = torch.tensor(logits).softmax(-1)[2].item()
    assert create(several, label=2, activation="softmax").score(inputs_of("yes")[0]) == pytest.approx(
        expected, abs=1e-5
    )


def test_thinking_is_left_out_unless_it_is_asked_for(folder):
    thought = inputs_of("<think>hm</think>yes")
    assert create(folder).score_group(thought) == create(folder).score_group(inputs_of("yes"))
    assert create(folder, with_thinking=True).score_group(thought) != create(folder).score_group(inputs_of("yes"))


def test_one_worker_loads_it_once_while_the_loop_goes_on(folder):
    """Its own one: with the environment's messages, for all groups, and none of the pool's workers is started."""

    class Task(Environment):
        rewards = create(folder)

        def eval_items(self):
            return []

    async def run():
        num_turns = 0

        async def turn():
            nonlocal num_turns
            while True:
                await asyncio.sleep(0.01)
                num_turns += 1

        turning = asyncio.create_task(turn())
        before = set(psutil.Process().children())  # of earlier tests in this process
        async with RewardPool(num_workers=2, time_limit_s=0.5, memory_limit_mb=64) as pool:
            rules = ScoreRules(Task(EnvConfig()), pool)
            completions = [Completion([0], [0.0], text, "stop", 0) for text in TEXTS]
            items = [Item.ask(PROMPT, answer="4", system="add: ") for _ in range(3)]
            groups = await asyncio.gather(*(rules.scores(item, completions) for item in items))
            children = set(psutil.Process().children()) - before
        turning.cancel()
        return groups, children, num_turns

    groups, children, num_turns = asyncio.run(run())
    expected = [logits[0] for logits in logits_of(folder, TEXTS, prompt=f"add: {PROMPT}")]
    for scores in groups:
        assert [score.reward for score in scores] == pytest.approx(expected, abs=1e-4)
    assert len(children) == 1
    assert num_turns > 20


def test_the_example_is_a_task_of_answers_that_a_reward_model_scores(folder, tmp_path, monkeypatch):
    text = (ROOT / "examples" / "reward_model.py").read_text()
    (tmp_path / "task.py").write_text(text.replace('"advice"', '"advice_here"'))
    monkeypatch.setenv("REWARD_MODEL", str(folder))
    environment = load_environment(EnvConfig(name=str(tmp_path / "task.py")))
    prepare_task(environment)

    async def run():
        async with InlineScorer() as scorer:
            completions = [Completion([0], [0.0], text, "stop", 0) for text in TEXTS]
            return await ScoreRules(environment, scorer).scores(environment.train_item(0), completions)

    scores = asyncio.run(run())
    assert all(0 < score.reward < 1 for score in scores)
    assert set(scores[0].parts) == {"reward_model", "repetition_penalty"}


def test_a_text_that_is_too_long_has_no_score_and_the_others_do(folder):
    async def run():
        async with InlineScorer() as scorer:
            return await scorer.score(create(folder, max_length=20), inputs_of(*TEXTS[:3]))

    first, too_long, last = asyncio.run(run())
    assert (too_long.score, too_long.parts, too_long.outcome) == (None, {"reward_model": None}, "too_long")
    assert "max_length" in too_long.detail
    assert None not in (first.score, last.score)


@pytest.mark.parametrize("normalization", ["none", "sum", "minmax"])
def test_a_text_that_is_too_long_is_not_worth_0_in_a_sum(folder, normalization):
    """With outputs below 0 it would be the best of its group, so that length is rewarded."""
    parts = [create(folder, max_length=20, weight=1.0), {"type": "repetition_penalty", "weight": 0.5}]
    combined = registry.create("combined", rewards=parts, normalization=normalization)

    async def run():
        async with InlineScorer() as scorer:
            return await scorer.score(combined, inputs_of(*TEXTS[:3]))

    first, too_long, last = asyncio.run(run())
    assert (too_long.score, too_long.outcome, too_long.parts["repetition_penalty"]) == (None, "too_long", 0.0)
    assert None not in (first.score, last.score)
    if normalization == "minmax":
        assert {first.score, last.score} == {0.0, 1.0}, "of those that have a score"
    with pytest.raises(ValueError, match="reward 'reward_model' has no score"):
        combined.score_group(inputs_of(*TEXTS[:3]))


def test_a_text_that_is_too_long_has_a_score_if_that_part_is_only_recorded(folder):
    parts = [create(folder, max_length=20, weight=0.0), {"type": "repetition_penalty", "weight": 0.5}]

    async def run():
        async with InlineScorer() as scorer:
            return await scorer.score(registry.create(parts), inputs_of(TEXTS[1]))

    (result,) = asyncio.run(run())
    assert (result.score, result.outcome, result.parts["reward_model"]) == (0.0, "scored", None)


def test_what_is_no_reward_model_is_refused_with_a_way_out(folder, several, tmp_path):
    plain = write_tiny_model(tmp_path / "plain", hidden_size=32, num_layers=1)
    with pytest.raises(ModelError, match=r"lacks weights: score\.weight"):
        create(plain).warm_up()
    with pytest.raises(ConfigError, match="has 3 outputs") as error:
        create(several).warm_up()
    assert "0 (LABEL_0), 1 (LABEL_1), 2 (LABEL_2)" in error.value.fix
    with pytest.raises(ModelError, match="is not the folder of a model"):
        create("./missing").check_installed()
    for settings in ({"model": ""}, {"batch_size": 0}, {"timeout_s": 0}, {"activation": "tanh"}):
        with pytest.raises(ConfigError):
            registry.create("reward_model", **{"model": str(folder), **settings})
