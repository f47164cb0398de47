"""Find environments by name, or by the file that they are written in; and parse their `--env.args`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.load import parse, suggest
from treadle.envs.base import Environment
from treadle.envs.rewards import registry
from treadle.envs.rewards.addresses import is_session_code, load_file
from treadle.errors import ConfigError

A = TypeVar("A", bound=msgspec.Struct)
E = TypeVar("E", bound=type[Environment])
_REGISTRY: dict[str, type[Environment]] = {}
_BUILT_IN = {
    "agent": "treadle.envs.foreign.agent",
    "arithmetic": "treadle.envs.tasks.arithmetic",
    "code": "treadle.envs.tasks.code",
    "echo": "treadle.envs.tasks.arithmetic",
    "gsm8k": "treadle.envs.tasks.word_problems",
    "jsonl": "treadle.envs.tasks.jsonl",
    "reasoning_gym": "treadle.envs.tasks.reasoning_gym",
    "svamp": "treadle.envs.tasks.word_problems",
    "tools": "treadle.envs.tasks.tools",
}
_OF_OTHERS = {"verifiers": "treadle.envs.foreign.verifiers"}  # "verifiers:NAME" is the environment NAME of that library


def parse_args(config: EnvConfig, kind: type[A]) -> A:
    """`config.args` as a `kind`; ConfigError with the known names for an unknown name or a wrong value."""
    try:
        return msgspec.convert(config.args, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(
            f"--env.args of the environment '{config.own_name}': {error}", fix=f"it knows: {known}"
        ) from None


def environment(name: str) -> Callable[[E], E]:
    """Class decorator: `treadle env NAME` finds the class under this name."""

    def register(cls: E) -> E:
        earlier = _REGISTRY.get(name, cls)
        if earlier is not cls and not (is_session_code(earlier) or is_session_code(cls)):
            raise ConfigError(f"two environments are called '{name}'", fix="rename one of them")
        _REGISTRY[name] = cls
        return cls

    return register


def load_environment(config: EnvConfig) -> Environment:
    """`config.name` is a built-in name; a file: "./my_env.py", or "./my_env.py:name" if it has several; or
    "verifiers:name".

    Its `config` has the environment's own defaults for settings that are not set.
    """
    kind = _find(config)
    defaults = _checked_defaults(kind)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"the environment '{config.name}' lacks {', '.join(f'{name}()' for name in missing)}",
            fix=f"write it in the class {kind.__name__}; docs/environments.md shows a whole task",
        )
    made = kind(config.model_copy(update={k: v for k, v in defaults.items() if k not in config.model_fields_set}))
    if config.rewards:
        made.rewards = config.rewards
    if made.rewards:
        registry.create(made.rewards)  # report errors before an engine is needed
    elif kind.score is Environment.score and not made.has_turns:
        raise ConfigError(
            f"the environment '{config.own_name}' does not say what an answer is worth",
            fix=f"give {kind.__name__} rewards, or a method score or rollout",
        )
    return made


def _checked_defaults(kind: type[Environment]) -> dict[str, Any]:
    """The defaults of the task and its base class, validated as settings."""
    given = {**Environment.defaults, **kind.defaults}
    try:
        understood = parse(EnvConfig, given, source=f"the defaults of {kind.__name__}")
    except ConfigError as error:
        is_unknown = error.message.startswith("unknown key")
        raise ConfigError(error.message, fix=error.fix if is_unknown else "correct it in the class") from None
    return {name: getattr(understood, name) for name in given}


def _find(config: EnvConfig) -> type[Environment]:
    path, _, chosen = config.name.partition(".py")
    if path != config.name and (not chosen or chosen.startswith(":")):
        return _from_file(Path(f"{path}.py"), chosen.removeprefix(":"))
    library, is_of_others, _ = config.name.partition(":")
    if is_of_others and library in _OF_OTHERS:
        importlib.import_module(_OF_OTHERS[library])
        return _REGISTRY[library]
    if config.name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[config.name])
    if config.name not in _REGISTRY:
        known = sorted({*_BUILT_IN, *_REGISTRY, *(f"{library}:NAME" for library in _OF_OTHERS)})
        hint = _file_of(config.name) or suggest(config.name, known)
        hint = hint or f"known environments: {', '.join(known)}; or the path of a .py file"
        raise ConfigError(f"unknown environment '{config.name}'", fix=hint)
    return _REGISTRY[config.name]


def _file_of(name: str) -> str:
    """`did you mean my_env.py?`, if the suffix is missing."""
    stem, colon, chosen = name.partition(":")
    return f"did you mean {stem}.py{colon}{chosen}?" if stem and Path(f"{stem}.py").is_file() else ""


def _from_file(path: Path, chosen: str) -> type[Environment]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", fix="check the path of the environment")
    module = load_file(path)
    own = {name: cls for name, cls in _REGISTRY.items() if cls.__module__ == module.__name__}
    if chosen:
        if chosen not in own:
            raise ConfigError(f"{path} has no environment '{chosen}'", fix=f"it has: {', '.join(own) or 'none'}")
        return own[chosen]
    if len(own) != 1:
        found = f"has several environments: {', '.join(own)}" if own else "has no environment"
        fix = f"choose one: {path}:{next(iter(own))}" if own else 'put @environment("name") above its class'
        raise ConfigError(f"{path} {found}", fix=fix)
    return next(iter(own.values()))
