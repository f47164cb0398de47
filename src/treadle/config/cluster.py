"""Define on which machines the processes of a run are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from treadle.config.section import Count, PositiveInt, Section, option

Scheduler = Literal["local", "slurm", "ray", "k8s"]


class ClusterConfig(Section):
    """The machines of a run; everything but the scheduler has an effect only with one."""

    scheduler: Scheduler = option("local", "what starts the processes of the run; also --on")
    nodes: PositiveInt = option(1, "machines; with several the engine has the first, and the trainer ranks the others")
    gpus_per_node: Count | None = option(
        None, "GPUs of each machine; empty: those that --engine.gpus and --train.gpus name, else none"
    )
    cpus_per_node: PositiveInt | None = option(None, "CPUs of each machine; empty: whole machines; ray: 1")
    memory_gb_per_node: Annotated[float, Field(gt=0)] | None = option(
        None, "host memory of each machine; empty: all that it has; ray: none is reserved"
    )
    # ray
    address: str = option("auto", "ray: HOST:PORT of a cluster that runs; auto: that of this machine")
    # slurm
    time_limit: str = option("", "longest time of the allocation (8:00:00), above 5 minutes; empty: the partition's")
    sbatch_args: str = option("", "further flags of sbatch: --cluster.sbatch-args='--partition=gpu --account=lab'")
    # k8s
    image: str = option("", "k8s: image with Treadle and ray[default]")
    volume: str = option("", "k8s: claim of the volume for --output, and where it is mounted: CLAIM:/runs")
