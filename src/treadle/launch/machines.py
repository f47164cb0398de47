"""Distribute a run over several machines: what runs where, at which addresses, and how the ranks meet. Pure.

machine 0     hub (on Ray: with the launcher), engine; several engines fill the first machines, as many on each as
              its GPUs hold, without GPUs one
the others    the trainer ranks, evenly, and the environments, in turns
one machine   everything, with the same settings as without a scheduler
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from treadle.budget.placement import OWN_GPU_SHARE
from treadle.config.schema import HubConfig, RunConfig
from treadle.config.train import TrainConfig
from treadle.errors import ConfigError
from treadle.gpus import Gpu
from treadle.launch.machine import MachineFacts
from treadle.launch.process_spec import ProcessSpec
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE
from treadle.net.address import is_loopback_host
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN_VARIABLE

_LOOPBACK = HubConfig.model_fields["host"].default
_TRAIN_DEFAULTS = TrainConfig.model_fields
# The processes of other machines call hub and engine, so these ask for a token.
_TOKEN_FILES = {"hub": "hub.token", "engine": "engine.token"}
_TOKEN_VARIABLES = {"hub": HUB_TOKEN_VARIABLE, "engine": ENGINE_TOKEN_VARIABLE}


@dataclass(frozen=True)
class Machine:
    """`name`: by which the scheduler knows it; `address`: at which the others reach it."""

    name: str
    address: str = _LOOPBACK


def settings_for(
    config: RunConfig,
    explicit: frozenset[str],
    machines: Sequence[Machine],
    launcher: Machine | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Settings that follow from the machines; `explicit`: keys of the user, which are kept; `launcher`: its machine,
    which has the hub; None: the first; `environment`: may have the tokens.

    With a single machine they are the defaults: a resumed run may have had several.
    """
    launcher = launcher or machines[0]
    is_one = {launcher.name} == {machine.name for machine in machines}
    _check_addresses((launcher, *machines))
    hosts = {"hub": launcher.address, "engine": machines[0].address}
    settings: dict[str, Any] = {}
    if config.has_router:  # it asks for the token of the engines
        settings["router.host"] = _LOOPBACK if is_one else machines[0].address
    for server, address in hosts.items():
        host = settings[f"{server}.host"] = _LOOPBACK if is_one else address
        needs_file = not is_loopback_host(host) and _TOKEN_VARIABLES[server] not in environment
        settings[f"{server}.token_file"] = config.output / _TOKEN_FILES[server] if needs_file else None
    settings["train.broadcast_by"] = _TRAIN_DEFAULTS["broadcast_by"].default
    if len(machines) > 1:
        settings |= _apart(config, explicit, len(machines))
    return {key: value for key, value in settings.items() if key not in explicit}


def _check_addresses(machines: Sequence[Machine]) -> None:
    """Refuse a loopback address, unless all have it: the other machines would call themselves."""
    local = next((machine for machine in machines if is_loopback_host(machine.address)), None)
    if local is not None and len({machine.address for machine in machines}) > 1:
        raise ConfigError(
            f"the machine {local.name} has the address {local.address}, which other machines cannot reach",
            fix=f"let {local.name} have its address in the network of the cluster (NodeAddr of SLURM, /etc/hosts, "
            "the address with which Ray was started)",
        )


