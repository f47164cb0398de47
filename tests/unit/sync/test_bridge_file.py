"""vllm_bridge_config.json: where it is written and looked for, what it holds, and which one a trainer takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import SmallEngine, serving
from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.sync.bridge_file import (
    FILE_NAME,
    find_bridge_file,
    place_to_write,
    read_bridge_file,
    remove_bridge_file,
    write_bridge_file,
)
from treadle.sync.modes import choose_sync
from treadle.sync.owner import Owner, this_process

HERE = Path("/here")
WEIGHTS = Path("/dev/shm/w")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture
def engine(folder, tmp_path):
    return SmallEngine(folder, weights_file=tmp_path / "shared.weights")


@pytest.fixture
def no_variables(monkeypatch, tmp_path):
    for name in ("VLLM_BRIDGE_CONFIG_PATH", "LOGDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def attach(folder, tmp_path, url, path):
    config = TrainConfig(model=str(folder), save_path=tmp_path / "saved", engine_url=url, vllm_config_path=path)
    return choose_sync(config).attach()


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, "/dev/shm/w.json"),
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, "/here/vllm_bridge_config.json"),
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": "/logs"}, "/logs/vllm_bridge_config.json"),
        ({"VLLM_BRIDGE_CONFIG_PATH": "/b.json", "LOGDIR": "/logs"}, "/b.json"),
    ],
)
def test_an_engine_writes_it_where_the_environment_says_and_else_beside_the_weights(env, place):
    assert place_to_write(WEIGHTS, env, HERE) == Path(place)


def test_auto_finds_it_where_an_engine_of_that_environment_writes_it(tmp_path):
    logs, here = tmp_path / "logs", tmp_path / "here"
    env = {"VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "b.json"), "LOGDIR": str(logs)}
    assert find_bridge_file(env, here) is None
    for place in (here / FILE_NAME, logs / FILE_NAME, tmp_path / "b.json"):  # each goes before the last
        place.parent.mkdir(exist_ok=True)
        place.write_text("{}")
        assert find_bridge_file(env, here) == place
    assert find_bridge_file({}, here) == here / FILE_NAME


def test_it_says_model_dtype_shapes_strides_and_process_and_is_private(engine, tmp_path):
    file = tmp_path / "folder" / FILE_NAME
    write_bridge_file(file, engine.layout)
    told = json.loads(file.read_text())
    assert (told["model"], told["dtype"]) == (str(engine.folder), "float32")
    assert (told["owner"]["pid"], told["owner"]["started"]) == (os.getpid(), this_process().started)
    expected = {name: (list(p.shape), list(p.stride())) for name, p in engine.base.named_parameters()}
    assert {p["name"]: (p["shape"], told["strides"][p["name"]]) for p in told["parameters"]} == expected
    assert file.stat().st_mode & 0o777 == 0o600
    assert [f.name for f in file.parent.iterdir()] == [FILE_NAME]
    assert read_bridge_file(file) == engine.layout


def test_a_file_that_was_changed_is_refused(engine, tmp_path):
    file = tmp_path / FILE_NAME
    write_bridge_file(file, engine.layout)
    file.write_text(file.read_text().replace('"offset":64', '"offset":128', 1).replace('"num_bytes":', '"num_bytes":1'))
    with pytest.raises(ConfigError, match="its checksum is another"):
        read_bridge_file(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="does not say where weights lie"):
        read_bridge_file(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_bridge_file(tmp_path / "none.json")


def test_an_engine_removes_its_own_file_and_no_other(engine, tmp_path):
    file = tmp_path / FILE_NAME
    other = msgspec.structs.replace(engine.layout, owner=Owner(pid=1, started=1))
    write_bridge_file(file, other)
    remove_bridge_file(file, engine.layout)
    assert file.exists()
    write_bridge_file(file, engine.layout)
    remove_bridge_file(file, engine.layout)
    assert not file.exists()


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return Owner(pid=process.pid, started=1)


@pytest.mark.parametrize("named", [True, False])
def test_a_file_of_an_earlier_process_is_refused_by_name(engine, folder, tmp_path, no_variables, named):
    file = Path.cwd() / FILE_NAME
    numbers_again = Owner(pid=os.getpid(), started=this_process().started - 1)  # given to another process
    with serving(engine) as url:
        for owner in (ended_process(), numbers_again):
            write_bridge_file(file, msgspec.structs.replace(engine.layout, owner=owner))
            with pytest.raises(
                SyncError, match=f"{FILE_NAME} was left by process {owner.pid}, which has ended"
            ) as error:
                attach(folder, tmp_path, url, file if named else Path("auto"))
            assert "delete the file" in error.value.fix


def test_a_file_is_checked_against_the_engine_and_so_is_what_the_engine_serves(engine, folder, tmp_path, no_variables):
    file = Path.cwd() / FILE_NAME
    write_bridge_file(file, engine.layout)
    engine.version, engine.is_paused = 4, True
    with serving(engine) as url:
        for path in (file, Path("auto"), None):
            attached = attach(folder, tmp_path, url, path)
            assert (attached.layout.policy_version, attached.layout.is_held) == (4, True)
        other = SmallEngine(folder, weights_file=tmp_path / "other.weights")
        write_bridge_file(file, other.layout)
        with pytest.raises(SyncError, match=r"names other weights than the engine at .* serves"):
            attach(folder, tmp_path, url, file)


def test_auto_asks_the_engine_where_there_is_no_file(engine, folder, tmp_path, no_variables):
    with serving(engine) as url:
        attached = attach(folder, tmp_path, url, Path("auto"))
    assert attached.layout == msgspec.structs.replace(engine.layout, policy_version=0)
    assert torch.float32.itemsize * attached.layout.parameters[0].num_elements <= attached.layout.num_bytes
