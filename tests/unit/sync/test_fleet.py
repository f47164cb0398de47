"""Several engines: those that prove a version serve it; the others are out, and come back by the same proof."""

from __future__ import annotations

import time
from contextlib import ExitStack

import httpx
import pytest
import torch

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import Faults, SmallEngine, serving
from treadle.config import TrainConfig
from treadle.config.load import load_run
from treadle.errors import ConfigError, SyncError
from treadle.sync import fleet
from treadle.sync.modes import choose_sync
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import build_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture
def hub(tmp_path):
    """Of each test its own: a trainer posts its verdicts until its process ends."""
    with HubProcess(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fleet, "TEND_EVERY_S", 0.05)
    monkeypatch.setattr(fleet, "FIRST_RETRY_S", 0.05)


class Trainer:
    def __init__(self, folder, tmp_path, hub, urls, **settings):
        plain = {
            "model": str(folder), "save_path": tmp_path / "saved", "device": "cpu", "lr": 1e-2, "warmup_steps": 0,
            "hub_url": hub.url, "engine_url": tuple(urls), "steps": 6, "weight_bridge_mode": "reload",
        }  # fmt: skip
        self.config = TrainConfig(**(plain | settings))
        self.sync = choose_sync(self.config)
        self.policy = build_policy(self.sync.attach(), self.config)
        self.optimizer = build_optimizer(self.policy, self.config)

    def publish(self, version):
        if version:
            for gradient in self.optimizer.gradients.values():
                gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(version)))
            self.optimizer.step(version)
        return self.sync.publish(self.policy, version)


def table(hub):
    """{URL: (state, proved version)} as environments read it."""
    rows = httpx.get(f"{hub.url}/v1/engines").json()["engines"]
    return {row["url"]: (row["state"], row["proved_version"]) for row in rows}


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_weights_of(engine, trainer):
    served = dict(engine.served.named_parameters())
    return all(torch.allclose(served[name], weight, atol=1e-6) for name, weight in trainer.policy.served_weights())


@pytest.mark.parametrize("mode", ["reload", "lora_only"])
def test_each_engine_gets_every_version_and_proves_it(folder, tmp_path, hub, mode):
    engines = [SmallEngine(folder) for _ in range(3)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(engine)) for engine in engines]
        trainer = Trainer(folder, tmp_path, hub, urls, weight_bridge_mode=mode)
        assert table(hub) == {}, "nothing serves before it has proved a version"
        for version in range(3):
            assert trainer.publish(version).verified.canary_max < 1e-4
            wait_for(lambda version=version: table(hub) == dict.fromkeys(urls, ("serving", version)))
    assert all(has_weights_of(engine, trainer) for engine in engines)
    assert all(engine.calls.count("/generate") >= 6 for engine in engines), "a canary at every version"


def test_an_engine_with_wrong_weights_is_out_and_the_others_serve(folder, tmp_path, hub):
    good, bad = SmallEngine(folder), SmallEngine(folder)
    with serving(good) as good_url, serving(bad) as bad_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, bad_url])
        trainer.publish(0)
        bad.faults = Faults(skips="mlp.up_proj.weight")
        trainer.publish(1)
        assert table(hub) == {good_url: ("serving", 1), bad_url: ("out", 0)}
        (reason,) = [row["reason"] for row in httpx.get(f"{hub.url}/v1/engines").json()["engines"] if row["reason"]]
        assert "up_proj" in reason
        bad.faults = Faults()
        wait_for(lambda: table(hub)[bad_url] == ("serving", 1))


def test_an_engine_that_hangs_is_out_at_the_deadline(folder, tmp_path, hub):
    good, slow = SmallEngine(folder), SmallEngine(folder)
    with serving(good) as good_url, serving(slow) as slow_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, slow_url], publish_timeout_s=2.0)
        trainer.publish(0)
        slow.faults.hangs_in = "/reload_weights"
        began = time.monotonic()
        trainer.publish(1)
        assert 1.5 < time.monotonic() - began < 6
        assert table(hub)[good_url] == ("serving", 1)
        assert table(hub)[slow_url][0] == "out"
        began = time.monotonic()
        trainer.publish(2)
        assert time.monotonic() - began < 1.5, "one that is out holds nobody"
        slow.faults.hangs_in = ""
        wait_for(lambda: table(hub)[slow_url] == ("serving", 2))
        assert has_weights_of(slow, trainer)


def test_an_engine_that_returns_proves_the_present_version_first(folder, tmp_path, hub):
    stays, port = SmallEngine(folder), free_port()
    with serving(stays) as url, ExitStack() as stack:
        leaving = stack.enter_context(ExitStack())
        other = leaving.enter_context(serving(SmallEngine(folder), port=port))
        trainer = Trainer(folder, tmp_path, hub, [url, other])
        trainer.publish(0)
        leaving.close()  # it dies
        trainer.publish(1)
        assert table(hub)[other][0] == "out"
        returned = SmallEngine(folder)
        stack.enter_context(serving(returned, port=port))
        wait_for(lambda: table(hub).get(other) == ("serving", 1))
        assert has_weights_of(returned, trainer), "it got them between two publishes"


def test_a_publish_waits_for_an_engine_when_there_is_none(folder, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(fleet, "LOADING_S", 1.0)
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with serving(SmallEngine(folder), port=ports[0]):
        trainer = Trainer(folder, tmp_path, hub, urls, publish_timeout_s=1.0)
        trainer.publish(0)
    with pytest.raises(SyncError, match="no engine has proved version 1 within"):
        trainer.publish(1)
    monkeypatch.setattr(fleet, "LOADING_S", 60.0)
    engine = SmallEngine(folder)
    with serving(engine, port=ports[1]):
        assert trainer.publish(2).version == 2
        assert engine.version == 2


def test_an_engine_of_another_number_format_does_not_serve(folder, tmp_path, hub):
    good, other = SmallEngine(folder), SmallEngine(folder, dtype=torch.bfloat16)
    with serving(good) as good_url, serving(other) as other_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, other_url], dtype="float32")
        trainer.publish(0)
        assert table(hub)[good_url] == ("serving", 0)
        assert table(hub)[other_url] == ("out", None)
        assert "/reload_weights" not in other.calls


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train.weight_bridge_mode": "shared_vllm"}, "publishes to one engine"),
        ({"train.weight_bridge_mode": "lora_only", "train.single_copy": "true"}, "single_copy is for one engine"),
        ({"train.weight_bridge_mode": "reload", "train.verify_publish": "off"}, "verify_publish is off"),
    ],
)
def test_settings_that_several_engines_cannot_have_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        load_run(None, {"train.engine_url": "http://a:1 http://b:1", **settings})
