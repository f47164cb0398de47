"""What a reward is: a frozen value with a weight, its settings, and one method.

    @reward
    def is_polite(completion: RewardInput) -> float:
        return "please" in completion.text.lower()

    @reward
    class NearReward(Reward):              # registry.create("near", tolerance=0.1)
        tolerance: float = 0.5

        def score(self, completion: RewardInput) -> float:
            return abs(float(completion.text) - float(completion.answer)) <= self.tolerance

Settings are fields with a type, not arguments of `__init__`: so they are checked when they come from a file, and can be
sent to the process that scores.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Self

import msgspec

from treadle.envs.rewards.source import source_of
from treadle.errors import ConfigError, require


class RewardInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion and what it is judged by: `RewardInput("The answer is 4.", answer="4")`."""

    text: str
    answer: str = ""
    prompt: str = ""
    num_tokens: int | None = None  # of the completion, where the engine told
    finish_reason: str = "stop"  # "length": it was cut off
    metadata: dict[str, Any] = {}  # the rest of the data row
    # Filled in for functions that take lists (batch_function.py).
    messages: list[dict[str, Any]] = []  # the prompt, where the data row has it as a chat
    token_ids: list[int] = []  # of the completion

    @property
    def length(self) -> int:
        """In tokens where they were counted, else in words."""
        return len(self.text.split()) if self.num_tokens is None else self.num_tokens


class Reward(msgspec.Struct, dict=True, forbid_unknown_fields=True, kw_only=True):
    """The base of all rewards. Override `score`; or `score_group`, when a completion is judged beside the others."""

    needs: ClassVar[tuple[str, ...]] = ()  # packages that are not always installed, behind their extra

    weight: float = 1.0
    name: str = ""  # what its part of the score is called; by default the name it is registered under

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self._default_name())
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward '{self.name}' has the weight {self.weight}", fix="give it a finite weight")
        self.check()

    def __setattr__(self, field: str, value: Any) -> None:
        # As frozen=True would, which type checkers want repeated on every subclass.
        raise AttributeError(f"a reward does not change: make another with {field}={value!r}")

    def check(self) -> None:
        """Raise ConfigError for settings that cannot be right."""

    def check_installed(self) -> None:
        """Raise MissingExtra for a package that it needs and that is not installed."""
        if self.needs:
            require(*self.needs)

    def warm_up(self) -> None:
        """Import and build what is expensive. Called once in each process that scores; its time is not counted."""

    def score(self, completion: RewardInput) -> float:
        """What this completion is worth, before the weight; `Judged(0.7, correct=True)` also says that it is right."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score or score_group")

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        """What each completion of a group is worth, in the same order."""
        return [self.score(completion) for completion in group]

    @property
    def looks_at_groups(self) -> bool:
        return type(self).score_group is not Reward.score_group

    @property
    def may_abstain(self) -> bool:
        """Whether None is a result ("not applicable") and not a mistake."""
        return False

    def judged(self, value: Any) -> Judged | None:
        """What `score` returned, or one value of what `score_group` did; None: not applicable."""
        return None if value is None and self.may_abstain else judged(value)

    @property
    def source(self) -> str:
        """Where another process finds it: `package.module:Name` or `/path/file.py:Name`."""
        return source_of(type(self))

    @property
    def settings(self) -> dict[str, Any]:
        """All fields but weight and name."""
        return {field: getattr(self, field) for field in self.__struct_fields__ if field not in ("weight", "name")}

    def to_config(self) -> dict[str, Any]:
        """What `registry.create` makes the same reward from, in any process."""
        return {"type": self.source, "weight": self.weight, "name": self.name, "params": self.settings}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        return msgspec.convert(dict(settings), cls)

    def _default_name(self) -> str:
        return registered_name(type(self).__name__)


class FunctionReward(Reward):
    """A plain function as a reward; it can still be called as one. Its keyword arguments are its settings."""

    function: Callable[..., Any]
    params: dict[str, Any] = {}
    per_group: bool = False  # the function takes the whole group and returns a score for each

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def check(self) -> None:
        if inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"reward '{self.name}' is a coroutine", fix="write a plain function: in its own process it may block"
            )
        try:
            inspect.signature(self.function).bind((), **self.params)
        except TypeError as error:
            known = ", ".join(list(inspect.signature(self.function).parameters)[1:]) or "none"
            raise ConfigError(f"reward '{self.name}': {error}", fix=f"its settings are: {known}") from None

    def score(self, completion: RewardInput) -> float:
        return self.function(completion, **self.params)  # type: ignore[no-any-return]  # checked by the caller

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        if self.per_group:
            return self.function(group, **self.params)  # type: ignore[no-any-return]
        return super().score_group(group)

    @property
    def looks_at_groups(self) -> bool:
        return self.per_group

    @property
    def source(self) -> str:
        return source_of(self.function)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.params)

    def with_settings(self, settings: Mapping[str, Any]) -> FunctionReward:
        """The same function with other settings, weight or name."""
        own = {"weight": self.weight, "name": self.name, **settings}
        return type(self)(
            function=self.function,
            per_group=self.per_group,
            weight=own.pop("weight"),
            name=own.pop("name"),
            params={**self.params, **own},
        )

    def _default_name(self) -> str:
        return self.function.__name__


def registered_name(class_name: str) -> str:
    """`registered_name("ThinkFormatReward") == "think_format"`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
    return words.removesuffix("_reward")


class Judged(float):
    """A score with the reward's own verdict: `Judged(0.7, correct=True)`. None: it does not say whether it is right."""

    correct: bool | None

    def __new__(cls, score: float, *, correct: bool | None = None) -> Self:
        made = super().__new__(cls, score)
        made.correct = correct
        return made


def judged(value: Any) -> Judged:
    """What a reward returned: a finite number, or {"score": 0.7, "correct": True}.

    None, text and NaN are mistakes of the reward, not zeros.
    """
    score, correct = value, getattr(value, "correct", None)
    if isinstance(value, Mapping):
        unknown = sorted(map(str, set(value) - {"score", "correct"}))
        if unknown or "score" not in value:
            raise ValueError(f'the reward returned {value!r}, not a number or {{"score": 0.7, "correct": True}}')
        score, correct = value["score"], value.get("correct")
    if not isinstance(score, Real) or not math.isfinite(score):
        raise ValueError(f"the score is {score!r}, not a finite number")
    if correct not in (None, True, False):
        raise ValueError(f"'correct' is {correct!r}, not True or False")
    return Judged(float(score), correct=None if correct is None else bool(correct))