def _apart(config: RunConfig, explicit: frozenset[str], num_machines: int) -> dict[str, Any]:
    """Settings of engines and trainer ranks on different machines."""
    train, num_gpus, split = config.train, gpus_of_each(config), config.engine.tensor_parallel_size
    keeps_one_copy = train.mode.in_memory and "train.use_shared_memory" in explicit and not train.use_shared_memory
    if train.single_copy or keeps_one_copy or train.broadcast_by == "memory":
        raise ConfigError(
            "engine and trainer on different machines share no memory",
            fix="drop --train.single-copy, --train.use-shared-memory and --train.broadcast-by, or --cluster.nodes",
        )
    if num_gpus and split > num_gpus:
        raise ConfigError(
            f"engine.tensor_parallel_size {split} needs as many GPUs of one machine, and --cluster.gpus-per-node is "
            f"{num_gpus}",
            fix=f"--engine.tensor-parallel-size {num_gpus}",
        )
    num_slots = max(1, num_gpus // split)  # for engines, on each machine
    num_with_engines = engine_machines(config.engines, num_slots)
    num_others = num_machines - num_with_engines
    if num_others < 1:
        raise ConfigError(
            f"{config.engines} engines fill {num_with_engines} machines, and the trainer needs another one",
            fix=f"--cluster.nodes {num_with_engines + 1}, or --engines {(num_machines - 1) * num_slots}",
        )
    ranks = train.ranks if "train.ranks" in explicit else num_others * max(1, num_gpus)
    if ranks % num_others:
        whose = "the engine has the first" if num_with_engines == 1 else f"engines have the first {num_with_engines}"
        raise ConfigError(
            f"{ranks} trainer ranks cannot be distributed evenly over {num_others} machines ({whose} "
            f"of {num_machines})",
            fix=f"--train.ranks {num_others * -(-ranks // num_others)}",
        )
    if num_gpus and ranks // num_others > num_gpus:
        raise ConfigError(
            f"{ranks} trainer ranks on {num_others} machines need {ranks // num_others} GPUs each, and "
            f"--cluster.gpus-per-node is {num_gpus}",
            fix=f"--train.ranks {num_others * num_gpus}",
        )
    num_engines = -(-config.engines // num_with_engines)  # on each machine
    settings: dict[str, Any] = {
        "engine.gpus": tuple(range(split * max(1, num_engines))) if num_gpus else None,
        "train.gpus": None,  # each rank takes the GPU of its local number
        "train.ranks": ranks,
    }
    if num_gpus:
        settings["engine.gpu_memory_utilization"] = OWN_GPU_SHARE
    if train.mode.in_memory:
        settings |= {"train.use_shared_memory": True, "train.broadcast_by": "nccl" if num_gpus else "gloo"}
    return settings


def engine_machines(num_engines: int, num_of_each: int) -> int:
    """Machines that engines need; the first has the hub, and trainer ranks only without other machines."""
    return max(1, -(-num_engines // num_of_each))


def gpus_of_each(config: RunConfig) -> int:
    """GPUs of each machine: the given number, else the numbers that settings name."""
    if config.cluster.gpus_per_node is not None:
        return config.cluster.gpus_per_node
    return max((gpu + 1 for gpus in (config.engine.gpus, config.train.gpus) for gpu in gpus or ()), default=0)


def facts_on(facts: MachineFacts, config: RunConfig, machines: Sequence[Machine]) -> MachineFacts:
    """The facts that a plan for these machines needs. On several, `settings_for` has chosen the GPUs."""
    num_gpus = gpus_of_each(config)
    if len(machines) > 1:
        return replace(facts, gpus=(), has_gpu=num_gpus > 0, num_machines=len(machines))
    if config.cluster.scheduler == "ray":  # the machine may be another than this one
        return replace(facts, gpus=(Gpu("", 0),) * num_gpus, has_gpu=num_gpus > 0)
    return facts


def place_processes(
    specs: Sequence[ProcessSpec], machines: Sequence[Machine], engines_of_each: int = 1
) -> tuple[ProcessSpec, ...]:
    """The processes with their machines; ranks with the address of rank 0 and their number on their machine.
    `engines_of_each`: the most that a machine has."""
    if len(machines) == 1:
        return tuple(specs)
    num_engines, num_ranks = (sum(spec.kind == kind for spec in specs) for kind in ("engine", "trainer"))
    first = engine_machines(num_engines, engines_of_each)  # of the trainer's machines
    num_others = len(machines) - first
    seen: dict[str, int] = {}
    placed = []
    for spec in specs:
        number = seen[spec.kind] = seen.get(spec.kind, -1) + 1
        if spec.kind == "trainer":
            each = num_ranks // num_others
            variables = _rank_variables(number % each, each, machines[first].address) if num_ranks > 1 else {}
            env = {name: value for name, value in spec.env.items() if name not in variables} | variables
            if num_ranks > 1 and not is_loopback_host(machines[first].address):
                env.pop("GLOO_SOCKET_IFNAME", None)  # the loopback interface
            placed.append(replace(spec, node=first + number // each, env=env))
        elif spec.kind == "env":
            placed.append(replace(spec, node=first + number % num_others))
        elif spec.kind == "engine":
            node = number // engines_of_each
            placed.append(replace(spec, node=node) if node == 0 else spec.at_host(machines[node].address, node))
        else:
            placed.append(replace(spec, node=0))
    return tuple(placed)


def _rank_variables(local_rank: int, num_local: int, address: str) -> dict[str, str]:
    return {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(num_local), "MASTER_ADDR": address}


def names_by_machine(specs: Sequence[ProcessSpec], num_machines: int) -> list[str]:
    """ "hub, engine" for each machine."""
    return [", ".join(spec.name for spec in specs if spec.node == node) for node in range(num_machines)]


def describe_machines(specs: Sequence[ProcessSpec], machines: Sequence[Machine]) -> tuple[str, ...]:
    """A line for each: "machine 1 is gpu2 (10.0.0.2): env, trainer"."""
    names = names_by_machine(specs, len(machines))
    return tuple(
        f"machine {number} is {machine.name} ({machine.address}): {names[number]}"
        for number, machine in enumerate(machines)
    )
