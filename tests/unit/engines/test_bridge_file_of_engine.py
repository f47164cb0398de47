"""The bridge file of an engine: there while it serves, new after a restart, gone afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.server import share_if_switched_on
from treadle.engines.surface.app import access_of, app_of
from treadle.engines.transformers_server import TransformersServer
from treadle.sync.shared_memory import read_bridge_file


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
