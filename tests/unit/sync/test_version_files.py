"""An engine that cannot load from the trainer's folder is sent the files of each version, or what changed."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import contextmanager

import pytest
import torch

from tests.served_app import listening
from tests.tiny_model import write_tiny_model
from treadle.background import awake_s
from treadle.config import EngineConfig, TrainConfig
from treadle.engines.api import create_app, engine_access
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import SyncError
from treadle.sync import file_transfer
from treadle.sync.file_transfer import send_files, write_delta
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import EngineLink
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import build_policy


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Small parts: the tiny model's file is then sent in several."""
    monkeypatch.setattr(file_transfer, "PART_BYTES", 40_000)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "received"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, tmp_path_factory):
    """(folder, number format)"""
    dtype = getattr(torch, request.param)
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2, dtype=dtype)
    return folder, request.param


@contextmanager
def engine_elsewhere(model, tmp_path, **settings):
    """An engine with a copy of the model at another path, which may load from no folder of the trainer."""
    folder, dtype = model
    own = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, own, dirs_exist_ok=True)
    given = {"dtype": dtype, "threads": 1, "device": "cpu", "adapter_root": own, **settings}
    config = EngineConfig(model=str(own), **given)
    engine = TransformersEngine(config, own)
    try:
        with listening(create_app(engine, config, engine_access(config, {}))) as url:
            yield url
    finally:
        asyncio.run(engine.close())


class Trainer:
    def __init__(self, model, tmp_path, url, mode):
        folder, dtype = model
        self.config = TrainConfig(
            model=str(folder), save_path=tmp_path / "saved", device="cpu", dtype=dtype, lr=1e-3, warmup_steps=0,
            engine_url=url, steps=9, weight_bridge_mode=mode, lora_r=4, verify_publish="always",
        )  # fmt: skip
        self.sync = choose_sync(self.config)
        self.policy = build_policy(self.sync.attach(), self.config)
        self.optimizer = build_optimizer(self.policy, self.config)

    def publish(self, version):
        """Only some elements change, as in 16 bits with a small learning rate."""
        if version:
            for gradient in self.optimizer.gradients.values():
                gradient.zero_().view(-1)[::50] = 1.0
            self.optimizer.step(version)
        return self.sync.publish(self.policy, version)


def num_saved(trainer):
    newest = max((trainer.config.save_path / "live").glob("*_v*"), key=lambda folder: folder.stat().st_mtime)
    return sum(file.stat().st_size for file in newest.glob("*.safetensors"))


def test_weights_reach_an_engine_that_sees_no_folder_of_the_trainer(model, tmp_path, cache):
    with engine_elsewhere(model, tmp_path) as url:
        trainer = Trainer(model, tmp_path, url, "reload")
        sent = []
        for version in range(3):
            published = trainer.publish(version)
            assert published.version == version
            assert published.verified.canary_max is not None, "the proof is the same"
            sent.append(published.num_bytes)
        assert not list(cache.rglob("*.safetensors")), "deleted when they are loaded"
    assert not list(cache.glob("*")), "and the engine's folder with it"
    if trainer.policy.dtype == torch.bfloat16:
        assert sent[1] < 0.3 * sent[0], "what changed since the version that it has"
        assert sent[2] < 0.3 * sent[0]
    else:
        assert sent[0] == sent[1] == sent[2]


def test_an_engine_without_the_version_before_is_sent_all_weights(model, tmp_path):
    with engine_elsewhere(model, tmp_path) as url:
        trainer = Trainer(model, tmp_path, url, "reload")
        whole = trainer.publish(0).num_bytes
        trainer.publish(1)
    with engine_elsewhere(model, tmp_path) as url:  # one that was started again, elsewhere
        trainer.sync._engine = trainer.sync._verifier._engine = EngineLink(url, 60.0)
        published = trainer.publish(2)
        assert (published.version, published.num_bytes) == (2, whole)


def test_adapters_reach_an_engine_that_sees_no_folder_of_the_trainer(model, tmp_path, cache):
    with engine_elsewhere(model, tmp_path, enable_lora=True, max_lora_rank=4) as url:
        trainer = Trainer(model, tmp_path, url, "lora_only")
        for version in range(3):
            published = trainer.publish(version)
            assert published.version == version
            assert published.verified.canary_max is not None
            assert published.num_bytes > 1000
        assert not list(cache.rglob("*.safetensors"))


def test_a_delta_that_does_not_fit_is_followed_by_all_weights(model, tmp_path, monkeypatch):
    """The engine says that it has the version before, and its weights are others."""
    with engine_elsewhere(model, tmp_path) as url:
        trainer = Trainer(model, tmp_path, url, "reload")
        whole = trainer.publish(0).num_bytes
        real = write_delta
        monkeypatch.setattr(
            "treadle.sync.version_files.write_delta", lambda old, new, target, base: real(old, new, target, base + 5)
        )
        assert trainer.publish(1).num_bytes == whole


def test_a_transfer_ends_at_its_deadline(model, tmp_path):
    folder, _ = model
    with engine_elsewhere(model, tmp_path) as url, pytest.raises(SyncError, match=r"was not sent to .* in time: 0 of"):
        send_files(EngineLink(url, 60.0), [folder / "model.safetensors"], awake_s() - 1.0)
