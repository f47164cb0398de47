"""List the spellings of settings that are accepted beside ours, and the flags that are accepted and do nothing.

Most are those of Atropos' environments and example trainer, whose command lines and files work unchanged. DeepSpeed's
file of settings is translated by config/deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from treadle.config import deepspeed
from treadle.errors import ConfigError

# Field -> other spellings of its flag and key, in every section that has the field.
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model_name", "model_path"),
    "steps": ("training_steps",),
    "hub_url": ("atropos_url", "rollout_server_url"),
    "max_age": ("max_batches_offpolicy",),
    "lr": ("learning_rate",),
    "max_num_workers": ("max_num_workers_per_node", "max_num"),
    "min_batch_allocation": ("minimum",),
    "inference_weight": ("weight",),
    "use_trackers": ("use_wandb",),
    "tensor_parallel_size": ("tp",),
    "train_layer_indices": ("lora_layer_indices",),
    "ranks": ("world_size",),
    "min_engines": ("num_inference_nodes",),
    "from_run": ("from",),
}


class Shorthand(NamedTuple):
    """A flag and key of the section `train` that sets other settings of it."""

    metavar: str
    help: str
    sets: tuple[str, ...]
    expand: Callable[[Any, Mapping[str, Any]], dict[str, Any]]  # (its value, the other settings) -> what it sets


def _both_bounds(bound: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"clip_low": bound, "clip_high": bound}


def _local_url(port: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if not str(port).isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"'train.vllm_port' is {port!r}, and ports are 1 to 65535", fix="correct --train.vllm-port")
    return {"engine_url": f"http://127.0.0.1:{port}"}


def _with_wandb(is_used: Any, train: Mapping[str, Any]) -> dict[str, Any]:
    """False takes wandb out again: a flag wins over a file."""
    try:
        is_wanted = TypeAdapter(bool).validate_python(is_used)
    except ValidationError:
        raise ConfigError(f"'train.use_wandb' is {is_used!r}", fix="give --train.use-wandb true or false") from None
    track = train.get("track")
    present = track.replace(",", " ").split() if isinstance(track, str) else track or ()
    others = tuple(name for name in present if name != "wandb")
    return {"track": (*others, "wandb") if is_wanted else others}


SHORTHANDS: dict[str, Shorthand] = {
    "clip_eps": Shorthand("X", "sets clip_low and clip_high", ("clip_low", "clip_high"), _both_bounds),
    "vllm_port": Shorthand("N", "sets engine_url to this port of this machine", ("engine_url",), _local_url),
    "use_wandb": Shorthand("TRUE|FALSE", "adds wandb to track", ("track",), _with_wandb),
    "deepspeed_config": Shorthand(
        "FILE",
        "sets what a ds_config.json says: sharding, batch, optimizer, schedule, number format; flags win over it",
        deepspeed.TRANSLATED,
        deepspeed.read_settings,
    ),
}


def expand_shorthands(train: dict[str, Any]) -> None:
    """Replace each shorthand by the settings that it sets.

    >>> train = {"clip_eps": 0.2, "lr": 1e-5}
    >>> expand_shorthands(train)
    >>> train
    {'lr': 1e-05, 'clip_low': 0.2, 'clip_high': 0.2}
    """
    for name in SHORTHANDS.keys() & train.keys():
        given = train.pop(name)
        if given is not None:
            train |= SHORTHANDS[name].expand(given, train)


_TOKENIZER = "the tokenizer is that of --openai.model, or of the engine's own model"
_EVALUATION = "an evaluation runs beside training, on --env.eval-limit-ratio of the engine"
_NO_RATE_LIMIT = "there is no rate limit; --env.max-num-workers limits the groups in flight"
_SYSTEM_PROMPT = "write the system prompt that asks for it: --env.system-prompt"
_ENGINE_URL = "give the engine's URL by --openai.base-url"
_OWN_PROCESS = "the engine is a process of its own"

# Dotted key of a file, which is a flag of `treadle env` or (without "train.") of `treadle train` -> what is printed.
NO_EFFECT: dict[str, str] = {
    "env.tokenizer-name": _TOKENIZER,
    "env.batch-size": "the trainer says how large a batch is",
    "env.num-rollouts-per-group-for-logging": "one rollout of a group is in the table; all of them are in the hub",
    "env.num-rollouts-to-keep": "a table of rollouts has 32 rows; all of them are in the hub",
    "env.min-items-sent-before-logging": "metrics are sent with every group",
    "env.include-messages": "messages are always sent",
    "env.max-eval-workers": _EVALUATION,
    "env.eval-handling": _EVALUATION,
    "env.start-tok-length": "a reply has --env.max-token-length tokens from the beginning",
    "env.thinking-mode": _SYSTEM_PROMPT,
    "env.reasoning-effort": _SYSTEM_PROMPT,
    "env.max-reasoning-tokens": "--env.max-token-length bounds the whole reply",
    "env.custom-thinking-prompt": _SYSTEM_PROMPT,
    "openai.rolling-buffer-length": "latencies are in the engine's metrics",
    "openai.num-max-requests-at-once": "--env.max-num-workers bounds the groups in flight",
    "openai.num-requests-for-eval": _EVALUATION,
    "openai.n-kwarg-is-ignored": "our engine heeds n",
    "openai.health-check": "an engine that is away is waited for",
    "openai.tokenizer-name": _TOKENIZER,
    "slurm": _ENGINE_URL,
    "slurm.num-requests-per-time-interval": _NO_RATE_LIMIT,
    "slurm.time-interval": _NO_RATE_LIMIT,
    "testing": "treadle env NAME validate needs no model",
    "max-n-completions": "the engine takes any n",
    "proxy-url": _ENGINE_URL,
    "train.benchmark": "every step is timed, see metrics.jsonl",
    "train.debug-loading": "what is loaded is logged, and a weight that does not fit is an error",
    "train.log-dir": "the trainer logs to stderr, or under treadle run into the run's folder",
    "train.no-reference-logprobs": "a group without logprobs is trained as sampled by the policy itself, and counted",
    "train.vllm-gpu": f"{_OWN_PROCESS}: treadle engine --gpus, or treadle run --engine.gpus",
    "train.gpu-memory-utilization": f"{_OWN_PROCESS}: treadle engine --gpu-memory-utilization",
    "train.vllm-gpu-memory-utilization": f"{_OWN_PROCESS}: treadle engine --gpu-memory-utilization",
    "train.max-model-len": f"{_OWN_PROCESS}: treadle engine --max-model-len",
}


def drop_without_effect(words: list[str], section: str = "") -> tuple[list[str], list[str]]:
    """Take the flags of NO_EFFECT out of a command line: (what is left, a sentence about each).

    `section`: that of a verb whose flags have no prefix.

    >>> drop_without_effect(["--benchmark", "--lr", "1e-5"], "train")
    (['--lr', '1e-5'], ['--benchmark has no effect: every step is timed, see metrics.jsonl'])
    """
    kept: list[str] = []
    notes: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("_", "-")
            reason = NO_EFFECT.get(f"{section}.{name}" if section else name)
            skipping = reason is not None
            if skipping:
                notes.append(f"--{name} has no effect: {reason}")
        if not skipping:
            kept.append(word)
    return kept, notes
