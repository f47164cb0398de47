"""Run `treadle plan` and `treadle run --fit`: read the flags, estimate, and print or apply a suggestion."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import get_args

from rich.console import Console

from treadle.budget import hardware
from treadle.budget.estimate import HOST, estimate
from treadle.budget.hardware import Machine, card_bytes, find_gpu, host_memory
from treadle.budget.job import Budget, Mode, PlannedJob
from treadle.budget.output import StartCommands, as_json, show
from treadle.budget.shapes import find_shape, shape_of_size
from treadle.budget.suggestions import SAFE, largest_micro_tokens, settings_of, suggest, take_less
from treadle.config.load import (
    concurrent_sequences,
    explicit_keys,
    fitting_group_size,
    keys_in,
    longest_sequence,
    value_of,
    with_fitting_groups,
    with_values,
)
from treadle.config.schema import RunConfig, has_vllm
from treadle.config.train import LOGPROB_CHUNK
from treadle.envs.base import load_environment
from treadle.errors import ConfigError, ModelError, TreadleError
from treadle.formatting import gigabytes
from treadle.support import fast_dtype

LESS = 0.75  # of the planned peak, for a run that ran out of memory


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `treadle plan`; their destinations begin with `_`, because they are not settings of the run."""
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
) -> tuple[PlannedJob, Machine]:
    """The job that `treadle run` would start with these settings, and the machine it is planned for; `explicit` as in
    `build_plan`. Settings that `treadle run` refuses are refused here too."""
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
        "train.ranks": train_gpus,
        "engine.tensor_parallel_size": max(1, engine_gpus),
        "env.group_size": group_size,
    }
    run = with_values(run, planned)
    run.check_together()
    return _job(run, values, explicit, (train_gpus, engine_gpus), has_gpu=machine.has_gpu), machine


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
    trainers = next((flag.split()[1] for flag in flags if flag.startswith("--train-gpus ")), run.train.ranks)
    given = {key: value for name, value in settings_of(flags).items() for key in keys_in(run, [name])}
    try:
        changed = with_values(run, {**given, "train.ranks": trainers})
        with_fitting_groups(changed, explicit_keys(run) | given.keys()).check_together()
    except ConfigError:
        return False
    return True


