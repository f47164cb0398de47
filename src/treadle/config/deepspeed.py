"""Translate DeepSpeed's configuration file (ds_config.json) into settings of the trainer.

DeepSpeed is not used: torch's FSDP2 shards the model. The fields that say what to train and how to shard it set our
settings; the value "auto" leaves ours. Fields that only tune DeepSpeed have no effect and are named in one note. All
others are refused, because ignoring them would train something else than the file says.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from treadle.errors import ConfigError

# Settings that a file can set.
TRANSLATED = (
    "shard", "offload_weights", "batch_size", "gradient_accumulation_steps", "max_grad_norm", "optimizer", "lr",
    "betas", "weight_decay", "schedule", "warmup_steps", "dtype", "gradient_dtype", "gradient_checkpointing",
)  # fmt: skip
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_FORMATS = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_STAGES = {2: "zero2", 3: "fsdp2"}
_OUR_EPSILON = 1e-8
# Sections and fields that only tune or observe DeepSpeed.
_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "": (
        "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "flops_profiler",
        "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "timers", "aio", "checkpoint", "compile",
        "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients",
        "gradient_predivide_factor", "disable_allgather", "disable_python_gc", "dataloader_drop_last",
        "use_data_before_expert_parallelism", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "check_overflow", "autotuning",
    ),
    "zero_optimization": (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights",
        "elastic_checkpoint", "sub_group_size", "cpu_offload_use_pin_memory", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
        "zero_hpz_partition_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
    ),
    "zero_optimization.offload_optimizer": (
        "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "cpuadam_cores_perc",
    ),
    "zero_optimization.offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    "optimizer": ("legacy_fusion",),
    "optimizer.params": ("torch_adam", "fp32_optimizer_states"),
    "scheduler.params": ("last_batch_iteration",),
    "bf16": ("immediate_grad_update", "check_grad_overflow"),
    "fp16": (
        "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    ),
    "activation_checkpointing": (
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    ),
}  # fmt: skip
_TUNING = frozenset(f"{section}.{name}".lstrip(".") for section, names in _WITHOUT_EFFECT.items() for name in names)
# Fields that would change the result if they were on.
_ONLY_OFF = (
    "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload", "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads", "managed_gradient_accumulation",
    "sparse_gradients", "optimizer.params.amsgrad",
)  # fmt: skip
_IS_OFF = (None, False, "auto", "none")


class Translation(NamedTuple):
    """`settings` of the section `train`, and a `note` about the fields without effect ("" if there are none)."""

    settings: dict[str, Any]
    note: str


def read_settings(path: Any, train: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the file at `path` that `train` does not have; prints the note about the rest."""
    file = Path(str(path)).expanduser()
    translated = translate(_read(file), train, file.name)
    if translated.note:
        sys.stderr.write(f"{translated.note}\n")
    return {name: value for name, value in translated.settings.items() if name not in train}


def translate(config: Mapping[str, Any], train: Mapping[str, Any], source: str = "ds_config.json") -> Translation:
    """The settings that a file's content means. `train`: the settings that are given beside it, of which the number of
    ranks and of accumulated batches are needed to divide the file's batch.

    >>> translate({"zero_optimization": {"stage": 2}, "steps_per_print": 10}, {})
    Translation(settings={'shard': 'zero2'}, note='ds_config.json: 1 field has no effect: steps_per_print')
    """
    fields = _Fields(config, source)
    settings = _sharding(fields) | _optimizer(fields) | _schedule(fields) | _numbers(fields) | _batch(fields, train)
    for name in _ONLY_OFF:
        fields.take_default(name, default=False)
    fields.sort_out_rest()
    return Translation(settings, fields.note())


