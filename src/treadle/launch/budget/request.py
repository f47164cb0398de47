"""The flags of `treadle plan` -> a job and a machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import get_args

from treadle.config.engine_choice import has_vllm
from treadle.config.keys import (
    explicit_keys,
    fitting_group_size,
    keys_in,
    longest_sequence,
    with_fitting_groups,
    with_values,
)
from treadle.config.schema import EngineConfig, RunConfig
from treadle.envs.catalogue import load_environment
from treadle.errors import ConfigError
from treadle.launch.budget import calibration
from treadle.launch.budget.cards import Machine, card_bytes, find_gpu, host_memory
from treadle.launch.budget.job import Job, Mode
from treadle.launch.budget.shapes import ModelShape, find_shape, shape_of_size
from treadle.processor import fast_dtype


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """The planner's own flags; their names begin with `_`, so that they are not taken for settings of the run."""
    group = parser.add_argument_group("plan")
    add = group.add_argument
    add("--params", dest="_params", type=float, metavar="N", help="a size instead of a model, as in 24e9")
    add(
        "--mode", dest="_mode", choices=get_args(Mode),
        help="copies of the weights; absent: what the trainer does with the run's settings",
    )  # fmt: skip
    add("--gpu", dest="_gpu", metavar="NAME", help="name of the GPU: h100, a100-80gb, rtx4090; absent: this machine's")
    add("--gpu-memory-gb", dest="_gpu_memory_gb", type=float, metavar="GB", help="memory of one GPU, instead of a name")
    add("--host-memory-gb", dest="_host_memory_gb", type=float, metavar="GB", help="memory beside the GPUs")
    add(
        "--train-gpus", dest="_train_gpus", type=int, metavar="N",
        help="GPUs of the trainer, one process each; they divide the optimizer's state; absent: --train.world-size",
    )  # fmt: skip
    add(
        "--engine-gpus", dest="_engine_gpus", type=int, metavar="N",
        help="GPUs of the engine besides the trainer's; more than one: tensor parallel, adapters only; 0: it runs on "
        "the trainer's GPU; absent: as --engine.tensor-parallel-size and --engine.device say",
    )  # fmt: skip
    add(
        "--prompt-tokens", dest="_prompt_tokens", type=int, metavar="N",
        help="longest prompt in tokens; absent: known for built-in environments, else seq_len less the completion",
    )  # fmt: skip
    add("--json", dest="_json", action="store_true", help="print JSON instead of a table")


def read_request(
    run: RunConfig, values: argparse.Namespace, explicit: frozenset[str] | None = None
) -> tuple[Job, Machine]:
    """The job that `treadle run` would start with these settings, and the machine it is planned for; `explicit` as in
    `build_plan`. What treadle run would refuse is refused here too."""
    explicit = explicit_keys(run) if explicit is None else explicit
    asked, run = run, _with_largest_environment(run)
    train_gpus, engine_gpus = _gpus(run, values)
    machine = _machine(run, values, has_several_gpus=train_gpus > 1 or engine_gpus > 0)
    if not machine.has_gpu:
        engine_gpus = 0
    group_size = run.env.group_size
    if not keys_in(asked, ["env.group_size"]) & explicit:
        group_size = fitting_group_size(group_size, run.train.sequences_per_step)
    planned = {
        "train.world_size": train_gpus,
        "engine.tensor_parallel_size": max(1, engine_gpus),
        "env.group_size": group_size,
    }
    run = with_values(run, planned)
    run.check_together()
    return _job(run, values, explicit, (train_gpus, engine_gpus), has_gpu=machine.has_gpu), machine


def _with_largest_environment(run: RunConfig) -> RunConfig:
    """The run with its environment's own defaults; of several, only the one with the longest completions: the memory of
    a step is the largest when all its groups are of that one."""
    loaded = []
    for env in run.environments:
        with suppress(Exception):  # one that cannot be loaded here, for any reason, has no defaults of its own
            env = load_environment(env).config  # noqa: PLW2901
        loaded.append(env)
    if run.envs:
        run.check_mix()
    return run.model_copy(update={"env": max(loaded, key=lambda env: env.max_token_length), "envs": ()})


