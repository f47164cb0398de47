"""Print a run as a manifest for KubeRay: a RayJob whose cluster has the machines of the plan. Pure.

The head runs the launcher and the hub (`treadle run --on ray`), a group of workers the other processes: one worker for
each machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.launch.machines import gpus_of_each
from treadle.launch.ray_cluster import TESTED_VERSION

_VOLUME = "runs"
_SHARED_MEMORY = "shared-memory"
_LONGEST_NAME = 47  # characters: KubeRay appends its own to the names of what it makes
_HEAD_CPUS = 2  # for launcher and hub


def manifest(config: RunConfig, words: Sequence[str], *, label: str, job_id: str, plan: Sequence[str]) -> str:
    """The manifest as YAML. `words`: of the command line after `treadle run`; `label` and `job_id`: parts of the job's
    name, which must be a new one for each job; `plan`: the processes of each machine."""
    cluster, num_gpus = config.cluster, gpus_of_each(config)
    if not cluster.image:
        raise ConfigError("a manifest names an image", fix="--cluster.image IMAGE with Treadle and ray[default] in it")
    resources: dict[str, str | int] = {"cpu": cluster.cpus_per_node or 1}
    if cluster.memory_gb_per_node:
        resources["memory"] = f"{round(cluster.memory_gb_per_node * 1024)}Mi"
    if num_gpus:
        resources["nvidia.com/gpu"] = num_gpus
    claim, path = _volume_of(config)
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _name(f"treadle-{label}", job_id)},
        "spec": {
            "entrypoint": shlex.join(["treadle", "run", *_on_ray(words)]),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": TESTED_VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # Ray starts nothing else on it
                    "template": _pod("ray-head", cluster.image, {"cpu": _HEAD_CPUS}, claim, path),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "machines",
                        "replicas": cluster.nodes,
                        "minReplicas": cluster.nodes,
                        "maxReplicas": cluster.nodes,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", cluster.image, resources, claim, path),
                    }
                ],
            },
        },
    }
    comments = [f"# machine {number}: {names}" for number, names in enumerate(_without_hub(plan))]
    return "\n".join(["# head: launcher, hub", *comments, yaml.safe_dump(job, sort_keys=False, width=110)])


def _without_hub(plan: Sequence[str]) -> list[str]:
    return [", ".join(name for name in names.split(", ") if name != "hub") for names in plan]


def _on_ray(words: Sequence[str]) -> list[str]:
    """Without --on and --address, which name the cluster from inside."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--on", "--address"):
            next(rest, None)
        elif not word.startswith(("--on=", "--address=")):
            kept.append(word)
    return [*kept, "--on", "ray", "--address", "auto"]


def _volume_of(config: RunConfig) -> tuple[str, str]:
    claim, _, path = config.cluster.volume.partition(":")
    if not claim or not path.startswith("/"):
        raise ConfigError(
            "the machines of a run share the folder of its files", fix="--cluster.volume CLAIM:/runs --output /runs"
        )
    if not PurePosixPath(config.output).is_relative_to(path):
        raise ConfigError(f"--output {config.output} is not on the volume at {path}", fix=f"--output {path}")
    return claim, path


def _pod(name: str, image: str, resources: dict[str, Any], claim: str, path: str) -> dict[str, Any]:
    """Engine and trainer of one machine share weights in /dev/shm, which is small in a container by default."""
    mounts = {_VOLUME: path, _SHARED_MEMORY: "/dev/shm"}  # noqa: S108 - a mount
    container = {
        "name": name,
        "image": image,
        "resources": {"limits": resources, "requests": dict(resources)},  # YAML would refer to the same
        "volumeMounts": [{"name": volume, "mountPath": place} for volume, place in mounts.items()],
    }
    volumes = [
        {"name": _VOLUME, "persistentVolumeClaim": {"claimName": claim}},
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}


def _name(label: str, job_id: str) -> str:
    """A name that Kubernetes takes.

    >>> _name("treadle-arithmetic+My_env", "4f0c2a")
    'treadle-arithmetic-my-env-4f0c2a'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", label.lower())[: _LONGEST_NAME - len(job_id) - 1]
    return f"{plain.strip('-')}-{job_id}"
