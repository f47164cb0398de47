"""The manifest of a run for KubeRay; none was ever applied to a cluster."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml

from treadle.cli import main
from treadle.config import load_run
from treadle.errors import ConfigError
from treadle.launch.kuberay import manifest
from treadle.launch.ray_cluster import TESTED_VERSION

DESCRIBED = {
    "cluster.scheduler": "k8s", "cluster.nodes": "2", "cluster.gpus_per_node": "8", "cluster.cpus_per_node": "32",
    "cluster.memory_gb_per_node": "256", "cluster.image": "lab/treadle:1", "cluster.volume": "claim:/runs",
    "output": "/runs/mine",
}  # fmt: skip


# The fields of a manifest, with their types and whether they are required, as in the definition of RayJob (v1) in
# ray-operator/config/crd/bases/ray.io_rayjobs.yaml of KubeRay, August 2026. Others are refused.
Name = Annotated[str, msgspec.Meta(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Amount = Annotated[str, msgspec.Meta(pattern=r"^[0-9]+(\.[0-9]*)?([KMGTPE]i?|[numk])?$")]
Quantity = Annotated[int, msgspec.Meta(ge=0)] | Amount


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Resources(Strict):
    limits: dict[str, Quantity] = {}
    requests: dict[str, Quantity] = {}


class Mount(Strict):
    name: Name
    mountPath: str


class Container(Strict):
    name: Name
    image: str = ""
    resources: Resources = Resources()
    volumeMounts: list[Mount] = []


class Claim(Strict):
    claimName: str


class EmptyFolder(Strict):
    medium: Literal["", "Memory"] = ""


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyFolder | None = None


class PodSpec(Strict):
    containers: list[Container]
    volumes: list[Volume] = []


class Pod(Strict):
    spec: PodSpec


class Head(Strict):
    template: Pod
    rayStartParams: dict[str, str] = {}


class Workers(Strict):
    groupName: Name
    minReplicas: int
    maxReplicas: int
    template: Pod
    replicas: int = 0
    rayStartParams: dict[str, str] = {}


class Cluster(Strict):
    headGroupSpec: Head
    workerGroupSpecs: list[Workers] = []
    rayVersion: str = ""


class JobSpec(Strict):
    rayClusterSpec: Cluster
    entrypoint: str = ""
    shutdownAfterJobFinishes: bool = False


class Metadata(Strict):
    name: Name


class Job(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


def job_for(words: tuple[str, ...] = (), label: str = "arithmetic+My_env", **changed: object) -> dict[str, Any]:
    plan = ["hub, engine", "env, trainer"]
    config = load_run(None, {**DESCRIBED, **changed})
    return yaml.safe_load(manifest(config, words, label=label, job_id="4f0c2a", plan=plan))


def test_the_job_has_a_worker_with_all_its_gpus_for_each_machine() -> None:
    job = job_for()
    assert (job["apiVersion"], job["kind"], job["metadata"]) == (
        "ray.io/v1", "RayJob", {"name": "treadle-arithmetic-my-env-4f0c2a"},
    )  # fmt: skip
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == TESTED_VERSION
    (group,) = cluster["workerGroupSpecs"]
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {2}
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["image"] == "lab/treadle:1"
    limits = {"cpu": 32, "memory": "262144Mi", "nvidia.com/gpu": 8}
    assert worker["resources"] == {"limits": limits, "requests": limits}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


@pytest.mark.parametrize("changed", [{}, {"cluster.gpus_per_node": "0"}, {"cluster.memory_gb_per_node": "0.5"}])
def test_the_manifest_has_the_fields_and_types_of_a_ray_job(changed: dict[str, object]) -> None:
    job = job_for(("--steps", "3"), **changed)
    msgspec.convert(job, Job)
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 2
    with pytest.raises(msgspec.ValidationError, match="unknown field `replica`"):
        msgspec.convert(job, Job)


def test_a_long_name_is_cut_before_the_part_that_makes_it_unique() -> None:
    name = job_for(label="e" * 80)["metadata"]["name"]
    assert len(name) == 47
    assert name.endswith("ee-4f0c2a")


def test_all_pods_mount_the_volume_of_the_run_and_shared_memory() -> None:
    cluster = job_for()["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert mounts == {"runs": "/runs", "shared-memory": "/dev/shm"}
        assert volumes["runs"] == {"persistentVolumeClaim": {"claimName": "claim"}}
        assert volumes["shared-memory"] == {"emptyDir": {"medium": "Memory"}}


def test_the_launcher_uses_the_cluster_that_it_is_in() -> None:
    spec = job_for(("--on", "k8s", "--steps", "3", "--env.args", '{"a": 1}'))["spec"]
    assert shlex.split(spec["entrypoint"]) == [
        "treadle", "run", "--steps", "3", "--env.args", '{"a": 1}', "--on", "ray", "--address", "auto",
    ]  # fmt: skip
    assert spec["shutdownAfterJobFinishes"] is True


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cluster.image": ""}, "names an image"),
        ({"cluster.volume": ""}, "share the folder"),
        ({"cluster.volume": "claim"}, "share the folder"),
        ({"output": "runs"}, "is not on the volume at /runs"),
    ],
)
def test_a_manifest_that_could_not_run_is_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job_for(**changed)


def test_a_dry_run_prints_the_manifest_and_where_processes_are(capsys) -> None:
    words = ["run", "--on", "k8s", "--dry-run", "--cluster.nodes", "2", "--cluster.image", "lab/treadle:1"]
    names = set()
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--cluster.volume", "claim:/runs", "--output", "/runs"])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert printed.startswith("# head: launcher, hub\n# machine 0: engine\n# machine 1: env, trainer\n")
        assert yaml.safe_load(printed)["kind"] == "RayJob"
        names.add(yaml.safe_load(printed)["metadata"]["name"])
    assert len(names) == 2, "each manifest is another job"


def test_a_manifest_is_printed_and_never_applied(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on", "k8s"])
    assert ended.value.code == 2
    assert "--dry-run | kubectl apply -f -" in capsys.readouterr().err