def accepts(run: RunConfig, flags: Sequence[str]) -> bool:
    """Whether `treadle run` takes the settings of `run` with these flags over them."""
    trainers = next((flag.split()[1] for flag in flags if flag.startswith("--train-gpus ")), run.train.world_size)
    given = {key: value for name, value in settings_of(flags).items() for key in keys_in(run, [name])}
    try:
        changed = with_values(run, {**given, "train.world_size": trainers})
        with_fitting_groups(changed, explicit_keys(run) | given.keys()).check_together()
    except ConfigError:
        return False
    return True


def settings_of(flags: Iterable[str]) -> dict[str, str]:
    """("--train.micro-tokens 4096",) -> {"train.micro_tokens": "4096"}, without the planner's own flags."""
    pairs = (flag.removeprefix("--").partition(" ") for flag in flags)
    named = {name.replace("-", "_"): value for name, _, value in pairs}
    return {name: value for name, value in named.items() if name not in ("train_gpus", "engine_gpus")}


def _gpus(run: RunConfig, values: argparse.Namespace) -> tuple[int, int]:
    """(of the trainer, further ones of the engine), as the planner's own flags say, else as the run's do."""
    engine, split = run.engine, run.engine.tensor_parallel_size
    has_own_card = split > 1 or bool(run.engine_url) or _card(engine.device) != _card(run.train.device)
    engine_gpus = (split if has_own_card else 0) if values._engine_gpus is None else values._engine_gpus
    if split not in (1, engine_gpus):
        raise ConfigError(
            f"--engine-gpus {engine_gpus} and --engine.tensor-parallel-size {split} contradict each other",
            fix="give only one of them",
        )
    return run.train.world_size if values._train_gpus is None else values._train_gpus, engine_gpus


def _card(device: str) -> str:
    return device.partition(":")[2] or "0"


def _shape(run: RunConfig, values: argparse.Namespace, explicit: frozenset[str]) -> ModelShape:
    if values._params is not None:
        return shape_of_size(values._params)
    return find_shape(run.train.model if "train.model" in explicit else run.model)


def _machine(run: RunConfig, values: argparse.Namespace, *, has_several_gpus: bool) -> Machine:
    host = None if values._host_memory_gb is None else _bytes(values._host_memory_gb, "--host-memory-gb")
    if values._gpu is not None and values._gpu_memory_gb is not None:
        raise ConfigError("a GPU is given by name and by size", fix="give only one of --gpu and --gpu-memory-gb")
    if values._gpu is not None:
        return Machine(values._gpu, card_bytes(values._gpu), host)
    if values._gpu_memory_gb is not None:
        size = _bytes(values._gpu_memory_gb, "--gpu-memory-gb")
        return Machine(f"a GPU of {values._gpu_memory_gb:g} GB", size, host)
    own = None if run.train.device.startswith("cpu") else find_gpu()
    if own is not None:
        return Machine(own[0], own[1], host or host_memory())
    if has_several_gpus and not run.engine_url:
        raise ConfigError(
            "this machine has no GPU, and none was named",
            fix="name one with --gpu h100, or its size with --gpu-memory-gb 80",
        )
    return Machine("this machine's CPU" if host is None else "a CPU machine", None, host or host_memory())


