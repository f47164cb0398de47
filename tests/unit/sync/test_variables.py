"""NUM_INFERENCE_NODES, MASTER_ADDR and MASTER_PORT: what each does here, or a sentence that it does nothing."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.processes import free_port
from treadle.config import TrainConfig
from treadle.config.load import load_process
from treadle.errors import ConfigError
from treadle.sync.process_group import host_store
from treadle.sync.variables import group_place, num_engines_awaited, unused_variables

HUB = TrainConfig(engine_url="hub")
BROADCAST = TrainConfig(use_shared_memory=True, engine_url="http://10.0.0.9:9001")


@pytest.mark.parametrize(
    ("variables", "min_engines", "awaited"),
    [({}, 0, 1), ({"NUM_INFERENCE_NODES": "0"}, 0, 1), ({"NUM_INFERENCE_NODES": "3"}, 0, 3),
     ({"NUM_INFERENCE_NODES": "3"}, 2, 2)],
)  # fmt: skip
def test_training_waits_for_as_many_engines_as_there_are_nodes(variables, min_engines, awaited):
    assert num_engines_awaited(HUB.model_copy(update={"min_engines": min_engines}), variables) == awaited


def test_more_engines_than_are_named_are_never_waited_for():
    two = TrainConfig(engine_url="http://a:1 http://b:1")
    assert num_engines_awaited(two, {"NUM_INFERENCE_NODES": "2"}) == 2
    with pytest.raises(ConfigError, match=r"training waits for 3 engines .*--engine-url names 2"):
        num_engines_awaited(two, {"NUM_INFERENCE_NODES": "3"})


@pytest.mark.parametrize("value", ["many", "-1", "1.5", ""])
def test_a_number_of_nodes_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=r"NUM_INFERENCE_NODES is .* must be a whole number"):
        num_engines_awaited(HUB, {"NUM_INFERENCE_NODES": value})


def test_the_trainers_group_meets_at_master_addr_and_port():
    place = group_place(BROADCAST, {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "26756"})
    assert (place.host, place.port, place.note) == ("10.0.0.2", 26756, "")
    own = BROADCAST.model_copy(update={"broadcast_host": "trainer.lan"})
    assert group_place(own, {"MASTER_ADDR": "10.0.0.2"}).host == "trainer.lan", "a flag wins"
    ranks = group_place(BROADCAST, {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500", "WORLD_SIZE": "1"})
    assert (ranks.host, ranks.port) == ("", 0), "torchrun listens there"
    far = group_place(BROADCAST, {"MASTER_ADDR": "localhost"})
    assert far.host == ""
    assert "MASTER_ADDR localhost has no effect: the engine at http://10.0.0.9:9001" in far.note


def test_a_master_port_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="MASTER_PORT is 70000, and ports are 1 to 65535"):
        group_place(BROADCAST, {"MASTER_PORT": "70000"})


def test_the_store_listens_at_master_port_unless_it_is_in_use():
    port = free_port()
    assert host_store("127.0.0.1", 5.0, port).port == port
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert host_store("127.0.0.1", 5.0, taken).port not in (0, taken)


def test_what_has_no_effect_is_said_in_a_sentence():
    every = {"NUM_INFERENCE_NODES": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "26756"}
    nodes, group = unused_variables(TrainConfig(), every, 1)
    assert nodes.endswith("the one engine of --engine-url; for several give --engine-url URL URL, or hub")
    assert group.startswith("MASTER_ADDR and MASTER_PORT have no effect")
    assert unused_variables(HUB, {"NUM_INFERENCE_NODES": "2"}, 1) == []
    assert unused_variables(BROADCAST, {"MASTER_ADDR": "10.0.0.2"}, 1) == []
    assert unused_variables(TrainConfig(), {"MASTER_ADDR": "10.0.0.2"}, 2) == [], "it is that of the ranks"


def test_atropos_spelling_is_the_same_setting(tmp_path):
    (tmp_path / "train.toml").write_text('[train]\nnum_inference_nodes = 2\nengine_url = "hub"\n')
    assert load_process(tmp_path / "train.toml", {}, "train").train.min_engines == 2
