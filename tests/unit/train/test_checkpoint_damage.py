"""A flipped bit in the manifest, and a disk that is full at any place of a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_bad_input import small_disk
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import DiskFull
from treadle.sync.model_folders import ModelOrigin
from treadle.train import model_files
from treadle.train.checkpoint import (
    CheckpointDamaged,
    Checkpoints,
    Manifest,
    Restored,
    Totals,
    _checksum,
    verify,
    write_manifest,
)
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=1)


def new_parts(model_folder, **settings):
    config = TrainConfig(dtype="bfloat16", device="cpu", compile="off", **settings)
    policy = load_policy(model_folder, config)
    return policy, build_optimizer(policy, config)


def flips(raw, every=1):
    for bit in range(0, 8 * len(raw), every):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def manifest_of(step, hashes, **values):
    origin = ModelOrigin(config="c0ffee", weights="5eed")
    return Manifest(step=step, sha256=hashes, origin=origin, optimizer="adamw", **values)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path):
    (tmp_path / "state").write_bytes(b"state")
    hashes = {"state": model_files.sha256(tmp_path / "state")}
    write_manifest(tmp_path, manifest_of(25, hashes, elapsed_s=310.5, num_tokens=70_123))
    raw = (tmp_path / "trainer.json").read_bytes()
    for flipped in flips(raw):
        (tmp_path / "trainer.json").write_bytes(flipped)
        with pytest.raises(CheckpointDamaged):
            verify(tmp_path, 25)


def test_a_flipped_bit_in_a_manifest_costs_one_checkpoint(model_folder, tmp_path):
    policy, optimizer = new_parts(model_folder)
    checkpoints = Checkpoints(tmp_path, model_folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, policy, optimizer, Totals(elapsed_s=10.0 * step, num_tokens=step))
    file = tmp_path / "step_2" / "trainer.json"
    raw = file.read_bytes()
    outcomes = []
    for flipped in flips(raw, every=67):
        file.write_bytes(flipped)
        outcomes.append(checkpoints.restore(policy, optimizer))
    one, two = (Restored(step=step, elapsed_s=10.0 * step, num_tokens=step) for step in (1, 2))
    assert len(outcomes) > 100
    assert [outcome for outcome in outcomes if outcome not in (one, two)] == []
    assert outcomes.count(two) <= 1


@pytest.mark.parametrize(
    "text", ['{"step": 1e999}', "[" * 100_000, '{"step": 99999999999999999999999}', "3", '"\\ud800"']
)
def test_a_manifest_of_nonsense_is_damage(tmp_path, text):
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        verify(tmp_path, 1)


def test_a_manifest_of_a_later_release_with_new_fields_is_read(tmp_path):
    write_manifest(tmp_path, manifest_of(3, {}, num_tokens=5))
    assert verify(tmp_path, 3) == manifest_of(3, {}, num_tokens=5)
    values = json.loads((tmp_path / "trainer.json").read_text()) | {"a_new_field": 1}
    (tmp_path / "trainer.json").write_text(json.dumps(values | {"checksum": _checksum(values)}))
    assert verify(tmp_path, 3).num_tokens == 5


def raising(error):
    def fill(folder):
        (folder / "half").write_bytes(b"half")
        raise error

    return fill


def to_a_full_device(folder):
    (folder / "file").symlink_to("/dev/full")
    (folder / "file").write_bytes(b"no room")


@pytest.mark.parametrize(
    "fill",
    [
        raising(OSError(errno.ENOSPC, "No space left on device")),
        raising(OSError(errno.EDQUOT, "Disk quota exceeded")),
        raising(
            model_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        ),
        raising(model_files.SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")),
        to_a_full_device,
    ],
)
def test_a_full_disk_is_named_wherever_it_was_met(tmp_path, fill):
    with pytest.raises(DiskFull, match=rf"{tmp_path}/step_9; the checkpoint before it is kept") as error:
        model_files.write_folder(tmp_path, "step_9", fill)
    assert "--resume" in error.value.fix
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_left_as_they_are(tmp_path):
    with pytest.raises(PermissionError):
        model_files.write_folder(tmp_path, "step_9", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(model_files.SafetensorError, match="os error 5"):
        model_files.write_folder(tmp_path, "step_9", raising(model_files.SafetensorError("I/O error (os error 5)")))
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_folder_itself_or_when_it_is_synced(tmp_path, monkeypatch):
    def no_room(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((os, "mkdir"), (os, "fsync")):
        with monkeypatch.context() as full:
            full.setattr(module, name, no_room)
            with pytest.raises(DiskFull, match="step_9; the checkpoint before it is kept"):
                model_files.write_folder(tmp_path, "step_9", lambda folder: (folder / "file").touch())
    assert list(tmp_path.iterdir()) == []


def test_only_what_must_outlive_a_loss_of_power_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    model_files.write_folder(tmp_path, "live", lambda folder: (folder / "file").touch(), is_durable=False)
    assert not synced
    model_files.write_folder(tmp_path, "step_9", lambda folder: (folder / "file").touch())
    assert len(synced) == 3  # the file, its folder, and the folder that this one is in
    assert (tmp_path / "live" / "file").is_file()


def test_tensors_that_were_copied_together_are_written_as_they_were(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 2), "none": torch.empty(0)}
    model_files.write_tensors(model_files.host_copies(tensors), tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_streamed_tensors_are_dropped_before_the_next_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "SHARD_BYTES", 1)
    tensors = {"b": torch.randn(5).bfloat16(), "a": torch.randn(3, 4), "c": torch.randn(2, 2), "none": torch.empty(0)}
    alive = weakref.WeakSet()

    def one_at_a_time():
        for name, tensor in tensors.items():
            assert len(alive) <= 2  # the one that is written, and the one that was made before it was
            copied = tensor.clone()
            alive.add(copied)
            yield name, copied
            del copied

    model_files.stream_tensors(one_at_a_time(), tensors, tmp_path / "streamed")
    model_files.write_tensors(tensors, tmp_path / "whole")
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_streamed_tensors_must_be_those_that_were_described(tmp_path):
    described = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(ValueError, match="b was described and not written"):
        model_files.stream_tensors([("a", torch.ones(3))], described, tmp_path / "file")
    with pytest.raises(ValueError, match=r"a is \[4\] torch.float32, not as described"):
        model_files.stream_tensors([("a", torch.ones(4))], described, tmp_path / "file")


@pytest.mark.parametrize("lora", [False, True])
def test_however_little_room_is_left_the_checkpoint_before_stays_whole(model_folder, tmp_path, lora):
    """A real small disk, filled up such that the write of each file in turn finds no room."""
    prefix = "adapter_step_" if lora else "step_"
    policy, optimizer = new_parts(model_folder, lora=lora, lora_r=2)
    with small_disk(tmp_path / "disk", "2m") as disk:
        checkpoints = Checkpoints(disk / "checkpoints", model_folder, keep=1)
        checkpoints.save(1, policy, optimizer, Totals())
        needed = sum(file.stat().st_size for file in (disk / "checkpoints").rglob("*"))
        free = shutil.disk_usage(disk).free
        num_full = 0
        for room in range(0, free, 8192):
            (disk / "ballast").write_bytes(bytes(free - room))
            try:
                checkpoints.save(2, policy, optimizer, Totals())
            except DiskFull:
                num_full += 1
                assert [path.name for path in (disk / "checkpoints").iterdir()] == [f"{prefix}1"]
                assert checkpoints.restore(policy, optimizer).step == 1
            else:
                break
            finally:
                (disk / "ballast").unlink()
        assert num_full >= needed // 8192
        assert checkpoints.restore(policy, optimizer).step == 2
