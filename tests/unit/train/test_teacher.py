"""A teacher that is served by a real engine over HTTP, and a policy that learns from it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from tests.served_app import listening
from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig, TrainConfig
from treadle.engines.api import create_app, engine_access
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import ConfigError, EngineError
from treadle.train.feed import HubFeed
from treadle.train.loop import FrozenLogprobs, accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.train.prepare import teacher_logprobs
from treadle.train.stop import StopRequested
from treadle.train.teacher import Teacher
from treadle.watch.waits import Waits
from treadle.wire.groups import LeasedBatch, ScoredGroup
from treadle.wire.hub import RegisterTrainer

SETTINGS = {
    "lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "dtype": "float32", "device": "cpu", "seq_len": 64,
    "compile": "off", "steps": 99,
}  # fmt: skip


@contextmanager
def served(folder, port=0, **settings):
    config = EngineConfig(
        model=str(folder), dtype="float32", threads=1, device="cpu", max_model_len=65, **settings
    )  # fmt: skip
    engine = TransformersEngine(config, folder)
    try:
        with listening(create_app(engine, config, engine_access(config, {})), port) as url:
            yield url
    finally:
        asyncio.run(engine.close())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(student, teacher): other weights, the same tokenizer. The teacher prefers some tokens clearly."""
    root = tmp_path_factory.mktemp("models")
    student, teacher = (
        write_tiny_model(root / name, seed=seed, hidden_size=32, num_layers=1)
        for name, seed in (("student", 0), ("teacher", 7))
    )
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5.0)  # also those of the output
    model.save_pretrained(teacher)
    return student, teacher


@pytest.fixture(scope="module")
def teacher_url(folders):
    with served(folders[1]) as url:
        yield url


def teacher_at(url, **settings):
    return Teacher(TrainConfig(teacher_url=url, **{**SETTINGS, **settings}), Waits())


def connected(url, folder, **settings):
    teacher = teacher_at(url, **settings)
    teacher.connect(folder)
    return teacher


@pytest.fixture
def teacher(folders, teacher_url):
    return connected(teacher_url, folders[0])


def group(completions, prompt=(5, 6, 7), scores=None):
    return ScoredGroup(
        tokens=[[*prompt, *c] for c in completions],
        masks=[[*[-100] * len(prompt), *c] for c in completions],
        scores=[0.0] * len(completions) if scores is None else scores,
    )


def leased(*groups):
    return LeasedBatch(step=1, token="t", lease_s=9.0, groups=list(groups))


def scored(teacher, *groups):
    batch = leased(*groups)
    teacher.start(batch)
    teacher.finish(batch, lambda: None)
    return batch.groups


def known(group, rollout):
    return teacher_logprobs(group, rollout, np.array(group.masks[rollout]) != -100)


