"""The engine process: waits reported to the watchdog, and the bridge file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.api.app import access_of, app_of
from treadle.engines.interface import EngineState
from treadle.engines.model_runner import TransformersEngine
from treadle.engines.server import EngineEye, share_if_switched_on
from treadle.engines.transformers_engine import TransformersServer
from treadle.sync.bridge_file import read_bridge_file
from treadle.sync.loading import telling_of_weights
from treadle.watch.waits import Waits


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def state(**more: object) -> EngineState:
    values = {
        "policy_version": 3,
        "is_held": False,
        "num_running": 0,
        "num_waiting": 0,
        "generated_tokens": 0,
        "num_moves": 0,
    }
    return EngineState(**{**values, "generating_s": 0.0, **more})  # type: ignore[arg-type]


def test_a_held_engine_waits_for_the_trainer_until_it_is_let_go() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    eye = EngineEye(waits, 300.0)
    eye.see(state(is_held=True, num_running=5, num_waiting=2))
    clock.now_s = 301
    eye.see(state(is_held=True, num_running=5, num_waiting=9))
    (wait,) = waits.now
    assert (wait.wanted.of, wait.wanted.holding) == ("trainer", "5 requests that run and 2 that wait")
    assert (wait.seconds, wait.is_late) == (301, True)
    assert eye.about().state == "held"
    eye.see(state())
    assert waits.now == []
    assert eye.about().state == "idle"


def test_a_model_that_gets_on_is_not_late() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    eye = EngineEye(waits, 300.0)
    for tokens in (0, 10, 20, 20):
        eye.see(state(num_running=4, num_moves=tokens))
        clock.now_s += 200
    (wait,) = waits.now
    assert wait.seconds == 400, "since it last got on"
    assert wait.is_late
    assert eye.about().state == "generating 4, 0 waiting"


def test_before_the_model_is_there_it_is_loading() -> None:
    assert EngineEye(Waits(), 300.0).about().state == "loading"


def test_a_model_that_loads_tells_how_far_it_has_come_until_it_serves(tmp_path) -> None:
    folder = write_tiny_model(tmp_path)
    eye = EngineEye(Waits(), 300.0)
    told: list[tuple[int, int]] = []

    def tell(what: str, done: int, total: int) -> None:
        eye.loads(what, done, total)
        work = eye.about().work
        assert work is not None
        assert work.what == "loading weights"
        told.append((work.done, work.total))

    assert eye.about().work is None
    with report_loading(tell):
        engine = TransformersEngine(EngineConfig(dtype="float32", threads=1), folder)
    total = len(engine.weights)
    assert told == [(done, total) for done in range(total + 1)]
    eye.see(state())
    assert eye.about().work is None
    TransformersEngine(EngineConfig(dtype="float32", threads=1), folder)
    assert len(told) == total + 1  # nobody listens any more


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


def test_it_is_there_while_the_engine_serves_and_tells_of_the_newest_weights(config, tmp_path):
    file = tmp_path / "logs" / "vllm_bridge_config.json"
    engine = TransformersServer(config, Path(config.model))
    app = app_of(engine, config, access_of(config, {}), bridge_file=file)
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


def test_atropos_switch_shares_weights_through_a_file_of_the_engines_own(config):
    plain = config.model_copy(update={"weights_file": None})
    assert share_if_switched_on(plain, {}).weights_file is None
    assert share_if_switched_on(plain, {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}).weights_file is None
    switched_on = share_if_switched_on(plain, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"})
    assert switched_on.weights_file.name.endswith(".weights")
    assert share_if_switched_on(config, {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}) == config
