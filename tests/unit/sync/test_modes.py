"""Every mode against an engine that really loads what is published: it must end with the trainer's weights."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import RELOAD_S, Faults, SmallEngine, serving
from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.sync.modes import SYNC_MODES, choose_sync
from treadle.sync.protocol import choose_folder
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import build_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


class Trainer:
    """What the training loop does around a publish, with random gradients."""

    def __init__(self, folder, tmp_path, url, **settings):
        plain = {
            "model": str(folder), "save_path": tmp_path / "saved", "device": "cpu", "lr": 1e-2,
            "warmup_steps": 0, "engine_url": url, "steps": 6, "publish_timeout_s": 20.0,
        }  # fmt: skip
        self.config = TrainConfig(**(plain | settings))
        self.sync = choose_sync(self.config)
        self.policy = build_policy(self.sync.attach(), self.config)
        self.optimizer = build_optimizer(self.policy, self.config)
        self.receipts = []

    def step(self, version):
        for gradient in self.optimizer.gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(version)))
        self.optimizer.step(version)

    def publish(self, version):
        self.receipts.append(self.sync.publish(self.policy, version))
        return self.receipts[-1]

    def run(self, first=0, last=6):
        for version in range(first, last + 1):
            if version:
                self.step(version)
            self.publish(version)


OTHER_MACHINE = "127.0.0.2"
MODES = {
    "single copy": {},
    "two copies": {"use_shared_memory": True},
    "two copies, adapters": {"use_shared_memory": True, "lora": True},
    "two copies, gloo": {"use_shared_memory": True, "broadcast_by": "gloo"},
    "two copies, gloo, adapters": {"use_shared_memory": True, "broadcast_by": "gloo", "lora": True},
    "one copy asked for, two epochs": {"epochs": 2},
    "lora_only": {"weight_bridge_mode": "lora_only"},
    "lora_only, dropout": {"weight_bridge_mode": "lora_only", "lora_dropout": 0.3},
    "lora_restart": {"weight_bridge_mode": "lora_restart"},
    "none": {"weight_bridge_mode": "none"},
    "none, adapters": {"weight_bridge_mode": "none", "lora": True},
    "reload": {"weight_bridge_mode": "reload"},
    "reload, adapters": {"weight_bridge_mode": "reload", "lora": True},
    "delta": {"weight_bridge_mode": "delta", "train_layer_indices": "1"},
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_engine_gets_the_trainers_weights_and_each_publish_is_verified(folder, tmp_path, settings):
    shares = settings.get("weight_bridge_mode", "shared_vllm") == "shared_vllm"
    engine = SmallEngine(folder, weights_file=tmp_path / "shared.weights" if shares else None)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, **settings)
        trainer.run()
    assert engine.version == trainer.receipts[-1].version == 6
    served = dict(engine.served.named_parameters())
    for name, weight in trainer.policy.served_weights():
        torch.testing.assert_close(served[name].detach(), weight, atol=1e-6, rtol=0)
    original = SmallEngine(folder).base
    assert any(not torch.equal(p, served[n]) for n, p in original.named_parameters())
    canaries = [r.verified.canary_max for r in trainer.receipts if r.verified.canary_max is not None]
    assert canaries
    assert max(canaries) < 1e-4
    assert all(r.metrics()["perf/weight_sync_verify_s"] >= 0 for r in trainer.receipts)


def test_every_mode_of_the_settings_is_there():
    choices = TrainConfig.model_fields["weight_bridge_mode"].annotation.__args__
    assert set(SYNC_MODES) == set(choices)


def test_one_copy_hands_over_nothing_and_two_hand_over_everything(folder, tmp_path):
    num_bytes = sum(p.nbytes for p in SmallEngine(folder).base.parameters())
    for settings, expected in (({}, 0), ({"use_shared_memory": True}, num_bytes)):
        with serving(SmallEngine(folder, weights_file=tmp_path / "shared.weights")) as url:
            trainer = Trainer(folder, tmp_path, url, **settings)
            assert trainer.publish(0).num_bytes == expected


def test_two_copies_leave_the_engine_alone_between_publishes(folder, tmp_path):
    engine = SmallEngine(folder, weights_file=tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, use_shared_memory=True, epochs=2)
        trainer.publish(0)
        before = {name: p.detach().clone() for name, p in engine.base.named_parameters()}
        trainer.step(1)
        trainer.policy.write_step()
        assert all(torch.equal(before[name], p) for name, p in engine.base.named_parameters())
        trainer.publish(1)
        assert any(not torch.equal(before[name], p) for name, p in engine.base.named_parameters())


def test_delta_sends_changes_and_everything_after_an_engine_restart(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, weight_bridge_mode="delta", train_layer_indices="1")
        trainer.run(last=2)
        whole, *parts = [r.num_bytes for r in trainer.receipts]
        assert all(part < 0.5 * whole for part in parts)
        engine._load(folder)
        engine.version = 0
        trainer.run(first=3, last=3)
        assert trainer.receipts[-1].num_bytes == whole
        assert engine.version == 3


def test_adapters_get_a_new_name_each_and_the_two_newest_stay(folder, tmp_path):
    engine = SmallEngine(folder)
    engine.adapters["by hand"] = None
    with serving(engine) as url:
        Trainer(folder, tmp_path, url, weight_bridge_mode="lora_only").run(last=4)
        Trainer(folder, tmp_path, url, weight_bridge_mode="lora_only").run(
            first=2, last=4
        )  # resumed: the same versions
    assert len(set(engine.names_used)) == 8
    assert list(engine.adapters) == ["by hand", *engine.names_used[-2:]]
    live = sorted(path.name for path in (tmp_path / "saved" / "live").iterdir())
    assert live == ["adapter_v3", "adapter_v4"]


def test_an_interval_publishes_every_nth_version_and_the_last(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, weight_bridge_mode="reload", vllm_restart_interval=4)
        trainer.run()
    assert [r.version for r in trainer.receipts] == [0, 0, 0, 0, 4, 4, 6]
    assert engine.calls.count("/reload_weights") == 3
    assert trainer.receipts[1].num_bytes == 0
    assert [trainer.receipts[i].hold_s for i in (3, 4)] == [0.0, RELOAD_S]


def test_the_trainer_goes_on_while_the_engine_restarts(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, weight_bridge_mode="none", vllm_restart_interval=1)
        trainer.publish(0)
        assert "/bridge/restart" not in engine.calls  # it has what training begins with
        engine.faults.hangs_in = "loading"
        trainer.step(1)
        assert trainer.publish(1).version == 0  # still: it returns although the engine goes on loading
        trainer.step(2)
        threading.Timer(0.5, lambda: setattr(engine.faults, "hangs_in", "")).start()
        receipt = trainer.publish(2)
        assert (receipt.version, engine.folder.name) == (1, "weights_v1")
        assert receipt.wait_s > 0.05
        trainer.step(6)
        assert trainer.publish(6).version == 6  # the last one waits for itself


def test_a_resumed_trainer_starts_from_its_model_not_the_engines(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, weight_bridge_mode="none", vllm_restart_interval=2)
        trainer.run(last=6)
        assert engine.folder.parent.name == "live"
        again = choose_sync(trainer.config).attach()
    assert again.folder == folder


@pytest.mark.parametrize(
    ("settings", "engine", "words"),
    [
        ({"model": "other"}, {}, "the engine serves the model .*, and the trainer is to train .*other"),
        ({"model": "owner/another-model"}, {}, "the engine serves the model .* is to train owner/another-model"),
        ({"model": "smollm2-135m-instruct"}, {}, "the engine serves the model .* is to train smollm2-135m-instruct"),
        ({"dtype": "bfloat16"}, {}, "the engine's weights are float32, not bfloat16"),
        ({"dtype": "bfloat16", "weight_bridge_mode": "shared_vllm"}, {}, "are float32, not bfloat16"),
        ({"weight_bridge_mode": "lora_only"}, {"has_lora": False}, "takes no adapters"),
        ({"weight_bridge_mode": "lora_only", "lora_r": 64}, {}, "rank 64 are over the engine's largest, 16"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_anything_is_loaded(folder, tmp_path, settings, engine, words):
    write_tiny_model(tmp_path / "other", seed=1)  # the same shapes
    if settings.get("model") == "other":
        settings = settings | {"model": str(tmp_path / "other")}
    with serving(SmallEngine(folder, weights_file=tmp_path / "shared.weights", **engine)) as url:
        with pytest.raises(ConfigError, match=words) as error:
            Trainer(folder, tmp_path, url, **({"weight_bridge_mode": "reload"} | settings))
        assert error.value.fix


def test_a_copy_of_the_served_model_is_the_same_model(folder, tmp_path):
    with serving(SmallEngine(folder)) as url:
        trainer = Trainer(shutil.copytree(folder, tmp_path / "copy"), tmp_path, url, weight_bridge_mode="reload")
        trainer.publish(0)


def test_the_trainers_folder_is_used_if_the_engines_folder_is_missing_here(folder):
    elsewhere = Path("/on/another/machine/tiny")
    config = TrainConfig(model=str(folder), weight_bridge_mode="reload")
    assert choose_folder(config, elsewhere) == folder
    restarts = config.model_copy(update={"weight_bridge_mode": "none"})
    with pytest.raises(ConfigError, match="the engine serves the model /on/another/machine/tiny"):
        choose_folder(restarts, elsewhere)


def test_an_engine_that_shares_no_memory_gets_a_broadcast_by_itself(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, use_shared_memory=True)
        trainer.run(last=2)
    assert engine.calls.count("/bridge/join") == 1
    assert engine.calls.count("/bridge/receive") == 3
    assert trainer.receipts[-1].num_bytes == sum(p.nbytes for p in engine.base.parameters())


def test_another_model_on_another_machine_is_refused_by_weight_names(folder, tmp_path, monkeypatch):
    """Folders say nothing there. Only 127.0.0.1 is taken for this machine, its other addresses are not."""
    monkeypatch.setenv("NO_PROXY", OTHER_MACHINE)
    other = write_tiny_model(tmp_path / "other", hidden_size=48, num_layers=2)
    engine = SmallEngine(folder)
    with serving(engine, OTHER_MACHINE) as elsewhere:
        Trainer(shutil.copytree(folder, tmp_path / "copy"), tmp_path, elsewhere, use_shared_memory=True).publish(0)
        trainer = Trainer(other, tmp_path, elsewhere, use_shared_memory=True)
        with pytest.raises(SyncError, match=r"model.embed_tokens.weight is \[\d+, 48\] at the trainer and \[\d+, 32\]"):
            trainer.publish(0)
        with pytest.raises(ConfigError, match="memory is shared on one"):
            Trainer(folder, tmp_path, elsewhere, use_shared_memory=True, broadcast_by="memory")
    assert not engine.is_paused


def test_an_engine_that_fails_in_the_middle_of_a_broadcast_stays_held(folder, tmp_path):
    engine = SmallEngine(folder, faults=Faults(fails_in="/bridge/receive"))
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, use_shared_memory=True)
        with pytest.raises(SyncError, match=r"failed in POST /bridge/receive \(500\): the card is gone"):
            trainer.publish(0)
        assert engine.is_paused
        engine.faults.fails_in = ""
        trainer.publish(0)  # it joins again and writes everything
    assert engine.calls.count("/bridge/join") == 2
    assert not engine.is_paused
