"""Read the variables of Atropos' weight broadcast: how many engines there are, and where the trainer's group meets.

NUM_INFERENCE_NODES          several engines: how many must have joined before training starts (also --min-engines)
MASTER_ADDR, MASTER_PORT     use_shared_memory: where the engine's workers find the trainer (also --broadcast-host)

Where a variable has no meaning, a sentence says so. With several trainer ranks MASTER_* are those of torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.net.address import is_loopback, is_loopback_host, shown_url

NUM_NODES, MASTER_ADDR, MASTER_PORT = "NUM_INFERENCE_NODES", "MASTER_ADDR", "MASTER_PORT"
_MAX_PORT = 65535


def num_engines_awaited(config: TrainConfig, environment: Mapping[str, str]) -> int:
    """How many engines of several must have joined before training starts.

    >>> num_engines_awaited(TrainConfig(engine_url="hub"), {"NUM_INFERENCE_NODES": "3"})
    3
    """
    number = config.min_engines or _whole_number(NUM_NODES, environment.get(NUM_NODES, "0"))
    if not config.names_hub_table and number > len(config.engine_url):
        raise ConfigError(
            f"training waits for {number} engines (--min-engines or {NUM_NODES}), and --engine-url names "
            f"{len(config.engine_url)}",
            fix="name the others too, or --engine-url hub",
        )
    return max(1, number)


@dataclass(frozen=True)
class GroupPlace:
    """Where the trainer listens for the engine's workers."""

    host: str = ""  # "": its address on the engine's network
    port: int = 0  # 0: any free one
    note: str = ""  # why a variable was not followed


def group_place(config: TrainConfig, environment: Mapping[str, str]) -> GroupPlace:
    """Where a single trainer process meets the engines.

    >>> group_place(TrainConfig(use_shared_memory=True), {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "26756"})
    GroupPlace(host='10.0.0.2', port=26756, note='')
    """
    if has_ranks(config.ranks, environment):
        return GroupPlace(config.broadcast_host)
    host, note = environment.get(MASTER_ADDR, ""), ""
    if host and is_loopback_host(host):  # an engine here is called by loopback in any case
        if not config.has_fleet and not is_loopback(config.engine_url[0]):
            where = shown_url(config.engine_url[0])
            note = f"{MASTER_ADDR} {host} has no effect: the engine at {where} is on another machine"
        host = ""
    port = _whole_number(MASTER_PORT, environment.get(MASTER_PORT, "0"))
    if port > _MAX_PORT:
        raise ConfigError(f"{MASTER_PORT} is {port}, and ports are 1 to {_MAX_PORT}", fix=f"correct {MASTER_PORT}")
    return GroupPlace(config.broadcast_host or host, port, note)


def has_ranks(num_ranks: int, environment: Mapping[str, str]) -> bool:
    """Whether MASTER_* are those of the trainer's ranks: torchrun sets them together with WORLD_SIZE."""
    return num_ranks > 1 or "WORLD_SIZE" in environment


def unused_variables(config: TrainConfig, environment: Mapping[str, str], num_ranks: int) -> list[str]:
    """A sentence about each variable that is set and has no effect in this trainer.

    >>> unused_variables(TrainConfig(), {"NUM_INFERENCE_NODES": "0"}, 1)
    ['NUM_INFERENCE_NODES has no effect: the trainer publishes to the one engine of --engine-url']
    """
    notes = []
    numbers = {NUM_NODES: _whole_number(NUM_NODES, environment[NUM_NODES])} if NUM_NODES in environment else {}
    numbers |= {"--min-engines": config.min_engines} if config.min_engines > 1 else {}
    for name, number in () if config.has_fleet else numbers.items():
        several = "; for several give --engine-url URL URL, or hub" if number > 1 else ""
        notes.append(f"{name} has no effect: the trainer publishes to the one engine of --engine-url{several}")
    given = [name for name in (MASTER_ADDR, MASTER_PORT) if name in environment]
    if given and not config.use_shared_memory and not has_ranks(num_ranks, environment):
        verb = "has" if len(given) == 1 else "have"
        notes.append(
            f"{' and '.join(given)} {verb} no effect: they name where a broadcast meets (use_shared_memory), and this "
            "trainer makes none"
        )
    return notes


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} is {text!r}, and must be a whole number", fix=f"correct {name}, or unset it")
    return int(text)
