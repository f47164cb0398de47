"""Read the flags of `treadle plan` and the settings of a run: the job to plan, its layout, and the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from treadle.budget import hardware
from treadle.budget.hardware import Machine, host_memory, parse_cards
from treadle.budget.job import Layout, Mode, PlannedJob
from treadle.budget.placement import (
    EngineDemand,
    GpuWishes,
    Placement,
    choose_placement,
    idle_note,
    settings_on_own_gpus,
)
from treadle.budget.shapes import ModelShape, find_shape, shape_of_size
from treadle.budget.suggestions import settings_of
from treadle.config.schema import RunConfig, has_vllm
from treadle.config.section import parse_numbers
from treadle.config.train import LOGPROB_CHUNK
from treadle.config.values import (
    concurrent_sequences,
    explicit_keys,
    fitting_group_size,
    keys_in,
    longest_sequence,
    with_fitting_groups,
    with_values,
)
from treadle.envs.base import load_environment
from treadle.errors import ConfigError
from treadle.formatting import counted, gigabytes
from treadle.gpus import find_gpus
from treadle.support import fast_dtype


@dataclass(frozen=True)
class PlanRequest:
    job: PlannedJob
    machine: Machine
    layout: Layout


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `treadle plan`; their destinations begin with `_`, because they are not settings of the run."""
    group = parser.add_argument_group("plan")
    add = group.add_argument
    add("--params", dest="_params", type=float, metavar="N", help="a size instead of a model, as in 24e9")
    add(
        "--mode", dest="_mode", choices=get_args(Mode),
        help="copies of the weights; absent: what the trainer does with the run's settings",
    )  # fmt: skip
    add(
        "--gpu", "--cards", dest="_gpu", metavar="[Nx]NAME",
        help="the GPUs of the machine: h100, 8xh100, 2xa100-80gb, 4x48gb; absent: this machine's",
    )  # fmt: skip
    add("--gpu-memory-gb", dest="_gpu_memory_gb", type=float, metavar="GB", help="memory of one GPU, instead of a name")
    add("--host-memory-gb", dest="_host_memory_gb", type=float, metavar="GB", help="memory beside the GPUs")
    add(
        "--train-gpus", dest="_train_gpus", type=int, metavar="N",
        help="trainer ranks, each on its own GPU; absent: as --train.gpus or --train.ranks say, else all that the "
        "engine leaves",
    )  # fmt: skip
    add(
        "--engine-gpus", dest="_engine_gpus", type=int, metavar="N",
        help="GPUs of the engine besides the trainer's; more than one: tensor parallel; 0: it runs on the trainer's "
        "GPU; absent: as --engine.gpus or --engine.tensor-parallel-size say, else as few as hold the model",
    )  # fmt: skip
    add(
        "--prompt-tokens", dest="_prompt_tokens", type=int, metavar="N",
        help="longest prompt in tokens; absent: known for built-in environments, else seq_len less the completion",
    )  # fmt: skip
    add("--json", dest="_json", action="store_true", help="print JSON instead of a table")


def read_request(run: RunConfig, values: argparse.Namespace, explicit: frozenset[str] | None = None) -> PlanRequest:
    """The job that `treadle run` would start with these settings, and the machine it is planned for; `explicit` as in
    `build_plan`. Settings that `treadle run` refuses are refused here too."""
    explicit = explicit_keys(run) if explicit is None else explicit
    asked, run = run, _with_largest_environment(run)
    machine = _machine(run, values)
    model = run.train.model if "train.model" in explicit else run.model
    shape = find_shape(model) if values._params is None else shape_of_size(values._params)
    counts = _count_gpus(run, values, explicit, machine, shape)
    group_size = run.env.group_size
    if not keys_in(asked, ["env.group_size"]) & explicit:
        group_size = fitting_group_size(group_size, run.train.sequences_per_step)
    is_apart = counts.engine_gpus > 0
    planned: dict[str, Any] = {
        "train.ranks": counts.train_gpus,
        "engine.tensor_parallel_size": max(1, counts.engine_gpus),
        "env.group_size": group_size,
    }
    if is_apart and not run.train.single_copy:  # one copy is refused below
        planned |= settings_on_own_gpus(run, explicit)
    run = with_values(run, planned)
    run.check_together()
    job = _job(run, values, explicit, (counts.train_gpus, counts.engine_gpus), shape, has_gpu=machine.has_gpu)
    usual = Layout.of(job)
    engine = _numbers(asked.engine.gpus, asked.engine.device, usual.engine)
    # An engine that runs already takes none of the trainer's GPUs.
    others = tuple(range(job.train_gpus)) if asked.engine_url else usual.trainer
    trainer = _numbers(asked.train.gpus, asked.train.device, others)
    return PlanRequest(job, machine, Layout(engine, trainer, counts.reason))