def _gpus(run: RunConfig, values: argparse.Namespace) -> tuple[int, int]:
    """(GPUs of the trainer, additional GPUs of the engine), from the flags of the plan, else from those of the run."""
    engine, split = run.engine, run.engine.tensor_parallel_size
    indices = {device.partition(":")[2] or "0" for device in (engine.device, run.train.device)}
    has_own_gpu = split > 1 or bool(run.engine_url) or len(indices) > 1
    engine_gpus = (split if has_own_gpu else 0) if values._engine_gpus is None else values._engine_gpus
    if split not in (1, engine_gpus):
        raise ConfigError(
            f"--engine-gpus {engine_gpus} and --engine.tensor-parallel-size {split} contradict each other",
            fix="give only one of them",
        )
    return run.train.ranks if values._train_gpus is None else values._train_gpus, engine_gpus


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
    model = train.model if "train.model" in explicit else run.model
    has_liger = train.fused_kernels == "liger"
    # vLLM reserves its share of the GPU; the transformers engine allocates on demand.
    has_share = "engine.gpu_memory_utilization" in explicit or has_vllm(engine)
    # A micro-batch is never larger than a step with the longest completions. On a GPU full micro-batches are planned
    # anyway: the small built-in tasks are not what a GPU is used for.
    num_groups = max(1, train.sequences_per_step // run.env.group_size)
    step_tokens = num_groups * (prompt + run.env.group_size * completion)
    return PlannedJob(
        find_shape(model) if values._params is None else shape_of_size(values._params),
        mode=_mode(run, values, is_one_device=train_gpus == 1 and engine_gpus == 0),
        train_gpus=train_gpus,
        engine_gpus=engine_gpus,
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
        # Layers are compiled only with variable-length attention on a GPU.
        is_compiled=(
            train.compile != "off" and has_gpu and train.attention in ("auto", "varlen", "flash4") and not has_liger
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


def plan_memory(run: RunConfig, values: argparse.Namespace, console: Console | None = None) -> int:
    """Print the budget. Exit code 1: the job does not fit, for use in scripts."""
    job, machine = read_request(run, values)
    budget = estimate(job, machine)
    suggestions = [] if budget.verdict == "fits" else suggest(job, machine, partial(accepts, run))
    largest_micro = largest_micro_tokens(job, machine)
    start = StartCommands.of(run, values)
    if values._json:
        print(json.dumps(as_json(budget, suggestions, largest_micro, start), indent=2))
    else:
        show(console or Console(), budget, suggestions, largest_micro, start)
    return 1 if budget.verdict == "does not fit" else 0


def fit_run(
    load: Callable[[Mapping[str, str]], RunConfig], say: Callable[[str], None], console: Console | None = None
) -> RunConfig:
    """`treadle run --fit`: the run with the first suggestion that fits on the GPUs of this machine.

    `load` adds settings to those of the user. Without a suggestion that fits, the plan is printed and the run refused.
    """
    run = load({})
    values = _plan_flags()
    try:
        job, machine = read_request(run, values)
    except ModelError as error:
        fix = "leave --fit out, or give a folder with a config.json by --model"
        raise ModelError(f"--fit cannot plan this run: {error.message}", fix=fix) from None
    budget = estimate(job, machine)
    if budget.verdict in SAFE:
        say(f"--fit changes nothing: {_peaks(budget)}")
        return run
    offers = suggest(job, machine, partial(accepts, run))
    for offer in offers:
        planned = offer.budget.job
        if (planned.train_gpus, planned.engine_gpus) != (job.train_gpus, job.engine_gpus):
            continue  # it needs more GPUs, or another pool for them
        changed = load(settings_of(offer.flags))
        after = estimate(*read_request(changed, values))
        if after.verdict == "does not fit":
            continue
        for flag in offer.flags:
            say(f"--fit sets {flag} (was {_value_before(run, flag)})")
        say(f"--fit: {_peaks(after)}")
        return changed
    if budget.verdict == "tight":
        say(f"--fit changes nothing: {_peaks(budget)}, and no setting of treadle takes less")
        return run
    show(console or Console(stderr=True), budget, offers, None)
    raise ConfigError(
        f"this run does not fit on {machine.name}, and --fit found no settings with which it does",
        fix="take a smaller model or larger GPUs",
    )


def _peaks(budget: Budget) -> str:
    """ "trainer GPU 21.3 of 24.0 GB, host 4.1 of 64.0 GB: fits"."""
    sizes = [
        f"{pool.name} {gigabytes(pool.peak)}" + ("" if pool.capacity is None else f" of {gigabytes(pool.capacity)}")
        for pool in budget.pools
    ]
    return f"{', '.join(sizes)}: {budget.verdict}"


def _value_before(run: RunConfig, flag: str) -> str:
    """The value that a flag replaces; a flag of several environments may replace a different one in each: "16, 512"."""
    values = [value_of(run, key) for name in settings_of([flag]) for key in sorted(keys_in(run, [name]))]
    return ", ".join(dict.fromkeys(str(value).lower() if isinstance(value, bool) else str(value) for value in values))


def _plan_flags() -> argparse.Namespace:
    """The defaults of the flags of `treadle plan`."""
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return parser.parse_args([])


def show_what_fits(run: RunConfig, console: Console, *, of_host: bool = False) -> None:
    """For a run that ran out of GPU memory, or with `of_host` out of host memory: print its plan on this machine and
    flags that need less. `run` is the complete configuration."""
    values = _plan_flags()
    try:
        # The configuration of a started run has every setting, also an engine share that is not used.
        job, machine = read_request(run, values, explicit_keys(run) - {"engine.gpu_memory_utilization"})
    except TreadleError as error:  # such as a model of unknown shape
        console.print(f"no plan of its memory: {error}", style="dim")
        return
    budget = estimate(job, machine)
    has_room = budget.verdict != "does not fit"
    concerned = [p for p in budget.pools if (p.name == HOST) == (of_host or not machine.has_gpu)] if has_room else []
    most = {pool.name: round(LESS * pool.peak) for pool in concerned}
    offers = take_less(job, machine, most, partial(accepts, run))
    show(console, budget, offers, None)
    if has_room:
        found = f"These flags take {1 - LESS:.0%} less." if offers else "No flags take much less."
        console.print(f"By this plan there is room: something else has some, or this job needs more. {found}")