def _job(
    run: RunConfig, values: argparse.Namespace, explicit: frozenset[str], gpus: tuple[int, int], *, has_gpu: bool
) -> Job:
    train, engine = run.train.on_device(gpu=has_gpu), run.engine
    train_gpus, engine_gpus = gpus
    longest = longest_sequence(run, explicit)
    completion = min(run.env.max_token_length, longest)
    prompt = values._prompt_tokens
    if prompt is None:
        prompt = calibration.BUILT_IN_PROMPT_TOKENS.get(run.env.name, max(1, longest - completion))
    if prompt < 1:
        raise ConfigError(f"--prompt-tokens {prompt} is no length", fix="--prompt-tokens 512")
    has_liger = train.fused_kernels == "liger"
    # A micro holds no more than a step has, even when every completion is as long as it may be. For a GPU full micros
    # are planned all the same: the small tasks that are built in are not what it is bought for.
    num_groups = max(1, train.sequences_per_step // run.env.group_size)
    step_tokens = num_groups * (prompt + run.env.group_size * completion)
    return Job(
        _shape(run, values, explicit),
        mode=_mode(run, values, is_one_device=train_gpus == 1 and engine_gpus == 0),
        train_gpus=train_gpus,
        engine_gpus=engine_gpus,
        is_shared_vllm=train.weight_bridge_mode == "shared_vllm",
        weight_bytes=_weight_bytes(run, has_gpu=has_gpu),
        optimizer=train.optimizer,
        gradient_bytes=4 if train.gradient_dtype == "float32" else 2,
        train_layers=train.train_layer_indices,
        base_quantization=train.base_quantization,
        lora=train.lora,
        lora_r=train.lora_r,
        lora_targets=train.lora_target_modules,
        lora_layers=train.lora_layer_indices,
        micro_tokens=train.micro_tokens if has_gpu else min(train.micro_tokens, step_tokens),
        prompt_tokens=prompt,
        completion_tokens=completion,
        group_size=run.env.group_size,
        shares_prompts=train.share_prompts != "off",
        logprob_chunk=train.logprob_chunk,
        is_checkpointed=train.gradient_checkpointing,
        # Layers are compiled with the GPU's variable-length attention only.
        is_compiled=(
            train.compile != "off" and has_gpu and train.attention in ("auto", "varlen", "flash4") and not has_liger
        ),
        has_liger=has_liger,
        is_lean=not has_gpu,
        has_block_attention=train.attention == "blocks" or (train.attention == "auto" and not has_gpu),
        has_reference=train.kl_coef > 0 and train.kl_against == "reference",
        is_reference_offloaded=train.reference_offload,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=longest,
        gpu_memory_utilization=_utilization(engine, explicit),
    )


def _utilization(engine: EngineConfig, explicit: frozenset[str]) -> float | None:
    """The share of the card that vLLM fills with its cache; the transformers engine takes what its requests need."""
    is_vllm = "engine.gpu_memory_utilization" in explicit or has_vllm(engine)
    return engine.gpu_memory_utilization if is_vllm else None


def _mode(run: RunConfig, values: argparse.Namespace, *, is_one_device: bool) -> Mode:
    """What was asked for, else what the trainer does with these settings (train/policy.py)."""
    if values._mode is not None:
        mode: Mode = values._mode
        if mode == "single-copy" and run.train.lora and not _can_share_base(run):
            raise ConfigError(
                "one copy of the base model is for --train.weight-bridge-mode lora_only",
                fix="leave --train.use-shared-memory and other modes out, or --mode",
            )
        if mode == "single-copy" and run.train.epochs > 1 and not run.train.lora:
            raise ConfigError(
                "between the epochs on a batch the trainer's weights are ahead of the engine's: one copy cannot do",
                fix="--mode two-copies, or --train.epochs 1",
            )
        return mode
    if run.train.lora:
        return "single-copy" if run.train.single_copy else "lora"
    if run.train.weight_bridge_mode == "offline":
        return "none"
    is_shared = run.train.weight_bridge_mode == "shared_vllm" and not run.train.use_shared_memory
    return "single-copy" if is_shared and is_one_device and run.train.epochs == 1 else "two-copies"


def _can_share_base(run: RunConfig) -> bool:
    """Whether the user left the way of the weights open, or chose the one that publishes adapters to a live engine."""
    return run.train.weight_bridge_mode in ("shared_vllm", "lora_only") and not run.train.use_shared_memory


def _weight_bytes(run: RunConfig, *, has_gpu: bool) -> int:
    dtype: str = run.engine.dtype if run.train.dtype == "auto" else run.train.dtype
    if dtype == "fast":
        dtype = fast_dtype("cuda" if has_gpu and run.engine.device != "cpu" else "cpu")
    return 4 if dtype == "float32" else 2


def _bytes(gigabytes: float, flag: str) -> int:
    if not 0 < gigabytes < 1e6:
        raise ConfigError(f"{flag} {gigabytes:g} is no size of a memory", fix=f"{flag} 80")
    return round(gigabytes * 1e9)
