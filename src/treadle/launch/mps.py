"""Run engine and trainer on one GPU under CUDA MPS, so that their kernels run side by side instead of in time slices.

The daemon belongs to the run: it has its own folder for its pipes and ends with the run. A daemon that the user started
is used as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from treadle.config.schema import RunConfig, has_vllm, may_use_gpu
from treadle.errors import ConfigError
from treadle.launch.process_plan import RunPlan

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 - of a daemon that was started without a folder
_ANSWER_S = 20.0
# Opens the GPU as torch does, in a second instead of ten.
_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


def shares_card(config: RunConfig) -> bool:
    """Whether engine and trainer of this run compute on the same GPU at the same time."""
    engine, train = config.engine, config.train
    are_alike = (engine.device, engine.gpus) == (train.device, train.gpus)
    are_single = engine.tensor_parallel_size == 1 and train.ranks == 1
    samples_ahead = any(env.max_age > 0 for env in config.environments)
    is_one_card = are_alike and are_single and may_use_gpu(train.device)
    return is_one_card and samples_ahead and not config.engine_url and has_vllm(engine)


@contextmanager
def under_mps(plan: RunPlan, say: Callable[[str], None]) -> Iterator[RunPlan]:
    """The plan with the variables of an MPS daemon, which runs until the block ends; unchanged where there is none.

    With `card_sharing mps` its absence is an error.
    """
    wanted = plan.config.train.card_sharing
    if wanted not in ("auto", "mps") or not shares_card(plan.config):
        yield plan
        return
    if is_running(os.environ):
        yield plan
        return
    with _daemon() as pipes:
        if isinstance(pipes, str):
            if wanted == "mps":
                raise ConfigError(f"CUDA MPS cannot be used: {pipes}", fix="--train.card-sharing auto, turns or free")
            say(f"engine and trainer share the GPU without CUDA MPS: {pipes}")
            yield plan
            return
        say("engine and trainer share the GPU through CUDA MPS (--train.card-sharing free: without)")
        variables = {PIPES: str(pipes), LOGS: str(pipes)}
        yield replace(plan, processes=tuple(replace(spec, env={**spec.env, **variables}) for spec in plan.processes))


def is_running(environment: Mapping[str, str]) -> bool:
    return (Path(environment.get(PIPES) or DEFAULT_PIPES) / "control").exists()


@contextmanager
def _daemon() -> Iterator[Path | str]:
    """The folder of a daemon's pipes, or why there is none."""
    if shutil.which(CONTROL) is None:
        yield f"{CONTROL} is not installed (it comes with the NVIDIA driver)"
        return
    pipes = Path(tempfile.mkdtemp(prefix="treadle-mps-"))  # short: the length of a socket's path is limited
    environment = {**os.environ, PIPES: str(pipes), LOGS: str(pipes)}
    try:
        yield _start(environment) or pipes
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            _run_control([], environment, "quit\n")
        shutil.rmtree(pipes, ignore_errors=True)


def _start(environment: Mapping[str, str]) -> str:
    """Start the daemon and try it; returns the problem, or "" if it works."""
    try:
        started = _run_control(["-d"], environment)
        probe = subprocess.run([sys.executable, "-c", _PROBE], env=environment, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if started.returncode:
        return (started.stderr or started.stdout).strip() or f"{CONTROL} ended with {started.returncode}"
    return f"a program under it gets the CUDA error {probe.returncode}" if probe.returncode else ""


def _run_control(
    flags: list[str], environment: Mapping[str, str], words: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CONTROL, *flags], env=environment, input=words, text=True, capture_output=True, timeout=_ANSWER_S, check=False
    )
