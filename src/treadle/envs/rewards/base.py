"""Base classes of rewards: a frozen value with a weight, settings and one method.

    @reward
    def is_polite(completion: RewardInput) -> float:
        return "please" in completion.text.lower()

    @reward
    class NearReward(Reward):              # registry.create("near", tolerance=0.1)
        tolerance: float = 0.5

        def score(self, completion: RewardInput) -> float:
            return abs(float(completion.text) - float(completion.answer)) <= self.tolerance

Settings are typed fields, not arguments of `__init__`, so that they are validated when they come from a file and can be
sent to the process that scores.

A function with a parameter `prompts`, `completions` or `completion_ids` is called once for a group, as by TRL:

    prompts          list of texts; of message lists if the data row has the prompt as a chat
    completions      list of texts, or of [{"role": "assistant", "content": ...}] for such a chat
    completion_ids   list of lists of token ids
    answer, ...      every column of the data row, as a list

`call_reward` converts whatever a reward does into a result. A failure has no score, not a low one.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any, ClassVar, Literal, Self

import msgspec

from treadle.envs.rewards.addresses import address_of, describe
from treadle.errors import ConfigError, require

CALLED_WITH = ("prompts", "completions", "completion_ids")
_OF_TRL_ALONE = ("trainer_state", "environments", "log_extra", "log_metric")  # objects of TRL's trainer


class RewardInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One completion and the data to score it with: `RewardInput("The answer is 4.", answer="4")`."""

    text: str
    answer: str = ""
    prompt: str = ""
    num_tokens: int | None = None  # of the completion, if known
    finish_reason: str = "stop"  # "length": it was cut off
    metadata: dict[str, Any] = {}  # the rest of the data row
    # Filled in for rewards that say so (`reads_messages`).
    messages: list[dict[str, Any]] = []  # the prompt
    is_chat: bool = True  # whether the data row has the prompt as messages; functions that take lists get text if not
    token_ids: list[int] = []  # of the completion

    @property
    def length(self) -> int:
        """In tokens if their number is known, else in words."""
        return len(self.text.split()) if self.num_tokens is None else self.num_tokens


class OwnWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a worker that serves one reward only; it has no memory limit."""

    time_limit_s: float  # for one call
    load_limit_s: float


class Reward(msgspec.Struct, dict=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all rewards. Override `score`, or `score_group` to compare the completions of a group."""

    needs: ClassVar[tuple[str, ...]] = ()  # an extra, and the optional packages of it that are needed
    may_abstain: ClassVar[bool] = False  # whether None is a valid result
    meaning_of_none: ClassVar[CallResult | None] = None  # why a completion with None has no score; None: not applicable
    reads_messages: ClassVar[bool] = False  # whether it uses `messages` and `token_ids` of a RewardInput

    weight: float = 1.0
    name: str = ""  # what its part of the score is called; by default the name it is registered under

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", registered_name(type(self).__name__))
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward '{self.name}' has the weight {self.weight}", fix="give it a finite weight")
        self.check()

    def __setattr__(self, field: str, value: Any) -> None:
        # Like frozen=True, which type checkers want repeated on every subclass.
        raise AttributeError(f"a reward does not change: make another with {field}={value!r}")

    def check(self) -> None:
        """Raise ConfigError for invalid settings."""

    def check_installed(self) -> None:
        """Raise MissingExtra if a needed package is not installed."""
        if self.needs:
            require(*self.needs)

    def warm_up(self) -> None:
        """Import and build expensive things. Called once in each worker; its time is not counted."""

    def score(self, completion: RewardInput) -> float:
        """The score of a completion, before the weight; `Judged(0.7, correct=True)` also says that it is right."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score or score_group")

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        """The score of each completion of a group, in the same order."""
        return [self.score(completion) for completion in group]

    @property
    def looks_at_groups(self) -> bool:
        return type(self).score_group is not Reward.score_group

    @property
    def own_worker(self) -> OwnWorker | None:
        """Limits of the one worker that this reward has for itself; None: it shares the workers of the pool."""
        return None

    def judged(self, value: Any) -> Judged | None:
        """Validate a value returned by `score` or `score_group`; None stays None where the reward may abstain."""
        return None if value is None and self.may_abstain else judged(value)

    @property
    def source(self) -> str:
        """Its address, for other processes: `package.module:Name` or `/path/file.py:Name`."""
        return address_of(type(self))

    @property
    def settings(self) -> dict[str, Any]:
        """All fields except weight and name."""
        return {field: getattr(self, field) for field in self.__struct_fields__ if field not in ("weight", "name")}

    def to_config(self) -> dict[str, Any]:
        """The configuration from which `registry.create` builds the same reward in any process."""
        return {"type": self.source, "weight": self.weight, "name": self.name, "params": self.settings}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        return msgspec.convert(dict(settings), cls)


class FunctionReward(Reward):
    """A function as a reward; it can still be called. Its keyword arguments are its settings."""

    function: Callable[..., Any]
    params: dict[str, Any] = {}
    per_group: bool = False  # the function takes the whole group and returns a score for each

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.function.__name__)
        super().__post_init__()

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
        return address_of(self.function)

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


def registered_name(class_name: str) -> str:
    """`registered_name("ThinkFormatReward") == "think_format"`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()
    return words.removesuffix("_reward")


