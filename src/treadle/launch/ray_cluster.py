"""Run on Ray: reserve machines in a placement group, and start each process of a run in an actor of its own.

machine   a bundle of the placement group: its GPUs and CPUs, held by an actor (MachineActor) that knows its address
process   an actor without resources in the bundle (ProcessActor), which runs the same command line as on one machine
hub       a child of the launcher, because its queue must not move

When a machine is lost, Ray places its bundle on another one, and the supervisor starts the lost processes there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.background import PARENT_VARIABLE, awake_s
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError, ProcessDied, UserError, require
from treadle.gpus import VISIBLE
from treadle.launch.machines import Machine, gpus_of_each
from treadle.launch.placement import LocalPlacement, LocalProcess, ProcessHandle
from treadle.launch.process_spec import ProcessSpec

TESTED_VERSION = "2.60.0"
RESERVE_S = 600.0  # for a machine: a cluster that scales by itself starts one in minutes
_CALL_S = 30.0
_RETRY_S = 1.0
# What a lost machine ran ends when its actor is gone (background.py), within 0.5 + 5 s.
ORPHANS_END_S = 7.0


class MachineActor:
    """Holds the resources of a bundle, so that Ray gives them to nobody else."""

    def where(self) -> tuple[str, str, list[str]]:
        """(id of the node, its address, its GPUs that belong to the bundle)."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus


class ProcessActor:
    """Runs one process of a run, which ends with the actor."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], log_path: str) -> int:
        """The pid."""
        path = Path(log_path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder of the run, {path.parent.parent}, is not there")
        self._process = LocalProcess(argv, {**env, PARENT_VARIABLE: str(os.getpid())}, path)
        return self._process.pid

    def wait(self) -> int:
        """The exit code, when it has ended."""
        return self._process.wait()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class RayMachines:
    """The machines of a run. `launcher`: that of this process."""

    def __init__(self, ray: Any, group: Any, launcher: Machine, num_cpus: float, num_gpus: int) -> None:
        self.ray = ray
        self._group = group
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._holders: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}  # where a bundle is
        self.launcher = launcher
        self._lost_s = -ORPHANS_END_S
        self.machines = tuple(self.locate(number)[0] for number in range(len(group.bundle_specs)))

    def locate(self, number: int) -> tuple[Machine, list[str]]:
        """Where a bundle is now, and its GPUs. After a loss this waits until Ray has placed it again."""
        deadline_s = awake_s() + RESERVE_S
        while True:
            asked = self._holder(number).where.remote()
            try:
                node, address, gpus = self.ray.get(asked, timeout=max(1.0, deadline_s - awake_s()))
            except self.ray.exceptions.RayError as error:  # it was lost with its machine, or there is none
                if awake_s() > deadline_s:
                    raise ProcessDied(
                        f"Ray has found no machine for this run within {RESERVE_S:.0f} s: {first_line(error)}",
                        fix="ray status says what is free",
                    ) from None
                del self._holders[number]
                time.sleep(_RETRY_S)  # Ray takes a moment to see that a machine is lost
                continue
            return Machine(node, address), gpus

    def has_place(self, number: int) -> bool:
        """Whether a bundle is on a machine, so that `locate` need not wait, and no lost process may still run."""
        if awake_s() < self._lost_s + ORPHANS_END_S:
            return False
        asked = self._asked.get(number)
        if asked is None:
            asked = self._asked[number] = self._holder(number).where.remote()
        if not self.ray.wait([asked], timeout=0)[0]:
            return False
        del self._asked[number]
        try:
            self.ray.get(asked)
        except self.ray.exceptions.RayError:  # it was lost with its machine
            self._holders.pop(number, None)
            return False
        return True

    def _holder(self, number: int) -> Any:
        if number not in self._holders:
            options = {"num_cpus": self._num_cpus, "num_gpus": self._num_gpus}
            self._holders[number] = self.actor(MachineActor, number, **options)
        return self._holders[number]

    def note_loss(self) -> None:
        """An actor is lost, perhaps with its machine."""
        self._lost_s = awake_s()

    def wait_for_orphans(self) -> None:
        """Until what a lost actor ran has ended: there must be no second trainer."""
        time.sleep(max(0.0, self._lost_s + ORPHANS_END_S - awake_s()))

    def actor(self, kind: type, number: int, **options: Any) -> Any:
        """An actor in a bundle."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
        return self.ray.remote(kind).options(scheduling_strategy=strategy, **options).remote()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def reserved_machines(config: RunConfig) -> Iterator[RayMachines]:
    """Connect to a cluster that runs, and reserve the machines until the block ends."""
    require("ray", "ray")
    import ray
    import ray.util.scheduling_strategies

    cluster = config.cluster
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise UserError(
            f"no Ray at --address {cluster.address}: {error}", fix="start one by Ray's own command, `ray start`"
        ) from None
    try:
        num_gpus, num_cpus = gpus_of_each(config), cluster.cpus_per_node or 1
        bundle: dict[str, float] = {"CPU": num_cpus}
        if num_gpus:
            bundle["GPU"] = num_gpus
        if cluster.memory_gb_per_node:
            bundle["memory"] = cluster.memory_gb_per_node * 2**30
        group = ray.util.placement_group([bundle] * cluster.nodes, strategy="SPREAD" if cluster.nodes > 1 else "PACK")
        if not group.wait(RESERVE_S):
            raise ConfigError(
                f"Ray cannot reserve {cluster.nodes} x {bundle} within {RESERVE_S:.0f} s",
                fix="lower --cluster.nodes or what it asks of each; ray status says what is free",
            )
        here = Machine(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        yield RayMachines(ray, group, here, num_cpus, num_gpus)
    finally:
        ray.shutdown()  # its actors and its placement group end with this driver


class RayPlacement:
    """Starts each process in an actor on its machine, and the hub as a child of this process."""

    def __init__(self, machines: RayMachines, local: LocalPlacement) -> None:
        self._machines = machines
        self._local = local

    def has_machine(self, spec: ProcessSpec) -> bool:
        return spec.kind == "hub" or self._machines.has_place(spec.node)

    def start(self, spec: ProcessSpec) -> ProcessHandle:
        if spec.kind == "hub":
            return self._local.start(spec)
        self._local.release(spec.name)
        self._machines.wait_for_orphans()
        machine, gpus = self._machines.locate(spec.node)
        is_elsewhere = machine.address != self._machines.machines[spec.node].address
        if is_elsewhere and spec.may_move:
            spec = spec.at_host(machine.address, spec.node)
        elif is_elsewhere and spec.kind in ("engine", "router"):
            raise ProcessDied(
                f"the machine of the {spec.kind} is lost, and Ray has placed it at another address ({machine.address})",
                fix="continue with treadle run --resume: the addresses of a run are chosen when it starts",
            )
        env = dict(spec.env)
        if gpus:
            env[VISIBLE] = ",".join(gpus)
        if spec.kind == "trainer" and "MASTER_ADDR" in env and len(self._machines.machines) > 1:
            first = spec.node - int(env["RANK"]) // int(env["LOCAL_WORLD_SIZE"])
            env["MASTER_ADDR"] = self._machines.locate(first)[0].address  # of rank 0, now
        return RayProcess(self._machines, replace(spec, env=env))


class RayProcess:
    """A process in an actor. That of a lost actor counts as killed, and so does one that does not start in time."""

    pid = None

    def __init__(self, machines: RayMachines, spec: ProcessSpec) -> None:
        self._machines = machines
        self._ray = machines.ray
        # One of its methods waits for the end of the process.
        self._actor = machines.actor(ProcessActor, spec.node, num_cpus=0, max_concurrency=4)
        self._name = spec.name
        self._code: int | None = None
        self.reported_pid: int | None = None
        self._started = self._actor.start.remote(list(spec.argv), dict(spec.env), str(spec.log_path))
        self._start_deadline_s = awake_s() + RESERVE_S
        self._end: Any = None  # None: it has not started

    def poll(self) -> int | None:
        if self._code is None and self._end is None:
            self._note_start()
        if self._code is None and self._end is not None and self._ray.wait([self._end], timeout=0)[0]:
            try:
                self._code = int(self._ray.get(self._end))
            except self._ray.exceptions.RayError:
                self._lose()
        return self._code

    def _note_start(self) -> None:
        if not self._ray.wait([self._started], timeout=0)[0]:
            if awake_s() > self._start_deadline_s:
                self._lose()
            return
        try:
            self.reported_pid = int(self._ray.get(self._started))
            self._end = self._actor.wait.remote()
        except self._ray.exceptions.RayTaskError as error:
            self._code = 1
            if isinstance(error.cause, FileNotFoundError):
                raise ConfigError(
                    f"{self._name} cannot start on its machine: {error.cause}",
                    fix="--output on a disk that all machines see",
                ) from None
            raise
        except self._ray.exceptions.RayError:
            self._lose()

    def terminate(self) -> None:
        if self._end is None:
            self._lose()
        else:
            self._actor.terminate.remote()

    def kill(self) -> None:
        if self.poll() is None and self._end is None:
            self._lose()
        if self.poll() is None:
            try:
                self._ray.get(self._actor.kill.remote(), timeout=_CALL_S)
            except self._ray.exceptions.RayError:
                self._lose()
        self._code = -signal.SIGKILL if self._code is None else self._code
        self._ray.kill(self._actor)

    def _lose(self) -> None:
        """Kill the actor too: it may be alive, and would start the process late, beside its replacement."""
        self._ray.kill(self._actor)
        self._machines.note_loss()
        self._code = -signal.SIGKILL