def _numbers(gpus: tuple[int, ...] | None, device: str, usual: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs of a process as the user named them, if as many are planned."""
    index = device.partition(":")[2]
    named = (int(index),) if index.isdecimal() else gpus
    return named if named is not None and len(named) == len(usual) else usual


@dataclass(frozen=True)
class _GpuCounts:
    """Numbers of GPUs. `engine_gpus` 0: the engine shares the trainer's."""

    train_gpus: int = 1
    engine_gpus: int = 0
    reason: str = ""


def _count_gpus(
    run: RunConfig, values: argparse.Namespace, explicit: frozenset[str], machine: Machine, shape: ModelShape
) -> _GpuCounts:
    """The numbers of GPUs from the flags of the plan, else from those of the run, else chosen as `treadle run` does."""
    engine, train = run.engine, run.train
    ranks = _given(values._train_gpus, train.gpus, train.ranks, "train.ranks" in explicit or train.ranks > 1)
    split = engine.tensor_parallel_size
    workers = _given(values._engine_gpus, engine.gpus, split, "engine.tensor_parallel_size" in explicit or split > 1)
    if values._engine_gpus is not None and engine.gpus is None and split not in (1, values._engine_gpus):
        raise ConfigError(
            f"--engine-gpus {values._engine_gpus} and --engine.tensor-parallel-size {split} contradict each other",
            fix="give only one of them",
        )
    indices = {device.partition(":")[2] or "0" for device in (engine.device, train.device)}
    if not machine.has_gpu:
        if (ranks or 1) > 1 or (workers or 0) > 1 or values._engine_gpus:
            raise ConfigError(
                "this machine has no GPU, and none was named",
                fix="name one with --gpu h100, or its size with --gpu-memory-gb 80",
            )
        return _GpuCounts()
    if run.engine_url or len(indices) > 1 or workers == 0:  # the engine's place is given
        return _GpuCounts(ranks or 1, 0 if workers == 0 else workers or 1)
    num_gpus = machine.num_gpus
    if num_gpus is None:
        is_placed = engine.gpus is not None and train.gpus is not None and engine.gpus != train.gpus
        needs_own = (ranks or 1) > 1 or values._engine_gpus is not None or (workers or 1) > 1 or is_placed
        return _GpuCounts(ranks or 1, (workers or 1) if needs_own else 0)
    demand = EngineDemand.of(
        shape,
        max_num_seqs=concurrent_sequences(run, explicit),
        max_model_len=longest_sequence(run, explicit),
        weight_bytes=float(_weight_bytes(run, has_gpu=True) * shape.num_params),
    )
    keeps_one_copy = "train.use_shared_memory" in explicit and not train.use_shared_memory
    wishes = GpuWishes(
        tensor_parallel=workers,
        ranks=ranks,
        ranks_multiple=train.ranks_multiple,
        is_one_copy=train.single_copy or values._mode == "single-copy" or (train.mode.in_memory and keeps_one_copy),
        can_split=engine.engine != "transformers",
    )
    placement = choose_placement(range(num_gpus), machine.gpu_bytes or 0, demand, wishes)
    engine_gpus = 0 if placement.is_shared else placement.tensor_parallel
    reason = "" if num_gpus == 1 else _reason(placement, demand, machine.gpu_bytes or 0, workers, ranks)
    if idle := idle_note(placement, num_gpus, wishes):
        reason = f"{reason}; {idle}"
    return _GpuCounts(placement.ranks, engine_gpus, reason)


def _given(of_plan: int | None, gpus: Sequence[int] | None, count: int, is_count_given: bool) -> int | None:
    """The first number that is given: of GPUs by their numbers, by a flag of the plan, by a setting of the run."""
    if gpus is not None:
        return len(gpus)
    return of_plan if of_plan is not None else count if is_count_given else None


def _reason(placement: Placement, demand: EngineDemand, gpu_bytes: int, workers: int | None, ranks: int | None) -> str:
    """Why the engine and the trainer have these GPUs, in a sentence."""
    if placement.is_shared:
        return "engine and trainer share one copy of the weights, which needs one GPU for both"
    size = placement.tensor_parallel
    cards = counted(size, "GPU")
    if workers is not None:
        of_engine = f"the engine has {cards}, as you chose"
    elif demand.fits(size, gpu_bytes):
        needed = f"the weights ({gigabytes(demand.weight_bytes)}) and {demand.num_sequences} sequences"
        verb = "holds" if size == 1 else "hold"
        of_engine = f"{cards} {verb} {needed}; fewer would not" if size > 1 else f"{cards} {verb} {needed}"
    else:
        of_engine = f"the engine has {cards}, which hold fewer than {demand.num_sequences} sequences"
    if ranks is not None:
        return f"{of_engine}; the trainer has {counted(ranks, 'rank')}, as you chose"
    each = "the other one is for the trainer" if placement.ranks == 1 else f"{placement.ranks} train together"
    return f"{of_engine}; {each}"


def _with_largest_environment(run: RunConfig) -> RunConfig:
    """The run with the defaults of its environment. Of several, only the one with the longest completions: a step needs
    most memory if all its groups are from that one."""
    loaded = []
    for env in run.environments:
        with suppress(Exception):  # one that cannot be loaded here keeps the general defaults
            env = load_environment(env).config  # noqa: PLW2901
        loaded.append(env)
    if run.envs:
        run.check_mix()
    return run.model_copy(update={"env": max(loaded, key=lambda env: env.max_token_length), "envs": ()})


def accepts(run: RunConfig, flags: Sequence[str]) -> bool:
    """Whether `treadle run` accepts the settings of `run` with these flags added."""
    given = {key: value for name, value in settings_of(flags).items() for key in keys_in(run, [name])}
    explicit = explicit_keys(run) | given.keys()
    follows = {}  # from the GPUs, as treadle run derives it
    if "engine.gpus" in given:
        num_engine, num_train = (len(parse_numbers(given[key])) for key in ("engine.gpus", "train.gpus"))
        follows = {"engine.tensor_parallel_size": num_engine, "train.ranks": num_train}
        follows |= settings_on_own_gpus(run, explicit)
    try:
        changed = with_values(run, {**follows, **given})
        with_fitting_groups(changed, explicit).check_together()
    except ConfigError:
        return False
    return True


def _machine(run: RunConfig, values: argparse.Namespace) -> Machine:
    host = None if values._host_memory_gb is None else _bytes(values._host_memory_gb, "--host-memory-gb")
    if values._gpu is not None and values._gpu_memory_gb is not None:
        raise ConfigError("a GPU is given by name and by size", fix="give only one of --gpu and --gpu-memory-gb")
    if values._gpu is not None:
        num_gpus, name, size = parse_cards(values._gpu)
        return Machine(name, size, host, num_gpus)
    if values._gpu_memory_gb is not None:
        size = _bytes(values._gpu_memory_gb, "--gpu-memory-gb")
        return Machine(f"a GPU of {values._gpu_memory_gb:g} GB", size, host)
    gpus = () if run.train.device.startswith("cpu") else find_gpus(os.environ)
    smallest = min((gpu.num_bytes for gpu in gpus), default=0)
    if smallest:
        return Machine(gpus[0].name, smallest, host or host_memory(), len(gpus))
    return Machine("this machine's CPU" if host is None else "a CPU machine", None, host or host_memory())


def _job(
    run: RunConfig,
    values: argparse.Namespace,
    explicit: frozenset[str],
    gpus: tuple[int, int],
    shape: ModelShape,
    *,
    has_gpu: bool,
) -> PlannedJob:
    train, engine = run.train.on_device(gpu=has_gpu), run.engine
    train_gpus, engine_gpus = gpus
    longest = longest_sequence(run, explicit)
    completion = min(run.env.max_token_length, longest)
    prompt = values._prompt_tokens
    if prompt is None:
        prompt = hardware.BUILT_IN_PROMPT_TOKENS.get(run.env.name, max(1, longest - completion))
    if prompt < 1:
        raise ConfigError(f"--prompt-tokens {prompt} is no length", fix="--prompt-tokens 512")
    has_liger = train.fused_kernels == "liger"
    # vLLM reserves its share of the GPU; the transformers engine allocates on demand.
    is_apart = engine_gpus > 0 and engine.engine != "transformers"
    has_share = "engine.gpu_memory_utilization" in explicit or has_vllm(engine) or is_apart
    # A micro-batch is never larger than a step with the longest completions. On a GPU full micro-batches are planned
    # anyway: the small built-in tasks are not what a GPU is used for.
    num_groups = max(1, train.sequences_per_step // run.env.group_size)
    step_tokens = num_groups * (prompt + run.env.group_size * completion)
    return PlannedJob(
        shape,
        mode=_mode(run, values, is_one_device=train_gpus == 1 and engine_gpus == 0),
        train_gpus=train_gpus,
        engine_gpus=engine_gpus,
        shard=train.shard,
        replicas=train.replicas,
        ranks_multiple=train.ranks_multiple,
        offloads_weights=train.offload_weights,
        weight_mode=train.weight_bridge_mode,
        weight_bytes=_weight_bytes(run, has_gpu=has_gpu),
        optimizer=train.optimizer,
        gradient_bytes=4 if train.gradient_dtype == "float32" else 2,
        train_layers=train.train_layer_indices,
        quantization=train.quantization,
        lora=train.lora,
        lora_r=train.lora_r,
        lora_targets=train.lora_target_modules,
        micro_tokens=train.micro_tokens if has_gpu else min(train.micro_tokens, step_tokens),
        prompt_tokens=prompt,
        completion_tokens=completion,
        group_size=run.env.group_size,
        shares_prompts=train.share_prompts != "off",
        logprob_chunk=LOGPROB_CHUNK["cuda" if has_gpu else "cpu"],
        is_checkpointed=train.gradient_checkpointing,
        # Layers are compiled only with variable-length attention on a GPU, and not by context groups.
        is_compiled=(
            train.compile != "off"
            and has_gpu
            and train.attention in ("auto", "varlen", "flash4")
            and not has_liger
            and train.context_parallel == 1
        ),
        has_liger=has_liger,
        is_lean=not has_gpu,
        has_block_attention=train.attention == "blocks" or (train.attention == "auto" and not has_gpu),
        has_reference=train.kl_coef > 0 and train.kl_against == "reference",
        is_reference_offloaded=train.reference_offload,
        max_num_seqs=concurrent_sequences(run, explicit),
        max_model_len=longest,
        gpu_memory_utilization=engine.gpu_memory_utilization if has_share else None,
    )


def _mode(run: RunConfig, values: argparse.Namespace, *, is_one_device: bool) -> Mode:
    """--mode, else what the trainer does with these settings (train/policy.py)."""
    broadcasts = run.train.use_shared_memory
    if values._mode is not None:
        mode: Mode = values._mode
        if mode == "single-copy" and run.train.lora and not (run.train.mode.single_copy and not broadcasts):
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
    if not run.train.mode.publishes:
        return "none"
    is_shared = run.train.mode.in_memory and not broadcasts
    return "single-copy" if is_shared and is_one_device and run.train.epochs == 1 else "two-copies"


def _weight_bytes(run: RunConfig, *, has_gpu: bool) -> int:
    dtype: str = run.engine.dtype if run.train.dtype == "auto" else run.train.dtype
    if dtype == "fast":
        dtype = fast_dtype("cuda" if has_gpu and run.engine.device != "cpu" else "cpu")
    return 4 if dtype == "float32" else 2


def _bytes(gigabytes: float, flag: str) -> int:
    if not 0 < gigabytes < 1e6:
        raise ConfigError(f"{flag} {gigabytes:g} is no size of a memory", fix=f"{flag} 80")
    return round(gigabytes * 1e9)
