"""Copies of checkpoints, in obstore's store of local files; credentials and requests are obstore's matter."""

from __future__ import annotations

import shutil
import threading
import time

import obstore
import pytest
import torch
from obstore.store import LocalStore

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import ConfigError, TrainingError
from treadle.train import checkpoint_copies
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.checkpoint_copies import CheckpointCopies, copied_checkpoints
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        dtype="bfloat16", device="cpu", compile="off", lr=1e-3, keep_checkpoints=2,
        save_path=tmp_path / "here", checkpoint_url=f"file://{tmp_path}/bucket/run",
    )  # fmt: skip


def parts_of(config, model_folder):
    policy = load_policy(model_folder, config)
    return policy, build_optimizer(policy, config)


def train(config, model_folder, *steps, is_final=True):
    policy, optimizer = parts_of(config, model_folder)
    with copied_checkpoints(config) as copies:
        checkpoints = Checkpoints(config.save_path, model_folder, config.keep_checkpoints, copies=copies)
        for step in steps:
            for gradient in optimizer.gradients.values():
                gradient.fill_(0.01)
            optimizer.step(step)
            checkpoints.save(step, policy, optimizer, Totals())
        if is_final:
            checkpoints.save_final(policy)
    return policy


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def resume(config, model_folder):
    policy, optimizer = parts_of(config, model_folder)
    with copied_checkpoints(config):
        return Checkpoints(config.save_path, model_folder, 2).restore(policy, optimizer), policy


def test_another_machine_continues_from_the_newest_copy(config, model_folder, tmp_path):
    trained = train(config, model_folder, 1, 2, 3)
    assert names_in(tmp_path / "bucket" / "run") == ["final_model", "step_2", "step_3"]
    final = tmp_path / "bucket" / "run" / "final_model"
    assert names_in(final) == names_in(config.save_path / "final_model")
    shutil.rmtree(config.save_path)

    restored, policy = resume(config, model_folder)
    assert restored.step == 3
    for name, weight in policy.live.items():
        assert torch.equal(weight, trained.live[name]), name


def test_a_copy_without_its_manifest_is_not_complete(config, model_folder, tmp_path):
    train(config, model_folder, 1, 2)
    (tmp_path / "bucket" / "run" / "step_2" / "trainer.json").unlink()
    shutil.rmtree(config.save_path)
    assert resume(config, model_folder)[0].step == 1


def test_what_is_here_is_used_if_it_is_as_new(config, model_folder, tmp_path):
    train(config, model_folder, 1)
    shutil.rmtree(tmp_path / "bucket" / "run" / "step_1")
    assert resume(config, model_folder)[0].step == 1


def damage(folder):
    weights = folder / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)


def test_a_damaged_copy_is_not_trained_on(config, model_folder, tmp_path):
    train(config, model_folder, 1)
    damage(tmp_path / "bucket" / "run" / "step_1")
    shutil.rmtree(config.save_path)
    with pytest.raises(TrainingError, match=r"run/step_1 \(the sha256 of model\.safetensors is wrong\)"):
        resume(config, model_folder)
    assert names_in(config.save_path) == []


def test_the_copy_before_a_damaged_one_is_used(config, model_folder, tmp_path):
    train(config, model_folder, 1, 2)
    damage(tmp_path / "bucket" / "run" / "step_2")
    shutil.rmtree(config.save_path)
    assert resume(config, model_folder)[0].step == 1


def test_a_damaged_checkpoint_is_replaced_by_its_copy(config, model_folder):
    trained = train(config, model_folder, 1, 2)
    for step in (1, 2):
        damage(config.save_path / f"step_{step}")
    restored, policy = resume(config, model_folder)
    assert restored.step == 2
    for name, weight in policy.live.items():
        assert torch.equal(weight, trained.live[name]), name