def plain_logprobs(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    return [table[t - 1, token].item() for t, token in enumerate(tokens) if t]


# ---- the teacher's answers


def test_every_trained_token_gets_the_teachers_logprob(folders, teacher_url):
    teacher = connected(f"{teacher_url}/v1", folders[0])
    first, second = scored(teacher, group([[10, 11, 1], [12]]), group([[13, 14]], prompt=(8,)))
    for made, rollout in ((first, 0), (first, 1), (second, 0)):
        tokens = made.tokens[rollout]
        num_prompt = made.masks[rollout].count(-100)
        expected = plain_logprobs(folders[1], tokens)[num_prompt - 1 :]
        assert known(made, rollout)[num_prompt:] == pytest.approx(expected, abs=1e-4)
        assert np.isnan(known(made, rollout)[:num_prompt]).all()
    metrics = teacher.metrics()
    assert metrics["distill/teacher_tokens"] == 6 + 4 + 3
    assert 0 < metrics["distill/teacher_s"] < 60
    assert metrics["distill/teacher_wait_s"] >= 0


def test_only_rollouts_without_a_teachers_logprobs_are_asked_for(teacher):
    sent = group([[10, 11], [12, 13]])
    sent.distill_token_ids = [[[], [], [], [3, 10], [11]], [[], [], [], [12], [4]]]  # of the last token not its own
    sent.distill_logprobs = [[[], [], [], [-9.0, -0.25], [-0.5]], [[], [], [], [-0.1], [-0.2]]]
    untrained = group([[10, 11]])
    untrained.overrides = [{"set_advantage_to_zero": True}]
    sent, _ = scored(teacher, sent, untrained)
    assert known(sent, 0)[3:].tolist() == [-0.25, -0.5]  # as the environment sent them
    assert not np.isnan(known(sent, 1)[3:]).any()
    assert teacher.metrics()["distill/teacher_tokens"] == 5  # of one rollout


def test_tokens_after_the_last_trained_one_are_not_sent(folders, teacher):
    made = group([[10, 11, 12]])
    made.masks[0][-1] = -100
    (made,) = scored(teacher, made)
    assert teacher.metrics()["distill/teacher_tokens"] == 5
    assert known(made, 0)[3:5] == pytest.approx(plain_logprobs(folders[1], made.tokens[0])[2:4], abs=1e-4)


def test_a_rollout_that_the_teacher_refuses_is_trained_without_it(teacher):
    odd, plain = scored(teacher, group([[5000, 11]]), group([[10, 11]]))
    assert np.isnan(known(odd, 0)).all()
    assert not np.isnan(known(plain, 0)[3:]).any()


def test_a_teacher_that_refuses_a_whole_batch_ends_the_trainer(teacher):
    with pytest.raises(EngineError, match="refused all 2 rollouts of step 1"):
        scored(teacher, group([[5000, 11], [11, 5000, 12]]))


# ---- refused at the start


def test_a_teacher_with_another_tokenizer_is_refused(folders, teacher_url, tmp_path):
    other = write_tiny_model(tmp_path / "other", hidden_size=32, num_layers=1)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has another tokenizer than the policy: .* \"The answer is"):
        teacher_at(teacher_url).connect(other)


def test_a_teacher_that_takes_too_few_tokens_is_refused(folders, teacher_url):
    with pytest.raises(ConfigError, match="takes 65 tokens, and sequences of 65 need one more") as error:
        teacher_at(teacher_url, seq_len=65).connect(folders[0])
    assert "--max-model-len 66" in error.value.fix
    assert "--train.seq-len 64" in error.value.fix


def test_a_server_without_logprobs_of_prompts_is_refused(folders):
    async def models(_):
        return JSONResponse({"data": [{"id": "m"}]})

    async def completions(_):
        return JSONResponse({"choices": [{"text": "a"}]})

    app = Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])])
    with listening(app) as url, pytest.raises(ConfigError, match="gives no logprobs of prompts"):
        teacher_at(url).connect(folders[0])


def test_a_teacher_that_needs_a_token_is_refused_with_the_variable(folders, tmp_path):
    file = tmp_path / "token"
    with served(folders[1], token_file=file) as url:
        with pytest.raises(ConfigError, match="refused: 401") as error:
            teacher_at(url).connect(folders[0])
        assert "TREADLE_TEACHER_TOKEN" in error.value.fix


# ---- failures


def test_a_teacher_that_comes_back_finishes_the_batch(folders):
    with served(folders[1], free_port()) as url:
        teacher = connected(url, folders[0])
    batch = leased(group([[10, 11], [12, 13]]))
    teacher.start(batch)
    finished = threading.Thread(target=teacher.finish, args=(batch, lambda: None))
    finished.start()
    time.sleep(0.3)
    assert finished.is_alive()
    with served(folders[1], int(url.rpartition(":")[2])):
        finished.join(60)
    assert not finished.is_alive()
    assert not np.isnan([known(batch.groups[0], i)[3:] for i in range(2)]).any()


def test_a_teacher_that_stays_away_ends_the_trainer_with_a_remedy(folders):
    with served(folders[1]) as url:
        pass
    with pytest.raises(EngineError, match=r"did not answer for 0\.5 s \(\d+ requests\)") as error:
        scored(teacher_at(url, teacher_timeout_s=0.5), group([[10]]))
    assert "treadle engine" in error.value.fix
    assert "start the trainer again" in error.value.fix


