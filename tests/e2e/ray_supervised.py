"""Supervise three small processes on Ray: prints what starts; a line of input ends it. Arguments: address, folder."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from treadle.config import load_run
from treadle.launch.placement import LocalPlacement
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.ray_cluster import RayPlacement, reserved_machines
from treadle.launch.restarts import Progress, Replacements, TrainerRestarts
from treadle.launch.supervisor import StopRequest, Supervisor

NODES = {"engine": 0, "trainer": 1, "env": 1}
LIFE = """
import os, time
with open({lives!r}, "a") as file: file.write({name!r} + " " + str(os.getpid()) + "\\n")
time.sleep(600)
"""


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    config = load_run(None, {"cluster.scheduler": "ray", "cluster.address": address, "cluster.nodes": "2"})
    specs = [
        ProcessSpec(
            name,
            (sys.executable, "-c", LIFE.format(lives=str(folder / "lives"), name=name)),
            dict(os.environ),
            folder / "logs" / f"{name}.log",
            node=node,
        )
        for name, node in NODES.items()
    ]
    steps = itertools.count(1)

    def progress() -> Progress:
        return Progress(next(steps), 0)

    def say(*words: object) -> None:
        print(*words, flush=True)

    with (
        reserved_machines(config) as machines,
        Supervisor(
            StopRequest(),
            placement=RayPlacement(machines, LocalPlacement()),
            restarts=TrainerRestarts(3, progress, lambda text: say("again", text)),
            replacements=Replacements(3, progress, lambda _, text: say("again", text), lambda: True),
        ) as supervisor,
    ):
        supervisor.start(specs)
        say("machines", *(machine.name for machine in machines.machines))
        supervisor.wait((folder / "end").exists)
    say("ended")


if __name__ == "__main__":
    main()