class _Fields:
    """The fields of a file by dotted names. `take` reads one; those that are left at the end are without effect."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._left = _flatten(config)
        self._without_effect: list[str] = []

    def take(self, name: str) -> Any:
        """The value of a field; None if it is absent or "auto"."""
        value = self._left.pop(name, None)
        return None if value == "auto" else value

    def take_one_of(self, name: str, values: Mapping[Any, Any]) -> Any:
        """What the value of a field means; any other value is refused."""
        value = self.take(name)
        if value is None:
            return None
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, str | int) and not isinstance(key, bool) and key in values:
            return values[key]
        raise self.refusal(f"{name} is {value!r}", f"supported: {', '.join(map(str, values))}")

    def take_flag(self, name: str) -> bool:
        value = self.take(name)
        if value not in (None, True, False):
            raise self.refusal(f"{name} is {value!r}", "write true or false")
        return bool(value)

    def take_count(self, name: str) -> int | None:
        value = self.take(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            return value
        raise self.refusal(f"{name} is {value!r}", "write a number from 1, or leave it out")

    def take_default(self, name: str, default: Any) -> None:
        """Read a field that has no counterpart; a value other than `default` changes the result and is refused."""
        value = self.take(name)
        if value not in (None, default):
            raise self.refusal(f"{name} {json.dumps(value)} is not supported", f"leave it out, or write {default!r}")

    def ignore(self, name: str, reason: str) -> None:
        """Name a field in the note, with the reason why it has no effect."""
        self._without_effect.append(f"{name} ({reason})")

    def has(self, section: str) -> bool:
        """Whether a field of a section is given and not off."""
        return any(name.startswith(f"{section}.") and value not in _IS_OFF for name, value in self._left.items())

    def sort_out_rest(self) -> None:
        """The fields that were not taken: tuning is for the note, all others are refused."""
        for name, value in self._left.items():
            parts = name.split(".")
            if not any(".".join(parts[:end]) in _TUNING for end in range(1, len(parts) + 1)):
                raise self.refusal(f"the field {name} is not supported", _nearest(name) or "remove it from the file")
            if value not in _IS_OFF:
                self._without_effect.append(name)

    def note(self) -> str:
        names = self._without_effect
        how_many = "1 field has" if len(names) == 1 else f"{len(names)} fields have"
        return f"{self.source}: {how_many} no effect: {', '.join(names)}" if names else ""

    def refusal(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}", fix=fix)


def _sharding(fields: _Fields) -> dict[str, Any]:
    stage = fields.take_one_of("zero_optimization.stage", {0: 0, 1: 1, 2: 2, 3: 3})
    device = fields.take_one_of("zero_optimization.offload_param.device", {"none": "", "cpu": "cpu"})
    is_offloaded = fields.take_flag("zero_optimization.cpu_offload_param") or device == "cpu"
    if is_offloaded and stage != 3:
        raise fields.refusal(
            f"offload_param keeps sharded weights in host memory, and the stage is {stage or 0}, which shards none",
            'write "stage": 3, or remove offload_param',
        )
    if stage in (0, 1):
        fields.ignore(f"zero_optimization.stage {stage}", "several ranks always shard weights, gradients and optimizer")
    shard = {"shard": _STAGES[stage]} if stage in _STAGES else {}
    return shard | ({"offload_weights": True} if is_offloaded else {})


def _optimizer(fields: _Fields) -> dict[str, Any]:
    kind = fields.take_one_of("optimizer.type", {"adamw": "adamw", "adam": "adamw"})
    device = fields.take_one_of("zero_optimization.offload_optimizer.device", {"none": "", "cpu": "cpu"})
    if fields.take_flag("zero_optimization.cpu_offload") or device == "cpu":
        kind = "adamw_cpu"
    decay = fields.take("optimizer.params.weight_decay")
    if fields.take("optimizer.params.adam_w_mode") is False and decay:
        raise fields.refusal(
            f"adam_w_mode false adds the weight decay {decay} to the gradient", 'write "adam_w_mode": true (AdamW)'
        )
    fields.take_default("optimizer.params.bias_correction", default=True)
    epsilon = fields.take("optimizer.params.eps")
    if epsilon not in (None, _OUR_EPSILON):
        fields.ignore("optimizer.params.eps", f"it is {_OUR_EPSILON:g}")
    found = {"optimizer": kind, "betas": fields.take("optimizer.params.betas"), "weight_decay": decay}
    return {name: value for name, value in found.items() if value is not None}


def _schedule(fields: _Fields) -> dict[str, Any]:
    """The schedule and the learning rate, which optimizer and scheduler can both set."""
    schedule = fields.take_one_of("scheduler.type", _SCHEDULES)
    rates = {name: fields.take(name) for name in ("optimizer.params.lr", "scheduler.params.warmup_max_lr")}
    numbers = {name: value for name, value in rates.items() if value is not None}
    if len(set(numbers.values())) > 1:
        raise fields.refusal(
            " and ".join(f"{name} {value}" for name, value in numbers.items()) + " contradict each other",
            "write the same learning rate in both, or leave one out",
        )
    if fields.take("scheduler.params.warmup_type") == "log":
        fields.ignore("scheduler.params.warmup_type log", "the warm-up is linear")
    if fields.take("scheduler.params.total_num_steps") is not None:
        fields.ignore("scheduler.params.total_num_steps", "the rate falls until --steps")
    for name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        if fields.take(f"scheduler.params.{name}"):
            fields.ignore(f"scheduler.params.{name}", "it is 0")
    found = {
        "schedule": schedule,
        "warmup_steps": fields.take("scheduler.params.warmup_num_steps"),
        "lr": next(iter(numbers.values()), None),
    }
    return {name: value for name, value in found.items() if value is not None}


def _numbers(fields: _Fields) -> dict[str, Any]:
    """Number formats, clipping and activation checkpointing."""
    is_bf16 = [fields.take_flag(name) for name in ("bf16.enabled", "bfloat16.enabled")]
    is_fp16 = fields.take_flag("fp16.enabled")
    if any(is_bf16) and is_fp16:
        raise fields.refusal("bf16 and fp16 are both enabled", "enable one of them")
    found: dict[str, Any] = {}
    if any(is_bf16) or is_fp16:
        found["dtype"] = "float16" if is_fp16 else "bfloat16"
    format = fields.take_one_of("data_types.grad_accum_dtype", _FORMATS)
    if format is not None:
        found["gradient_dtype"] = format
    norm = fields.take("gradient_clipping")
    if norm is not None:
        found["max_grad_norm"] = norm or math.inf  # 0: never
    if fields.has("activation_checkpointing"):
        found["gradient_checkpointing"] = True
    return found


def _batch(fields: _Fields, train: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's train_batch_size counts the sequences of a step; our batch_size those before accumulation."""
    total, micro, accumulation = (
        fields.take_count(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    found = {} if accumulation is None else {"gradient_accumulation_steps": accumulation}
    ranks = _count(train.get("ranks"))
    product = (micro or 1) * (accumulation or 1) * (ranks or 1)
    is_complete = None not in (total, micro, accumulation, ranks)
    if total is not None and (total % product or (is_complete and total != product)):
        factors = {
            "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation, "train.ranks": ranks,
        }  # fmt: skip
        named = " x ".join(f"{name} {factor}" for name, factor in factors.items() if factor is not None)
        raise fields.refusal(f"train_batch_size {total} and {named} contradict each other", "leave one of them out")
    if total is not None:
        steps = _count(train.get("gradient_accumulation_steps")) or accumulation or 1
        if total % steps:
            raise fields.refusal(
                f"train_batch_size {total} cannot be divided into {steps} parts (gradient_accumulation_steps)",
                "correct one of them",
            )
        found["batch_size"] = total // steps
    elif micro is not None and ranks is not None:
        found["batch_size"] = micro * ranks
        return found
    if micro is not None:
        fields.ignore("train_micro_batch_size_per_gpu", "--train.micro-tokens bounds a micro-batch")
    return found


def _count(value: Any) -> int | None:
    """A positive number as flags or files give it, else None."""
    return int(value) if str(value).isdecimal() and int(value) else None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"bf16": {"enabled": true}} -> {"bf16.enabled": True}; without the sections that are not enabled."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, dict):
            found[f"{prefix}{name}"] = value
        elif value.get("enabled", True) not in _IS_OFF:
            found |= _flatten(value, f"{prefix}{name}.")
    return found


def _nearest(name: str) -> str:
    known = [*_TUNING, "zero_optimization.stage", "train_batch_size", "gradient_clipping", "optimizer.params.lr"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean '{near[0]}'?" if near else ""


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: _without_repetition(pairs, file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", fix="correct --train.deepspeed-config") from None
    except ValueError as error:
        raise ConfigError(f"{file} cannot be parsed as JSON: {error}", fix="correct that line") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no DeepSpeed configuration", fix='write {"zero_optimization": {"stage": 2}}')
    return config


def _without_repetition(pairs: Collection[tuple[str, Any]], file: Path) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"'{twice}' is given twice in {file}", fix="keep one of them")
    return dict(pairs)
