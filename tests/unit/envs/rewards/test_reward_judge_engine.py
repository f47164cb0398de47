"""The reward `judge` asks Treadle's own engine, with a tiny model that was trained to answer in the form asked for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from transformers import LlamaForCausalLM

from tests.served_app import listening
from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.api import create_app, engine_access
from treadle.engines.transformers_engine import TransformersEngine
from treadle.envs.rewards import InlineScorer, RewardInput, registry
from treadle.envs.rewards.judge_prompts import rubric_question

RUBRIC = "It is polite."
ANSWER = "SCORE: 7"
NUM_STEPS = 40


def write_judge(folder: Path) -> Path:
    """It reads a question of the reward and answers ANSWER, whatever the question says."""
    write_tiny_model(folder, hidden_size=64, num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()  # without spaces between the characters
    tokenizer.save(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    answer = tokenizer.encode(f"<turn>{ANSWER}<end>").ids
    for step in range(NUM_STEPS):
        texts = {"RUBRIC": RUBRIC, "TASK": "Say something.", "ANSWER": "please " * (step % 5) + "hello"}
        question = "".join(message["content"] for message in rubric_question(texts, max_points=10))
        ids = torch.tensor([tokenizer.encode(question).ids + answer])
        logits = model(input_ids=ids, logits_to_keep=len(answer)).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(answer[1:]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = write_judge(tmp_path_factory.mktemp("judge") / "model")
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, device="cpu", max_num_seqs=8)
    engine = TransformersEngine(config, folder)
    with listening(create_app(engine, config, engine_access(config, {}))) as url:
        yield {"url": url, "model": str(folder), "rubric": RUBRIC}
    asyncio.run(engine.close())


def score(judge, *texts, **settings):
    reward = registry.create("judge", **judge, **settings)

    async def run():
        async with InlineScorer() as scorer:
            return await scorer.score(reward, [RewardInput(text, prompt="Say something.") for text in texts])

    return asyncio.run(run())


def test_our_engine_is_a_judge(judge):
    results = score(judge, "hello", "please hello")
    assert [result.score for result in results] == [0.7, 0.7], [result.detail for result in results]
    assert all(result.metrics["judge/tokens"] > 800 for result in results), "a token is a character"


def test_an_answer_that_is_cut_off_is_no_score(judge):
    (result,) = score(judge, "hello", max_tokens=3)
    assert (result.outcome, result.metrics["judge/requests"]) == ("judge_failed", 1)
