"""A run on several machines: settings, places and addresses of its processes. Pure."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from treadle.config import load_run
from treadle.config.values import explicit_keys, with_values
from treadle.errors import ConfigError
from treadle.launch.machine import MachineFacts
from treadle.launch.machines import Machine, facts_on, names_by_machine, place_processes, settings_for
from treadle.launch.placement import LocalPlacement
from treadle.launch.places import RunPlaces, on_machines
from treadle.launch.preflight import read_tokens
from treadle.launch.process_plan import RunPlan, build_plan, engines_of_machine
from treadle.launch.process_spec import NO_TOKENS, AccessTokens

HOSTS = tuple(Machine(f"n{number}", f"10.0.0.{number}") for number in (1, 2, 3))
PORTS = {"hub": 8000, "engine": 9001, "engine-1": 9002, "engine-2": 9003, "router": 9000}
FACTS = MachineFacts(8, has_shared_memory=True, ports=PORTS, environment={"HOME": "/home/ada"})


def plan_on(machines: tuple[Machine, ...], flags: dict[str, object], tokens: AccessTokens = NO_TOKENS) -> RunPlan:
    config = load_run(None, flags)
    explicit = explicit_keys(config)
    settings = settings_for(config, explicit, machines)
    config = with_values(config, settings)
    facts = facts_on(FACTS, config, machines)
    plan = build_plan(
        config, facts, tokens=tokens, run_folder=Path("/runs/one"), model_folder="/cache/smol",
        is_model_local=True, explicit=explicit | settings.keys(),
    )  # fmt: skip
    processes = place_processes(plan.processes, machines, engines_of_machine(plan.config, facts))
    return RunPlan(plan.config, plan.run_folder, processes, plan.hub_url)


def test_one_machine_has_the_plan_of_a_run_without_a_scheduler() -> None:
    flags = {"train.ranks": "2", "engine.dtype": "float32"}
    placed = plan_on(HOSTS[:1], flags)
    alone = build_plan(
        load_run(None, flags), FACTS, run_folder=Path("/runs/one"), model_folder="/cache/smol", is_model_local=True
    )
    assert placed.config == alone.config
    assert placed.processes == alone.processes


def test_the_engine_has_the_first_machine_and_ranks_the_others() -> None:
    plan = plan_on(HOSTS, {"cluster.nodes": "3", "cluster.gpus_per_node": "2", "env": "arithmetic:0.5,tools:0.5"})
    assert names_by_machine(plan.processes, 3) == [
        "hub, engine", "env-arithmetic, trainer, trainer-1", "env-tools, trainer-2, trainer-3",
    ]  # fmt: skip
    assert plan.config.train.ranks == 4
    assert plan.config.engine.gpus == (0,)
    assert plan.config.train.gpus is None  # each rank takes the one of its local number
    assert (plan.config.train.use_shared_memory, plan.config.train.broadcast_by) == (True, "nccl")


def flags_of(plan: RunPlan, name: str) -> dict[str, str]:
    (argv,) = (spec.argv for spec in plan.processes if spec.name == name)
    return {flag: value for flag, value in itertools.pairwise(argv) if flag.startswith("--")}


def test_several_engines_fill_the_first_machines_by_their_gpus() -> None:
    flags = {"cluster.nodes": "3", "cluster.gpus_per_node": "4", "engines": "3", "engine.tensor_parallel_size": "2"}
    plan = plan_on(HOSTS, flags)
    assert names_by_machine(plan.processes, 3) == [
        "hub, engine, engine-1", "engine-2", "env, trainer, trainer-1, trainer-2, trainer-3",
    ]  # fmt: skip
    own = [flags_of(plan, name) for name in ("engine", "engine-1", "engine-2")]
    assert [(flags["--port"], flags["--gpus"], flags.get("--host")) for flags in own] == [
        ("9001", "0,1", None), ("9002", "2,3", None), ("9003", "0,1", "10.0.0.2"),
    ]  # fmt: skip
    urls = [spec.ready_url for spec in plan.processes if spec.kind == "engine"]
    assert urls == ["http://10.0.0.1:9001/health", "http://10.0.0.1:9002/health", "http://10.0.0.2:9003/health"]
    assert {spec.env["MASTER_ADDR"] for spec in plan.processes if spec.kind == "trainer"} == {"10.0.0.3"}
    assert (plan.config.train.weight_bridge_mode, plan.config.engine.gpus) == ("reload", (0, 1, 2, 3))


def test_without_gpus_each_of_several_engines_has_a_machine() -> None:
    plan = plan_on(
        HOSTS, {"cluster.nodes": "3", "engines": "2", "router.kind": "smg"}, AccessTokens("h" * 32, engine="e" * 32)
    )
    assert names_by_machine(plan.processes, 3) == ["hub, engine, router", "engine-1", "env, trainer"]
    assert plan.config.engine.threads == FACTS.num_cores
    assert "--gpus" not in flags_of(plan, "engine-1")
    assert plan.config.openai.router_url == "http://10.0.0.1:9000"


def test_without_engines_of_its_own_a_run_has_only_the_hub_on_machine_0() -> None:
    plan = plan_on(HOSTS, {"cluster.nodes": "3", "engines": "0"})
    assert names_by_machine(plan.processes, 3) == ["hub", "env, trainer", "trainer-1"]


def test_ranks_meet_at_the_machine_of_the_first_of_them() -> None:
    plan = plan_on(HOSTS, {"cluster.nodes": "3", "train.ranks": "4"})
    ranks = [spec.env for spec in plan.processes if spec.kind == "trainer"]
    assert [env["RANK"] for env in ranks] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in ranks] == ["0", "1", "0", "1"]
    assert {env["LOCAL_WORLD_SIZE"] for env in ranks} == {"2"}
    assert {env["MASTER_ADDR"] for env in ranks} == {"10.0.0.2"}
    assert not any("GLOO_SOCKET_IFNAME" in env for env in ranks)  # that of loopback


def test_servers_that_other_machines_call_ask_for_a_token() -> None:
    config = plan_on(HOSTS, {"cluster.nodes": "3", "output": "/data/runs"}).config
    assert (config.hub.host, config.engine.host) == ("10.0.0.1", "10.0.0.1")
    assert config.train.hub_url == "http://10.0.0.1:8000"
    assert config.train.engine_url == ("http://10.0.0.1:9001",)
    assert config.hub.token_file == Path("/data/runs/hub.token")
    assert config.engine.token_file == Path("/data/runs/engine.token")


@pytest.mark.parametrize("server", ["hub", "engine"])
def test_a_token_in_a_variable_takes_the_place_of_the_file(server: str) -> None:
    config = load_run(None, {"output": "/data/runs"})
    variables = {f"TREADLE_{server.upper()}_TOKEN": "a" * 32}
    settings = settings_for(config, frozenset(), HOSTS, environment=variables)
    files = {name: settings[f"{name}.token_file"] for name in ("hub", "engine")}
    assert files.pop(server) is None
    assert all(files.values())


def test_the_launcher_takes_tokens_from_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_HUB_TOKEN", "h" * 32)
    monkeypatch.setenv("TREADLE_ENGINE_TOKEN", "e" * 32)
    config, _ = on_machines(load_run(None, {"output": str(tmp_path)}), frozenset(), RunPlaces(HOSTS, LocalPlacement))
    tokens = read_tokens(config)
    assert (tokens.hub, tokens.engine) == ("h" * 32, "e" * 32)
    assert not list(tmp_path.iterdir())


def test_a_loopback_address_of_one_of_several_machines_is_refused() -> None:
    config = load_run(None, {})
    own = Machine("n0", "127.0.1.1")
    for machines in ((own, HOSTS[0]), (HOSTS[0], own)):
        with pytest.raises(ConfigError, match=r"the machine n0 has the address 127\.0\.1\.1"):
            settings_for(config, frozenset(), machines)
    with pytest.raises(ConfigError, match="the machine n0 has the address"):
        settings_for(config, frozenset(), HOSTS[:1], own)


def test_machines_that_are_one_need_no_token() -> None:
    machines = (Machine("n1", "127.0.0.1"), Machine("n2", "127.0.0.1"))
    settings = settings_for(load_run(None, {}), frozenset(), machines)
    assert (settings["hub.host"], settings["hub.token_file"]) == ("127.0.0.1", None)


def test_a_run_that_had_several_machines_resumes_on_one() -> None:
    config = load_run(None, {"output": "/data/runs"})
    on_three = with_values(config, settings_for(config, frozenset(), HOSTS))
    assert with_values(on_three, settings_for(on_three, frozenset(), HOSTS[:1])).hub == config.hub


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"train.ranks": "3"}, "cannot be distributed evenly over 2 machines"),
        ({"train.ranks": "4", "cluster.gpus_per_node": "1"}, "need 2 GPUs each"),
        ({"engine.tensor_parallel_size": "4", "cluster.gpus_per_node": "2"}, "needs as many GPUs of one machine"),
        ({"train.single_copy": "true"}, "share no memory"),
        ({"train.use_shared_memory": "false"}, "share no memory"),
        ({"engines": "3"}, "3 engines fill 3 machines, and the trainer needs another one"),
        (
            {"engines": "3", "cluster.gpus_per_node": "2", "train.ranks": "2", "engine.tensor_parallel_size": "2"},
            "fill 3",
        ),
    ],
)
def test_what_several_machines_cannot_do_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_on(HOSTS, {"cluster.nodes": "3", **flags})


def test_a_hub_with_the_launcher_is_reached_from_the_only_machine() -> None:
    config = load_run(None, {"cluster.scheduler": "ray"})
    settings = settings_for(config, frozenset(), HOSTS[:1], Machine("head", "10.0.0.9"))
    assert (settings["hub.host"], settings["engine.host"]) == ("10.0.0.9", "10.0.0.1")
    assert settings["hub.token_file"] == Path("runs/hub.token")


def test_gpus_of_a_machine_that_is_not_this_one_are_those_that_are_named() -> None:
    config = load_run(None, {"cluster.scheduler": "ray", "cluster.gpus_per_node": "4"})
    facts = facts_on(FACTS, config, HOSTS[:1])
    assert (len(facts.gpus), facts.has_gpu) == (4, True)