class Judged(float):
    """A score with the reward's own verdict: `Judged(0.7, correct=True)`; None: no verdict."""

    correct: bool | None

    def __new__(cls, score: float, *, correct: bool | None = None) -> Self:
        made = super().__new__(cls, score)
        made.correct = correct
        return made


def judged(value: Any) -> Judged:
    """Validate the value that a reward returned: a finite number, or {"score": 0.7, "correct": True}.

    None, text and NaN are errors of the reward, not zeros.
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


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of its parameters without a default, except *args and **kwargs."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]


class BatchFunctionReward(FunctionReward):
    """A function that takes lists; it may be a coroutine function, and None in its result means "not applicable"."""

    may_abstain: ClassVar = True
    reads_messages: ClassVar = True
    per_group: bool = True

    def check(self) -> None:
        parameters = inspect.signature(self.function).parameters
        foreign = [name for name in required_arguments(self.function) if name in _OF_TRL_ALONE]
        if foreign:
            raise ConfigError(
                f"reward '{self.name}' takes '{foreign[0]}', an object of TRL's trainer, which is not here",
                fix="leave it out, or give it a default",
            )
        unknown = [name for name in self.params if name not in parameters]
        if unknown and not self._takes_any:
            known = ", ".join(name for name, one in parameters.items() if one.default is not one.empty) or "none"
            raise ConfigError(f"reward '{self.name}' has no argument '{unknown[0]}'", fix=f"its settings are: {known}")

    def score(self, completion: RewardInput) -> float:
        return self.score_group([completion])[0]

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        columns = {**columns_of(group), **self.params}
        missing = [name for name in required_arguments(self.function) if name not in columns]
        if missing:
            raise ValueError(f"it takes '{missing[0]}', and the data row has no such column: {', '.join(columns)}")
        if not self._takes_any:
            columns = {name: columns[name] for name in inspect.signature(self.function).parameters if name in columns}
        scores = self.function(**columns)
        if inspect.isawaitable(scores):
            scores = _finished(scores)
        scores = scores.tolist() if hasattr(scores, "tolist") else scores  # of NumPy or torch
        if not isinstance(scores, Sequence) or isinstance(scores, str):
            raise TypeError(f"it returned {scores!r:.80}, not a list with a score for each completion")
        return scores

    @property
    def _takes_any(self) -> bool:
        parameters = inspect.signature(self.function).parameters.values()
        return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def columns_of(group: Sequence[RewardInput]) -> dict[str, list[Any]]:
    """A group as columns.

    >>> columns_of([RewardInput("4", answer="4", prompt="2 + 2?", metadata={"level": 1})])["level"]
    [1]
    """
    names = dict.fromkeys(name for one in group for name in one.metadata)
    return {
        "answer": [one.answer for one in group],
        **{name: [one.metadata.get(name) for one in group] for name in names},
        "prompts": [(one.is_chat and one.messages) or one.prompt for one in group],
        "completions": [
            [{"role": "assistant", "content": one.text}] if one.is_chat and one.messages else one.text for one in group
        ],
        "completion_ids": [one.token_ids for one in group],
    }


def _finished(coroutine: Any) -> Any:
    """The result of a coroutine, run in a thread because the calling thread may already run an event loop."""

    async def result() -> Any:
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, result()).result()


Outcome = Literal["scored", "timed_out", "raised", "out_of_memory", "worker_died", "judge_failed", "too_long"]


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is None unless `outcome` is "scored"; `parts` has what each reward gave, before weights.

    `correct` is the verdict of the first reward that gives one; None: none does.
    """

    score: float | None
    parts: dict[str, float | None]
    correct: bool | None = None
    outcome: Outcome = "scored"
    detail: str = ""  # of a failure: which reward, and what happened
    seconds: float = 0.0
    metrics: dict[str, float] = {}  # of its rewards: {"judge/requests": 1}


class CallResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Result of one call of one reward: a score for each completion, or the failure."""

    scores: list[float | None] = []  # None: the reward has no score for that completion (`meaning_of_none`)
    correct: list[bool | None] = []  # empty: no verdicts
    outcome: Outcome = "scored"
    detail: str = ""
    seconds: float = 0.0
    metrics: dict[str, float] = {}  # {"requests": 1}; added up over the rollouts of a group


def calls_for(reward: Reward, inputs: Sequence[RewardInput]) -> list[list[RewardInput]]:
    """The inputs of each call: one completion, or the whole group if the reward looks at groups."""
    if reward.looks_at_groups:
        return [list(inputs)] if inputs else []
    return [[completion] for completion in inputs]


def call_reward(reward: Reward, inputs: Sequence[RewardInput]) -> CallResult:
    """Call the reward; exceptions, including SystemExit, become failures."""
    started = time.perf_counter()
    try:
        raw = reward.score_group(inputs) if reward.looks_at_groups else [reward.score(inputs[0])]
        scores = [reward.judged(value) for value in raw]
        if len(scores) != len(inputs):
            raise ValueError(f"the reward returned {len(scores)} scores for {len(inputs)} completions")
    except MemoryError:
        seconds = time.perf_counter() - started
        return CallResult(outcome="out_of_memory", detail="went past its memory limit", seconds=seconds)
    except KeyboardInterrupt:  # the user's, not the reward's
        raise
    except BaseException as error:  # also SystemExit: it must not end the process
        seconds = time.perf_counter() - started
        return CallResult(outcome="raised", detail=describe(error), seconds=seconds)
    verdicts = [None if score is None else score.correct for score in scores]
    return CallResult(
        scores=[None if score is None else float(score) for score in scores],
        correct=[] if set(verdicts) <= {None} else verdicts,
        seconds=time.perf_counter() - started,
    )


def per_completion(
    reward: Reward, calls: Sequence[CallResult], num_inputs: int
) -> list[tuple[CallResult, Judged | None]]:
    """The call and the score of every completion, in order.

    A score is None when the call failed, and when the reward has none for that completion. If that is a failure of the
    completion alone, its call is one of its own.
    """
    found: list[tuple[CallResult, Judged | None]] = []
    for call in calls:
        for index in range(num_inputs if reward.looks_at_groups else 1):
            score = call.scores[index] if call.outcome == "scored" else None
            correct = call.correct[index] if call.correct else None
            own = call
            if score is None and call.outcome == "scored" and reward.meaning_of_none is not None:
                own = msgspec.structs.replace(reward.meaning_of_none, seconds=call.seconds, metrics=call.metrics)
            found.append((own, None if score is None else Judged(score, correct=correct)))
    return found
