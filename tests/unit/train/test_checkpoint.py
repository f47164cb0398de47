from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.train import checkpoint
from treadle.train.checkpoint import Checkpoints
from treadle.train.optim import Optimizer
from treadle.train.policy import load_policy

CONFIG = TrainConfig(lr=1e-3)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def new_parts(model_folder):
    policy = load_policy(model_folder, dtype="bfloat16", device="cpu", logprob_chunk=64)
    return policy, Optimizer(policy, CONFIG)


def take_steps(policy, optimizer, first, last):
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for g in policy.gradients():
            g.copy_(torch.randn(g.shape, generator=generator))
        optimizer.step(step)
    policy.write_live_weights()


def test_a_restored_run_goes_on_bit_for_bit(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1 << 20)
    policy, optimizer = new_parts(model_folder)
    take_steps(policy, optimizer, 1, 6)
    stopped, stopped_optimizer = new_parts(model_folder)
    take_steps(stopped, stopped_optimizer, 1, 3)
    Checkpoints(tmp_path, model_folder).save(3, stopped, stopped_optimizer)
    assert len(list((tmp_path / "step_3").glob("state-*.safetensors"))) > 3
    resumed, resumed_optimizer = new_parts(model_folder)
    assert Checkpoints(tmp_path, model_folder).restore(resumed, resumed_optimizer) == 3
    take_steps(resumed, resumed_optimizer, 4, 6)
    for name, master in policy.masters.items():
        assert torch.equal(master, resumed.masters[name])
        assert torch.equal(policy.live[name], resumed.live[name])


def test_a_checkpoint_is_an_ordinary_model_folder(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    take_steps(policy, optimizer, 1, 2)
    final = Checkpoints(tmp_path, model_folder).save_final(policy)
    loaded = AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, policy.live[name])
    assert (final / "tokenizer.json").is_file()
    assert (final / "chat_template.jinja").is_file()


def test_only_the_newest_is_kept_and_half_written_ones_are_ignored(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    checkpoints = Checkpoints(tmp_path, model_folder)
    for step in (1, 2):
        take_steps(policy, optimizer, step, step)
        checkpoints.save(step, policy, optimizer)
    (tmp_path / ".step_3.partial").mkdir()
    (tmp_path / "step_4").mkdir()  # no trainer.json: never completed
    assert checkpoints.restore(*new_parts(model_folder)) == 2
    assert not (tmp_path / "step_1").exists()


def test_a_damaged_file_is_named(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    checkpoints = Checkpoints(tmp_path, model_folder)
    checkpoints.save(1, policy, optimizer)
    victim = tmp_path / "step_1" / "state-000.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(TrainingError, match=r"state-000\.safetensors is damaged"):
        checkpoints.restore(policy, optimizer)


def test_without_a_checkpoint_training_begins_at_zero(model_folder, tmp_path):
    assert Checkpoints(tmp_path, model_folder).restore(*new_parts(model_folder)) == 0
    assert json.loads((model_folder / "config.json").read_text())["model_type"] == "llama"