def test_a_stop_is_obeyed_while_the_teacher_is_away(folders):
    with served(folders[1]) as url:
        pass
    teacher, batch = teacher_at(url), leased(group([[10]]))
    teacher.start(batch)

    def stop():
        raise StopRequested

    with pytest.raises(StopRequested):
        teacher.finish(batch, stop)


def test_a_batch_that_the_teacher_cannot_score_stays_at_the_hub(folders, tmp_path):
    """The trainer ends with an error; the next one gets the same batches, with the second scored ahead."""
    with served(folders[1], free_port()) as url:
        teacher = connected(url, folders[0], teacher_timeout_s=0.5)
    with HubProcess(tmp_path) as process, process.client() as client:
        hub = str(client.base_url)
        feed = HubFeed(hub, lambda: None, Waits(), teacher=teacher)
        registration = RegisterTrainer(
            wandb_group="", wandb_project="", batch_size=2, max_token_len=64, checkpoint_dir="",
            save_checkpoint_interval=5, starting_step=0, num_steps=5, vocab_size=80,
        )  # fmt: skip
        feed.register(registration)
        for token in (10, 20):
            body = msgspec.to_builtins(group([[token, 11], [12, token]], scores=[1.0, 1.0]))
            assert client.post("/scored_data", json=body).status_code == 200
        with pytest.raises(EngineError, match="did not answer for") as error:
            feed.lease(1)
        feed.give_back(str(error.value), counts=False)
        with served(folders[1], int(url.rpartition(":")[2])):
            feed = HubFeed(hub, lambda: None, Waits(), teacher=connected(url, folders[0]))
            feed.register(registration)
            for step, token in ((1, 10), (2, 20)):
                batch = feed.lease(step)
                feed.look_ahead(step + 1)
                is_held = client.post("/v1/lease", json={"step": step + 1, "holder": "another"}).status_code == 409
                assert is_held == (step == 1)  # there is no third one
                assert batch.groups[0].tokens[0][3] == token
                assert not np.isnan([known(batch.groups[0], i)[3:] for i in range(2)]).any()
                feed.ack(batch)
        assert client.get("/status").json()["current_step"] == 2
        process.stop()


# ---- what the policy learns


class Student:
    """A policy that samples its own rollouts, and trains on them as the trainer does."""

    def __init__(self, folder, url, **settings):
        self.config = TrainConfig(teacher_url=url, **{**SETTINGS, **settings})
        self.policy = load_policy(folder, self.config)
        self.optimizer = build_optimizer(self.policy, self.config)
        self.teacher = connected(url, folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._draw = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def sample(self, num_rollouts=32, num_tokens=6):
        self._model.load_state_dict(self.policy.weights, strict=False)  # without the tied output
        tokens = torch.tensor([[5, 6, 7]] * num_rollouts)
        for _ in range(num_tokens):
            probabilities = self._model(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=self._draw)], 1)
        return group([row[3:] for row in tokens.tolist()])

    def gradients(self, step=0):
        (made,) = scored(self.teacher, self.sample())
        batch = pack([made], self.config, vocab_size=self.policy.vocab_size)
        return accumulate_gradients(self.policy, batch, self.config, FrozenLogprobs(), draw=step).metrics()

    def train(self, num_steps):
        """The reverse KL of each step."""
        found = []
        for step in range(num_steps):
            found.append(self.gradients(step)["distill/reverse_kl"])
            self.optimizer.step(step + 1, loss_is_finite=True)
            self.policy.write_live_weights()
        return found


def test_a_student_moves_to_its_teacher_without_any_reward(folders, teacher_url):
    student = Student(folders[0], teacher_url, reward_coef=0.0)
    found = student.train(24)
    assert sum(found[-4:]) < 0.5 * sum(found[:4]), found


def test_a_teacher_that_is_the_student_changes_nothing(folders):
    with served(folders[0]) as url:
        student = Student(folders[0], url, reward_coef=0.0)
        metrics = student.gradients()
    assert metrics["distill/taught_frac"] == 1
    assert abs(metrics["distill/reverse_kl"]) < 1e-5
    norm = math.sqrt(sum(float(g.square().sum()) for g in student.optimizer.gradients.values()))
    assert norm < 1e-4
