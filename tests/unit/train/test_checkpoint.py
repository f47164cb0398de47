from __future__ import annotations

import hashlib
import json
import logging
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.engines.model_folder import check_model_folder
from treadle.engines.weight_updates import read_weights
from treadle.errors import ConfigError, DiskFull, TrainingError
from treadle.train import model_files
from treadle.train.checkpoint import Checkpoints, Restored, Totals
from treadle.train.optimizers import OPTIMIZERS, build_optimizer
from treadle.train.policy import load_policy

CASES = [(name, lora) for name in OPTIMIZERS for lora in (False, True)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


def new_parts(model_folder, optimizer="adamw", **settings):
    torch.manual_seed(0)
    config = TrainConfig(optimizer=optimizer, lr=1e-3, dtype="bfloat16", device="cpu", compile="off", **settings)
    policy = load_policy(model_folder, config)
    return policy, build_optimizer(policy, config)


def take_steps(policy, optimizer, first, last):
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for gradient in optimizer.gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        optimizer.step(step)
        policy.write_live_weights()


def save_steps(checkpoints, model_folder, *steps):
    policy, optimizer = new_parts(model_folder)
    for step in steps:
        take_steps(policy, optimizer, step, step)
        checkpoints.save(step, policy, optimizer, Totals(elapsed_s=10.0 * step))
    return policy, optimizer


def everything(policy, optimizer):
    return optimizer.state() | {f"live.{n}": p.detach() for n, p in policy.live.items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


@pytest.mark.parametrize(("optimizer_name", "lora"), CASES)
def test_a_restored_run_goes_on_bit_for_bit(model_folder, tmp_path, monkeypatch, optimizer_name, lora):
    monkeypatch.setattr(model_files, "SHARD_BYTES", 1 << 12)
    policy, optimizer = new_parts(model_folder, optimizer_name, lora=lora)
    take_steps(policy, optimizer, 1, 3)
    Checkpoints(tmp_path, model_folder, keep=2).save(3, policy, optimizer, Totals(elapsed_s=12.5, num_tokens=99))
    folder = tmp_path / ("adapter_step_3" if lora else "step_3")
    assert len(list(folder.glob("state-*.tensors"))) > 1
    saved = {name: p.detach().clone() for name, p in policy.live.items()}
    take_steps(policy, optimizer, 4, 6)

    resumed, resumed_optimizer = new_parts(model_folder, optimizer_name, lora=lora)
    restored = Checkpoints(tmp_path, model_folder, keep=2).restore(resumed, resumed_optimizer)
    assert restored == Restored(step=3, elapsed_s=12.5, num_tokens=99)
    resumed.write_live_weights()
    assert_same({name: p.detach() for name, p in resumed.live.items()}, saved)
    shutil.rmtree(folder)  # nothing of it is needed any more
    take_steps(resumed, resumed_optimizer, 4, 6)
    assert_same(everything(resumed, resumed_optimizer), everything(policy, optimizer))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_only_chosen_layers_are_trained_and_all_weights_are_saved(model_folder, tmp_path, name):
    policy, optimizer = new_parts(model_folder, name, train_layer_indices="1")
    take_steps(policy, optimizer, 1, 2)
    checkpoints = Checkpoints(tmp_path, model_folder, keep=1)
    checkpoints.save(2, policy, optimizer, Totals())
    saved = load_file(tmp_path / "step_2" / "model.safetensors")
    assert_same(saved, {name: p.detach() for name, p in policy.weights.items()})
    resumed, resumed_optimizer = new_parts(model_folder, name, train_layer_indices="1")
    checkpoints.restore(resumed, resumed_optimizer)
    resumed.write_live_weights()
    assert_same({name: p.detach() for name, p in resumed.weights.items()}, saved)
    with pytest.raises(TrainingError, match="does not fit what is trained now"):
        checkpoints.restore(*new_parts(model_folder, name, train_layer_indices="0"))


def test_a_checkpoint_is_an_ordinary_model_folder(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    take_steps(policy, optimizer, 1, 2)
    checkpoints = Checkpoints(tmp_path, model_folder, keep=1)
    checkpoints.save(2, policy, optimizer, Totals())
    final = checkpoints.save_final(policy)
    assert not (final / "trainer.json").exists()
    for folder in (final, tmp_path / "step_2"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, policy.live[name])
        assert (folder / "tokenizer.json").is_file()
        assert (folder / "chat_template.jinja").is_file()


def test_adapters_load_with_peft(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder, lora=True, lora_r=4)
    take_steps(policy, optimizer, 1, 2)
    checkpoints = Checkpoints(tmp_path, model_folder, keep=1)
    checkpoints.save(2, policy, optimizer, Totals())
    final = checkpoints.save_final(policy)
    assert final.name == "final_adapter"
    ids = torch.arange(10)[None]
    for folder in (final, tmp_path / "adapter_step_2"):
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
        plain = base(ids).logits
        loaded = PeftModel.from_pretrained(base, folder)
        assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"] is True
        assert not (folder / "model.safetensors").exists()
        assert (folder / "tokenizer.json").is_file()
        adapted = {n.replace(".default.", "."): p for n, p in loaded.named_parameters() if ".lora_" in n}
        assert_same(adapted, {name: p.detach() for name, p in policy.live.items()})
        assert not torch.allclose(loaded(ids).logits, plain, atol=1e-3)


def test_a_merged_final_model_is_the_base_with_its_adapter(model_folder, tmp_path):
    config = TrainConfig(lora=True, lora_r=4, dtype="float32", device="cpu", compile="off")
    policy = load_policy(model_folder, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.live.values():
            parameter.normal_()
    adapter = Checkpoints(tmp_path, model_folder, keep=1).save_final(policy, is_merged=True)
    assert adapter.stat().st_mtime_ns <= (tmp_path / "final_model").stat().st_mtime_ns
    check_model_folder(tmp_path / "final_model")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final_model", dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, adapter)(ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    assert (adapted - plain).abs().max() > 0.1


def test_an_adapter_for_an_engine_is_the_adapter_alone(model_folder, tmp_path):
    policy, _ = new_parts(model_folder, lora=True, lora_r=4)
    live = policy.save_adapter(tmp_path, "adapter_v1")
    assert {file.name for file in live.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_the_manifest_covers_every_file(model_folder, tmp_path):
    save_steps(Checkpoints(tmp_path, model_folder, keep=2), model_folder, 1)
    manifest = json.loads((tmp_path / "step_1" / "trainer.json").read_text())
    files = {f.name: f for f in (tmp_path / "step_1").iterdir() if f.name != "trainer.json"}
    assert {"model.safetensors", "config.json", "state-000.tensors", "tokenizer.json"} <= files.keys()
    assert manifest["sha256"] == {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()}
    assert (manifest["step"], manifest["format"], manifest["optimizer"]) == (1, 1, "adamw")


def test_a_checkpoint_is_a_model_folder_without_foreign_weights(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    Checkpoints(tmp_path, model_folder, keep=2).save(1, policy, optimizer, Totals())
    check_model_folder(tmp_path / "step_1")
    assert read_weights(tmp_path / "step_1", policy.weights, 0, must_be_all=True).keys() == policy.weights.keys()


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def rewrite(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (flip_a_bit, "state-000.tensors", "the sha256 of state-000.tensors is wrong"),
        (flip_a_bit, "model.safetensors", "the sha256 of model.safetensors is wrong"),
        (flip_a_bit, "tokenizer.json", "the sha256 of tokenizer.json is wrong"),
        (truncate, "state-000.tensors", "the sha256 of state-000.tensors is wrong"),
        (lambda file: file.unlink(), "model.safetensors", "model.safetensors is missing"),
        (lambda file: file.unlink(), "trainer.json", "trainer.json is missing"),
        (lambda file: file.write_text("{"), "trainer.json", "trainer.json cannot be read"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "trainer.json", "trainer.json cannot be read"),
        (lambda file: file.write_text('{"step": 2}'), "trainer.json", "trainer.json cannot be read"),
        (lambda file: rewrite(file, format=99), "trainer.json", "trainer.json has format 99"),
        (lambda file: rewrite(file, step=3), "trainer.json", "trainer.json is of step 3"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(model_folder, tmp_path, caplog, damage, file, reason):
    checkpoints = Checkpoints(tmp_path, model_folder, keep=2)
    save_steps(checkpoints, model_folder, 1, 2)
    damage(tmp_path / "step_2" / file)
    policy, optimizer = new_parts(model_folder)
    with caplog.at_level(logging.WARNING, "treadle.checkpoint"):
        assert checkpoints.restore(policy, optimizer) == Restored(step=1, elapsed_s=10.0)
    (record,) = caplog.records
    assert record.treadle_fields["folder"] == str(tmp_path / "step_2")
    assert record.treadle_fields["reason"].startswith(reason)
    expected, expected_optimizer = new_parts(model_folder)
    take_steps(expected, expected_optimizer, 1, 1)
    policy.write_live_weights()
    assert_same(everything(policy, optimizer), everything(expected, expected_optimizer))
    # The next save replaces the damaged one, and it is never met again.
    take_steps(policy, optimizer, 2, 2)
    checkpoints.save(2, policy, optimizer, Totals(elapsed_s=20.0))
    assert checkpoints.restore(*new_parts(model_folder)) == Restored(step=2, elapsed_s=20.0)


def test_when_all_are_damaged_they_are_named_and_nothing_is_loaded(model_folder, tmp_path):
    checkpoints = Checkpoints(tmp_path, model_folder, keep=2)
    save_steps(checkpoints, model_folder, 1, 2)
    flip_a_bit(tmp_path / "step_1" / "state-000.tensors")
    (tmp_path / "step_2" / "config.json").unlink()
    policy, optimizer = new_parts(model_folder)
    before = {k: v.clone() for k, v in everything(policy, optimizer).items()}
    with pytest.raises(
        TrainingError, match=r"step_2 \(config.json is missing\), step_1 \(the sha256 of state"
    ) as error:
        checkpoints.restore(policy, optimizer)
    assert "start a fresh run" in error.value.fix
    policy.write_live_weights()
    assert_same(everything(policy, optimizer), before)


def test_a_process_killed_before_the_rename_leaves_the_checkpoint_before(model_folder, tmp_path):
    save_steps(Checkpoints(tmp_path, model_folder, keep=2), model_folder, 1, 2)
    (tmp_path / "step_2").rename(tmp_path / ".step_2.partial")  # all written, not yet renamed
    assert Checkpoints(tmp_path, model_folder, keep=2).restore(*new_parts(model_folder)).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_a_process_killed_while_replacing_leaves_the_replaced_one(model_folder, tmp_path):
    save_steps(Checkpoints(tmp_path, model_folder, keep=2), model_folder, 1)
    shutil.copytree(tmp_path / "step_1", tmp_path / ".step_1.partial")
    (tmp_path / "step_1").rename(tmp_path / ".step_1.old")
    assert Checkpoints(tmp_path, model_folder, keep=2).restore(*new_parts(model_folder)).step == 1
    shutil.copytree(tmp_path / "step_1", tmp_path / ".step_1.old")  # or just after
    assert Checkpoints(tmp_path, model_folder, keep=2).restore(*new_parts(model_folder)).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_a_failed_write_leaves_nothing_behind(model_folder, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, model_folder, keep=1)
    policy, optimizer = save_steps(checkpoints, model_folder, 1)

    def full(*_args, **_kwargs):
        raise model_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model_files, "save_file", full)
    with pytest.raises(DiskFull, match="the checkpoint before it is kept"):
        checkpoints.save(2, policy, optimizer, Totals(elapsed_s=20.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert checkpoints.restore(policy, optimizer).step == 1


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(model_folder, tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, model_folder, keep=keep)
    save_steps(checkpoints, model_folder, 8, 9, 10, 11)
    assert {p.name for p in tmp_path.iterdir()} == {f"step_{n}" for n in (11, 10, 9)[:keep]}
    save_steps(checkpoints, model_folder, 5)  # after a fall back behind damaged ones, the new one is the newest
    assert {p.name for p in tmp_path.iterdir()} == {"step_5"}


def test_what_another_optimizer_or_adapter_left_is_refused(model_folder, tmp_path):
    checkpoints = Checkpoints(tmp_path, model_folder, keep=1)
    save_steps(checkpoints, model_folder, 1)
    with pytest.raises(ConfigError, match="saved by the optimizer adamw, whose state muon cannot take over"):
        checkpoints.restore(*new_parts(model_folder, "muon"))
    with pytest.raises(ConfigError, match="step_1 is of a run that trained the model's own weights"):
        checkpoints.restore(*new_parts(model_folder, lora=True))


def test_without_a_checkpoint_training_begins_at_zero(model_folder, tmp_path):
    assert Checkpoints(tmp_path, model_folder, keep=2).restore(*new_parts(model_folder)) == Restored()
