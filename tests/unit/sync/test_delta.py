"""Mode delta in 16 bits: only changed elements are sent, or everything if the engine's state is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import SmallEngine, serving
from tests.unit.sync.test_modes import Trainer
from treadle.engines.weight_updates import read_weights, write_weights
from treadle.errors import SyncError
from treadle.sync.delta import DELTA_FROM
from treadle.sync.modes import KnownWeights
from treadle.wire.bridge import Updated

SMALL_PART = {torch.bfloat16: 0.25, torch.float16: 0.75}  # float16 has three more bits for a step to change


class ReloadingEngine(SmallEngine):
    """Loads weights like Treadle's engines."""

    def reload_weights(self, body):
        own = dict(self.base.named_parameters(remove_duplicate=False))
        write_weights(read_weights(Path(body["path"]), own, self.version), own)
        self._serve_version(body["policy_version"])
        return Updated(status="ok", policy_version=self.version, seconds=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def engine(request, folder):
    return ReloadingEngine(folder, dtype=request.param)


def assert_has_the_weights_of(engine, trainer):
    served = dict(engine.base.named_parameters())
    for name, weight in trainer.policy.served_weights():
        assert torch.equal(served[name].view(torch.int16), weight.view(torch.int16)), name


def delta_trainer(folder, tmp_path, url, **settings):
    return Trainer(folder, tmp_path, url, **({"weight_bridge_mode": "delta", "lr": 1e-6} | settings))


def test_a_small_step_sends_a_small_part_of_nearly_all_weights(engine, folder, tmp_path):
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url)
        trainer.run(last=4)
        assert_has_the_weights_of(engine, trainer)
    whole, *parts = [receipt.num_bytes for receipt in trainer.receipts]
    assert all(part < SMALL_PART[engine.dtype] * whole for part in parts)
    with safe_open(tmp_path / "saved" / "live" / "weights_v4" / "model.safetensors", framework="pt") as file:
        assert file.metadata()[DELTA_FROM] == "3"
        num_changed = len({name.partition("#")[0] for name in file.keys()})  # noqa: SIM118
    assert num_changed > 0.5 * len(trainer.policy.weights)


def test_a_large_step_sends_weights_whole(engine, folder, tmp_path):
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url, lr=1e-2)
        trainer.run(last=2)
        assert_has_the_weights_of(engine, trainer)
    whole, *parts = [receipt.num_bytes for receipt in trainer.receipts]
    assert all(part <= 1.01 * whole for part in parts)


def test_a_version_that_changed_nothing_is_published_in_a_few_bytes(engine, folder, tmp_path):
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url)
        trainer.publish(0)
        assert trainer.publish(1).num_bytes < 200
        assert engine.version == 1
        trainer.run(first=2, last=2)
        assert_has_the_weights_of(engine, trainer)


def test_adapters_arrive_merged(folder, tmp_path):
    engine = ReloadingEngine(folder, dtype=torch.bfloat16)
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url, lora=True, lr=1e-4)
        trainer.run(last=3)
        assert_has_the_weights_of(engine, trainer)
    served = [(name, tuple(weight.shape)) for name, weight in trainer.policy.served_weights()]
    assert trainer.policy.served_shapes() == served
    whole, *parts = [receipt.num_bytes for receipt in trainer.receipts]
    assert all(part < whole for part in parts)


def test_an_engine_that_was_restarted_gets_everything(engine, folder, tmp_path):
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url)
        trainer.run(last=2)
        engine._load(folder)
        engine.version = 0
        trainer.run(first=3, last=4)
        assert_has_the_weights_of(engine, trainer)
    whole, *_, after_restart, last = [receipt.num_bytes for receipt in trainer.receipts]
    assert after_restart == whole
    assert last < whole


@pytest.mark.parametrize("route", ["/reload_weights", "/bridge/fingerprints"], ids=["before", "after"])
def test_after_a_failed_publish_everything_is_sent(folder, tmp_path, route):
    engine = ReloadingEngine(folder, dtype=torch.bfloat16)
    with serving(engine) as url:
        trainer = delta_trainer(folder, tmp_path, url)
        trainer.run(last=1)
        trainer.sync.settle()
        engine.faults.fails_in = route
        with pytest.raises(SyncError, match="the card is gone"):
            trainer.run(first=2, last=3)
        assert engine.version == (1 if route == "/reload_weights" else 2)
        engine.faults.fails_in = ""
        trainer.run(first=4, last=5)
        assert_has_the_weights_of(engine, trainer)
    whole, *_, after_failure, last = [receipt.num_bytes for receipt in trainer.receipts]
    assert after_failure == whole
    assert last < whole


def test_changed_32_bit_weights_are_sent_whole_without_a_copy():
    weights = {"a": torch.randn(8, 8), "b": torch.randn(8, 8), "half": torch.zeros(8, 8).half()}
    known = KnownWeights(weights.items())
    weights["a"].view(-1)[3] += 1
    weights["half"].view(-1)[5] += 1
    sent = known.advance(weights.items())
    assert sorted(sent) == ["a", "half"]
    assert torch.equal(sent["a"], weights["a"])
    assert sent["half"].indices.tolist() == [5]
    assert known.advance(weights.items()) == {}
    assert list(known._copies) == ["half"]
