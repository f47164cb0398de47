"""Create rewards by name: `registry.create("length", target=200)`, `registry.create({"type": "boxed_math"})`.

Built-in rewards are listed by address and imported on first use, so that every name works in a fresh interpreter and
always gives the same class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec

from treadle.envs.rewards.addresses import is_session_code, load_address
from treadle.envs.rewards.base import (
    CALLED_WITH,
    BatchFunctionReward,
    FunctionReward,
    Reward,
    registered_name,
    required_arguments,
)
from treadle.errors import ConfigError

R = TypeVar("R", bound=type[Reward])
RewardLike = Reward | str | Mapping[str, Any] | Callable[..., Any] | Sequence["RewardLike"]

_HERE = "treadle.envs.rewards"
BUILT_IN = {
    "length": f"{_HERE}.text:LengthReward",
    "think_format": f"{_HERE}.text:ThinkFormatReward",
    "format": f"{_HERE}.text:FormatReward",
    "repetition_penalty": f"{_HERE}.text:RepetitionPenaltyReward",
    "reasoning_steps": f"{_HERE}.text:ReasoningStepsReward",
    "cosine_scaled": f"{_HERE}.combined:CosineScaledReward",
    "cosine_length": f"{_HERE}.combined:CosineScaledReward",
    "exact_match": f"{_HERE}.text:ExactMatchReward",
    "regex": f"{_HERE}.text:RegexReward",
    "json_schema": f"{_HERE}.text:JsonSchemaReward",
    "boxed_math": f"{_HERE}.text:BoxedMath",
    "accuracy": f"{_HERE}.text:AccuracyReward",
    "unit_tests": f"{_HERE}.unit_tests:UnitTestsReward",
    "judge": f"{_HERE}.judge:JudgeReward",
    "reward_model": f"{_HERE}.reward_model:RewardModelReward",
    "combined": f"{_HERE}.combined:CombinedReward",
    "r1": f"{_HERE}.combined:R1Reward",
}


def _build(entry: type[Reward] | FunctionReward, settings: Mapping[str, Any], name: str) -> Reward:
    try:
        if isinstance(entry, FunctionReward):
            return entry.with_settings(settings)
        return entry.from_settings(settings)
    except msgspec.ValidationError as error:
        known = ", ".join(entry.__struct_fields__)
        raise ConfigError(f"reward '{name}': {error}", fix=f"its settings are: {known}") from None


def _from_function(
    function: Callable[..., Any], *, name: str = "", weight: float = 1.0, per_group: bool = False
) -> FunctionReward:
    """A function of lists if its parameter names say so, else of one completion (`per_group`: of a group)."""
    parameters, required = inspect.signature(function).parameters, required_arguments(function)
    if not per_group and not set(parameters).isdisjoint(CALLED_WITH):
        return BatchFunctionReward(function=function, name=name, weight=weight)
    takes_any = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
    if len(required) == 1 or (takes_any and not required):
        return FunctionReward(function=function, name=name, weight=weight, per_group=per_group)
    argument = "group: list[RewardInput]" if per_group else "completion: RewardInput"
    raise ConfigError(
        f"reward '{function.__name__}' has the arguments ({', '.join(required)}), but a reward takes one argument, "
        f"{argument}",
        fix=f"write def {function.__name__}({argument}): text, answer, prompt and metadata are its fields, and "
        f"an argument with a default is a setting; or def {function.__name__}(completions, **kwargs), as for TRL",
    )


def _key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").removesuffix("reward")


def _address(entry: type[Reward] | FunctionReward) -> tuple[str, str]:
    """Identity of a reward; without the module name, which differs when a file is run as a script."""
    thing = entry.function if isinstance(entry, FunctionReward) else entry
    code = inspect.getsourcefile(thing) or thing.__module__
    return code, thing.__qualname__


def _is_session_code(entry: type[Reward] | FunctionReward) -> bool:
    return is_session_code(entry.function if isinstance(entry, FunctionReward) else entry)


class Registry:
    """Names -> rewards. "think_format", "ThinkFormat" and "ThinkFormatReward" are one name."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = {_key(name): (name, address) for name, address in addresses.items()}
        self._added: dict[str, tuple[str, type[Reward] | FunctionReward]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(name for name, _ in (*self._addresses.values(), *self._added.values()))

    def add(self, name: str, entry: type[Reward] | FunctionReward) -> None:
        key = _key(name)
        if key in self._addresses:
            raise ConfigError(f"'{name}' is the name of a built-in reward", fix="call yours something else")
        # A file that is run twice (as a script and as a module) registers the same reward twice; a notebook cell may
        # register a changed one.
        earlier = self._added[key][1] if key in self._added else entry
        if not (_is_session_code(earlier) or _is_session_code(entry)) and _address(earlier) != _address(entry):
            raise ConfigError(f"two rewards are called '{name}'", fix="rename one: @reward(name=...)")
        self._added[key] = (name, entry)

    def create(self, what: RewardLike, /, **settings: Any) -> Reward:
        """From a name, an address, a function, a dict `{"type", "weight", "name", "params"}`, or a list of these: their
        sum."""
        if isinstance(what, Reward):
            if settings:
                raise ConfigError(f"reward '{what.name}' is made already", fix="give settings where it is made")
            return what
        if isinstance(what, str):
            return _build(self._entry(what), settings, what)
        if isinstance(what, Mapping):
            return self._from_mapping(what, settings)
        if inspect.isfunction(what):
            return _build(_from_function(what), settings, what.__name__)
        if inspect.isclass(what):
            raise ConfigError(f"{what.__name__} is a class, not a reward", fix=f"make one of it: {what.__name__}()")
        if not isinstance(what, Sequence):
            name = getattr(what, "__name__", repr(what))
            raise ConfigError(f"{name} is not a reward", fix="give a name, a function, or a list of these")
        return _build(
            self._entry("combined"), {"rewards": [self.create(part) for part in what], **settings}, "combined"
        )

    def _from_mapping(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Reward:
        unknown = set(config) - {"type", "weight", "name", "params"}
        if unknown or "type" not in config:
            problem = f"does not know {sorted(unknown)}" if unknown else "has no 'type'"
            raise ConfigError(
                f"the reward {dict(config)!r} {problem}", fix='write {"type", "weight", "name", "params"}'
            )
        own = {key: config[key] for key in ("weight", "name") if key in config}
        return _build(self._entry(config["type"]), {**settings, **config.get("params", {}), **own}, config["type"])

    def _entry(self, name: str) -> type[Reward] | FunctionReward:
        key = _key(name)
        if ":" in name:
            entry = load_address(name)
            if inspect.isfunction(entry):
                return _from_function(entry)
            if isinstance(entry, FunctionReward) or (inspect.isclass(entry) and issubclass(entry, Reward)):
                return entry
            raise ConfigError(f"'{name}' is no reward", fix="name a function or a subclass of Reward")
        if key in self._added:
            return self._added[key][1]
        if key in self._addresses:
            return self._entry(self._addresses[key][1])
        from treadle.config.load import suggest  # imported late: reward workers do not need it

        hint = suggest(name, self.names) or f"known rewards: {', '.join(self.names)}; or give file.py:name"
        raise ConfigError(f"unknown reward '{name}'", fix=hint)


registry = Registry(BUILT_IN)


@overload
def reward(target: R, /) -> R: ...
@overload
def reward(target: Callable[..., Any], /) -> FunctionReward: ...
@overload
def reward(*, name: str = "", weight: float = 1.0, group: bool = False) -> Callable[[Any], Any]: ...
def reward(target: Any = None, /, *, name: str = "", weight: float = 1.0, group: bool = False) -> Any:
    """Turn a function into a reward, or register a class. `group=True`: the function takes a whole group.

    A function with an argument `completions`, `prompts` or `completion_ids` is called with lists, as by TRL.

    @reward
    def is_short(completion: RewardInput, limit: int = 200) -> float:
        return completion.length < limit
    """

    def register(target: Any) -> Any:
        if inspect.isclass(target) and issubclass(target, Reward):
            registry.add(name or registered_name(target.__name__), target)
            return target
        made = _from_function(target, name=name, weight=weight, per_group=group)
        registry.add(made.name, made)
        return made

    return register if target is None else register(target)