def test_an_interrupted_copy_is_made_at_the_next_start(config, model_folder, tmp_path):
    train(config, model_folder, 1, 2)
    copy = tmp_path / "bucket" / "run" / "step_2"
    for name in ("trainer.json", "model.safetensors"):
        (copy / name).unlink()
    assert resume(config, model_folder)[0].step == 2
    assert names_in(copy) == names_in(config.save_path / "step_2")


def test_copies_of_a_run_that_was_taken_back_replace_the_later_ones(tmp_path):
    store = LocalStore(tmp_path / "bucket", mkdir=True, automatic_cleanup=True)
    for steps, expected in (((75, 100, 125), [100, 125]), ((55,), [55]), ((60, 65), [60, 65])):
        copies = CheckpointCopies(store, "url", keep=2)
        for step in steps:
            folder = tmp_path / f"step_{step}"
            folder.mkdir()
            (folder / "trainer.json").touch()
            copies.add(folder)
        copies.finish()
        assert names_in(tmp_path / "bucket") == [f"step_{step}" for step in expected]


def test_a_run_that_fails_still_finishes_its_copies(config, model_folder, tmp_path, monkeypatch):
    def put_slowly(*args):
        time.sleep(0.05)
        return put(*args)

    def train_and_fail():
        with copied_checkpoints(config) as copies:
            Checkpoints(config.save_path, model_folder, 2, copies=copies).save(1, policy, optimizer, Totals())
            raise ValueError("a mistake")

    put = obstore.put
    monkeypatch.setattr(obstore, "put", put_slowly)
    policy, optimizer = parts_of(config, model_folder)
    with pytest.raises(ValueError, match="a mistake"):
        train_and_fail()
    assert (tmp_path / "bucket" / "run" / "step_1" / "trainer.json").is_file()

    goes_on = threading.Event()
    monkeypatch.setattr(obstore, "put", lambda *args: put(*args) if args[2] == b"" else goes_on.wait())
    monkeypatch.setattr(checkpoint_copies, "AFTER_ERROR_S", 0.1)
    with pytest.raises(ValueError, match="a mistake"):
        train_and_fail()  # its copy hangs
    goes_on.set()


def test_a_store_that_cannot_be_written_is_refused_before_training(config, tmp_path):
    (tmp_path / "file").touch()
    for url in (f"file://{tmp_path}/file/run", "ftp://host/run"):
        changed = config.model_copy(update={"checkpoint_url": url})
        with pytest.raises(ConfigError, match="checkpoints cannot be copied"), copied_checkpoints(changed):
            pass


def test_a_run_whose_copies_failed_says_so_at_its_end(config, model_folder, tmp_path):
    def take_store_away():
        shutil.rmtree(tmp_path / "bucket")
        (tmp_path / "bucket").touch()

    def train_without_store():
        with copied_checkpoints(config) as copies:
            checkpoints = Checkpoints(config.save_path, model_folder, 2, copies=copies)
            take_store_away()
            checkpoints.save(1, policy, optimizer, Totals())

    policy, optimizer = parts_of(config, model_folder)
    with pytest.raises(TrainingError, match="not everything was copied to file:"):
        train_without_store()
    assert (config.save_path / "step_1" / "trainer.json").is_file()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_missing_bucket_is_not_taken_for_a_replaced_checkpoint(config, tmp_path, monkeypatch, is_replaced):
    """obstore raises FileNotFoundError for a 404 of the store as well as for a file that is gone."""

    def answer_404(store, name, file):
        if is_replaced:
            shutil.rmtree(folder)
        raise FileNotFoundError("NoSuchBucket")

    folder = tmp_path / "final_model"
    folder.mkdir()
    (folder / "config.json").touch()
    copies = CheckpointCopies(LocalStore(tmp_path), "s3://bucket/run", keep=2)
    monkeypatch.setattr(obstore, "put", answer_404)
    copies.add(folder)
    if is_replaced:
        copies.finish()
    else:
        with pytest.raises(TrainingError, match="not everything was copied to s3://bucket/run: final_model: NoSuch"):
            copies.finish()
