"""An engine that joins a run takes the settings of the run's engines, and is reachable for the others."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.hub_process import HubProcess
from treadle.config import EngineConfig
from treadle.engines import joining
from treadle.engines.joining import own_url, with_settings_of_run
from treadle.errors import ConfigError, HubError
from treadle.hub.observer_routes import TABLE_AGE_S
from treadle.wire.engines import EngineEntry, Engines, ServedEngine
from treadle.wire.hub import ProcessReport


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with HubProcess(tmp_path_factory.mktemp("hub")) as running:
        yield running


def report(hub: HubProcess, model: Path) -> None:
    served = ServedEngine(
        engine_id="a", url="http://127.0.0.1:9", model=str(model), dtype="float32", has_lora=True, max_lora_rank=16,
        max_model_len=77, max_num_seqs=33, adapter_root="/runs",
    )  # fmt: skip
    body = msgspec.json.encode(ProcessReport(kind="engine", name="engine", machine="m", pid=1, serves=served))
    answer = httpx.post(f"{hub.url}/v1/reports", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    time.sleep(TABLE_AGE_S)  # until the table is made again


def test_settings_that_are_not_given_are_those_of_the_run(hub, tmp_path):
    report(hub, tmp_path)
    config = with_settings_of_run(EngineConfig(join=hub.url, port=9010, max_num_seqs=8))
    assert (config.model, config.dtype, config.max_model_len) == (str(tmp_path), "float32", 77)
    assert (config.enable_lora, config.max_lora_rank, config.adapter_root) == (True, 16, Path("/runs"))
    assert config.max_num_seqs == 8, "as it was given"
    assert (config.hub_url, config.name) == (hub.url, "engine at 127.0.0.1:9010")


def test_settings_are_copied_from_an_engine_that_serves(tmp_path, monkeypatch):
    def row(name, state, dtype):
        served = ServedEngine(engine_id=name, url="http://127.0.0.1:9", model=str(tmp_path), dtype=dtype)
        return EngineEntry(engine_id=name, name=name, url=served.url, state=state, served=served)

    listed = [row("a", "out", "bfloat16"), row("b", "joining", "float16"), row("c", "serving", "float32")]
    monkeypatch.setattr(joining, "fetch_table", lambda _: Engines(engines=listed))
    assert with_settings_of_run(EngineConfig(join="http://127.0.0.1:8000")).dtype == "float32"


def test_without_another_engine_the_model_must_be_given(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "fetch_table", lambda _: Engines(engines=[]))
    with pytest.raises(ConfigError, match="no engine reports to the hub") as refused:
        with_settings_of_run(EngineConfig(join="http://127.0.0.1:8000"))
    assert "--model" in refused.value.fix
    given = EngineConfig(join="http://127.0.0.1:8000", model=str(tmp_path))
    assert with_settings_of_run(given).model == str(tmp_path)


def test_a_model_that_is_not_on_this_machine_is_refused(hub, tmp_path):
    report(hub, tmp_path / "absent")
    with pytest.raises(ConfigError, match="no such folder on this machine"):
        with_settings_of_run(EngineConfig(join=hub.url))


def test_an_engine_that_only_this_machine_reaches_joins_no_run_elsewhere():
    with pytest.raises(ConfigError, match="only this machine reaches") as refused:
        with_settings_of_run(EngineConfig(join="http://192.0.2.7:8000"))
    assert "--host 0.0.0.0" in refused.value.fix


def test_an_engine_on_all_addresses_names_one_that_the_hub_can_reach():
    everywhere = EngineConfig(join="http://127.0.0.1:8000", host="0.0.0.0", port=9010)
    assert own_url(everywhere) == "http://127.0.0.1:9010"


def test_a_hub_that_does_not_answer_is_named():
    with pytest.raises(HubError, match=r"the hub at http://127\.0\.0\.1:9 does not answer"):
        with_settings_of_run(EngineConfig(join="http://127.0.0.1:9"))
