"""Choose where the processes of a run are started: on this machine, in an allocation of SLURM, or by a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from treadle.config.schema import RunConfig
from treadle.config.values import value_of, with_values
from treadle.errors import ConfigError
from treadle.launch import ray_cluster, slurm
from treadle.launch.machine import Listeners
from treadle.launch.machines import Machine, settings_for
from treadle.launch.placement import LocalPlacement, Placement


@dataclass(frozen=True)
class RunPlaces:
    """Where the processes of a run are started. `launcher`: its machine; None: the first."""

    machines: tuple[Machine, ...]
    placement: Callable[[Listeners], Placement]
    launcher: Machine | None = None


def check_scheduler(config: RunConfig) -> None:
    """Refuse settings that no run on this scheduler can have."""
    scheduler = config.cluster.scheduler
    if scheduler != "local" and config.attached_urls:
        servers = " and ".join(config.attached_urls)
        flags = " and ".join(f"--{server}-url" for server in config.attached_urls)
        raise ConfigError(f"a run on {scheduler} starts its own {servers}", fix=f"leave {flags} out")


@contextmanager
def run_places(config: RunConfig) -> Iterator[RunPlaces]:
    """The machines of a run, until the block ends."""
    scheduler = config.cluster.scheduler
    check_scheduler(config)
    if scheduler == "k8s":
        raise ConfigError(
            "treadle prints the manifest of a run, and applies none", fix="treadle run --on k8s --dry-run"
        )
    if scheduler == "slurm":
        if not slurm.is_inside():
            raise ConfigError("this is no allocation of SLURM", fix="treadle run --on slurm submits a job")
        machines = slurm.allocated_machines()
        yield RunPlaces(machines, partial(slurm.SlurmPlacement, machines))
    elif scheduler == "ray":
        with ray_cluster.reserved_machines(config) as reserved:
            yield RunPlaces(
                reserved.machines,
                lambda listeners: ray_cluster.RayPlacement(reserved, LocalPlacement(listeners)),
                reserved.launcher,
            )
    else:
        yield RunPlaces((Machine("here"),), LocalPlacement)


def on_machines(config: RunConfig, explicit: frozenset[str], places: RunPlaces) -> tuple[RunConfig, frozenset[str]]:
    """The settings of a run on these machines, and the keys that changed."""
    settings = settings_for(config, explicit, places.machines, places.launcher, os.environ)
    changed = {key: value for key, value in settings.items() if value != value_of(config, key)}
    if any(key.endswith("token_file") for key in changed):
        config.output.expanduser().mkdir(parents=True, exist_ok=True)  # they are made there
    return with_values(config, changed) if changed else config, frozenset(changed)
