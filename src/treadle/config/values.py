"""Settings by dotted keys such as "hub.port", and settings that follow from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from treadle.config.atropos import SHORTHANDS
from treadle.config.env import DEFAULT_MAX_AGE, MIN_GROUP_SIZE
from treadle.config.load import parse
from treadle.config.schema import RunConfig, has_vllm
from treadle.config.section import set_value
from treadle.errors import ConfigError

PROMPT_ROOM = 1024  # tokens before a completion
MAX_DERIVED_SEQUENCES = 1024  # on an H200 more in flight are not faster (docs/engine.md)


def explicit_keys(config: BaseModel, prefix: str = "") -> frozenset[str]:
    """The keys that the user gave: `--hub.port 8100 --steps 9` -> {"hub.port", "steps"}; "envs.1.task"."""
    keys: set[str] = set()
    for name in config.model_fields_set:
        value = getattr(config, name)
        if name == "envs":
            keys |= {key for place, env in enumerate(value) for key in explicit_keys(env, f"envs.{place}.")}
        else:
            keys |= explicit_keys(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
    return frozenset(keys)


def keys_in(config: RunConfig, overrides: Iterable[str]) -> frozenset[str]:
    """The settings that flags change: "env.seed" stands for the seed of each environment."""
    keys: set[str] = set()
    for key in overrides:
        section, _, name = key.rpartition(".")
        if section == "env":
            keys |= set(config.keys_of_envs(name))
        elif section == "train" and name in SHORTHANDS:
            keys |= {f"train.{setting}" for setting in SHORTHANDS[name].sets}
        else:
            keys.add(key)
    return frozenset(keys)


def value_of(config: RunConfig, dotted: str) -> Any:
    """The value of a setting: `value_of(config, "hub.port")`."""
    value: Any = config
    for name in dotted.split("."):
        value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
    return value


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy with `values` ({"hub.port": 8100}) replaced, validated as a whole."""
    merged = config.model_dump()
    for dotted, value in values.items():
        set_value(merged, dotted, value)
    return parse(RunConfig, merged, source="the command line")


def choose_steps(config: RunConfig, explicit: frozenset[str]) -> int:
    """`--steps` and `--train.steps` are the same setting; two different values are an error."""
    if "train.steps" not in explicit or config.train.steps == config.steps:
        return config.steps
    if "steps" in explicit:
        raise ConfigError(f"steps = {config.steps} and train.steps = {config.train.steps}", fix="give only steps")
    return config.train.steps


def longest_sequence(config: RunConfig, explicit: frozenset[str]) -> int:
    """Maximum sequence length of engine and trainer: as the user gave it for one, else a prompt and a completion."""
    given = {"engine.max_model_len": config.engine.max_model_len, "train.seq_len": config.train.seq_len}
    asked = [value for key, value in given.items() if key in explicit]
    completion = max(env.max_token_length for env in config.environments)
    wanted = -(-(completion + PROMPT_ROOM) // 256) * 256
    return min(asked) if asked else max(*given.values(), wanted)


def concurrent_sequences(config: RunConfig, explicit: frozenset[str]) -> int:
    """Completions that the engine generates at the same time: as the user gave it, else for vLLM all that may be in
    flight, which are the batches of 1 + max_age steps, or twice as many if groups with equal scores are dropped."""
    given = config.engine.max_num_seqs
    if "engine.max_num_seqs" in explicit or not has_vllm(config.engine):
        return given
    max_age = DEFAULT_MAX_AGE if config.max_age is None else config.max_age
    in_flight = (1 + max_age) * config.train.sequences_per_step
    may_drop = any(env.ensure_scores_are_not_same for env in config.environments)
    return max(given, min(MAX_DERIVED_SEQUENCES, in_flight * (2 if may_drop else 1)))


def fitting_group_size(group_size: int, batch_size: int) -> int:
    """The group size, or the batch size if that is smaller: a batch consists of whole groups.

    >>> fitting_group_size(8, 4), fitting_group_size(8, 64)
    (4, 8)
    """
    return batch_size if MIN_GROUP_SIZE <= batch_size < group_size else group_size


def with_fitting_groups(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """A copy with groups no larger than a batch, unless the user chose their size."""
    keys = [key for key in config.keys_of_envs("group_size") if key not in explicit]
    sequences = config.train.sequences_per_step
    return with_values(config, {key: fitting_group_size(value_of(config, key), sequences) for key in keys})
