"""The engine process: waits reported to the watchdog, and the bridge file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.api import create_app, engine_access
from treadle.engines.interface import ServingStatus
from treadle.engines.model_runner import ModelRunner
from treadle.engines.server import EngineWatcher, apply_shared_weights_switch
from treadle.engines.transformers_engine import TransformersEngine
from treadle.loading import report_loading
from treadle.sync.shared_memory import read_bridge_file
from treadle.watch.waits import Waits


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def state(**more: object) -> ServingStatus:
    values = {
        "policy_version": 3,
        "is_held": False,
        "num_running": 0,
        "num_waiting": 0,
        "generated_tokens": 0,
        "progress_count": 0,
    }
    return ServingStatus(**{**values, "generating_s": 0.0, **more})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _late_after_five_minutes(monkeypatch):
    monkeypatch.setattr("treadle.engines.server.NO_PROGRESS_S", 300.0)


def test_a_held_engine_waits_for_the_trainer_until_released() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    watcher = EngineWatcher(waits)
    watcher.update(state(is_held=True, num_running=5, num_waiting=2))
    clock.now_s = 301
    watcher.update(state(is_held=True, num_running=5, num_waiting=9))
    (wait,) = waits.now
    assert (wait.wanted.of, wait.wanted.holding) == ("trainer", "5 running and 2 waiting requests")
    assert (wait.seconds, wait.is_late) == (301, True)
    assert watcher.about().state == "held"
    watcher.update(state())
    assert waits.now == []
    assert watcher.about().state == "idle"


def test_an_engine_that_makes_progress_is_not_late() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    watcher = EngineWatcher(waits)
    for tokens in (0, 10, 20, 20):
        watcher.update(state(num_running=4, progress_count=tokens))
        clock.now_s += 200
    (wait,) = waits.now
    assert wait.seconds == 400, "since it last got on"
    assert wait.is_late
    assert watcher.about().state == "generating 4, 0 waiting"


def test_an_engine_that_only_queues_requests_is_late() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    watcher = EngineWatcher(waits)
    watcher.update(state(num_waiting=4))
    clock.now_s = 301
    assert [wait.is_late for wait in waits.now] == [True]
    assert watcher.about().state == "generating 0, 4 waiting"


def test_the_state_is_loading_before_the_first_status() -> None:
    assert EngineWatcher(Waits()).about().state == "loading"


def test_loading_progress_is_reported_until_the_engine_serves(tmp_path) -> None:
    folder = write_tiny_model(tmp_path)
    watcher = EngineWatcher(Waits())
    progress: list[tuple[int, int]] = []

    def tell(what: str, done: int, total: int) -> None:
        watcher.on_load_progress(what, done, total)
        work = watcher.about().work
        assert work is not None
        assert work.what == "loading weights"
        progress.append((work.done, work.total))

    assert watcher.about().work is None
    with report_loading(tell):
        engine = ModelRunner(EngineConfig(dtype="float32", threads=1), folder)
    total = len(engine.weights)
    assert progress == [(done, total) for done in range(total + 1)]
    watcher.update(state())
    assert watcher.about().work is None
    ModelRunner(EngineConfig(dtype="float32", threads=1), folder)
    assert len(progress) == total + 1  # nobody listens any more


@pytest.fixture
def config(tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        device="cpu",
        weights_file=tmp_path / "shared.weights",
        adapter_root=tmp_path,
    )


def test_the_bridge_file_exists_while_serving_and_follows_restarts(config, tmp_path):
    file = tmp_path / "logs" / "vllm_bridge_config.json"
    engine = TransformersEngine(config, Path(config.model))
    app = create_app(engine, config, engine_access(config, {}), bridge_file=file)
    other = write_tiny_model(tmp_path / "other", hidden_size=64, num_layers=1)
    with TestClient(app, base_url="http://127.0.0.1:9001", client=("127.0.0.1", 5000)) as client:
        assert read_bridge_file(file) == asyncio.run(engine.layout())
        assert read_bridge_file(file).model == config.model
        answer = client.post("/bridge/restart", json={"model_path": str(other), "policy_version": 3})
        assert answer.status_code == 200, answer.text
        assert read_bridge_file(file) == asyncio.run(engine.layout())
        assert read_bridge_file(file).model == str(other)
    assert not file.exists()
    asyncio.run(engine.close())


def test_the_atropos_switch_shares_weights_in_a_generated_file(config):
    plain = config.model_copy(update={"weights_file": None})
    assert apply_shared_weights_switch(plain, {}).weights_file is None
    assert apply_shared_weights_switch(plain, {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}).weights_file is None
    switched_on = apply_shared_weights_switch(plain, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"})
    assert switched_on.weights_file.name.endswith(".weights")
    assert apply_shared_weights_switch(config, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}) == config
