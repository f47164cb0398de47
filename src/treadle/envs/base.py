"""The interface of an environment: what to ask, and how to score an answer.

    @environment("capitals")
    class Capitals(Environment):
        rewards = ["exact_match"]

        def train_items(self) -> Sequence[Item]:
            return [_ask(country, capital) for country, capital in TRAIN]

        def eval_items(self) -> Sequence[Item]:
            return [_ask(country, capital) for country, capital in HELD_OUT]

    def _ask(country: str, capital: str) -> Item:
        return Item.ask(f"What is the capital of {country}? One word.", answer=capital)

`rewards` is a value for `treadle.envs.rewards.registry.create`; rewards run in processes that can be killed, and
`--env.rewards` replaces them. A task with a fast and harmless score may override `score` instead. `defaults` are
settings for the task that the user has not set. A task of several turns overrides `rollout`:

    async def rollout(self, item: Item, model: Model) -> float:
        chat = model.chat(item.messages)
        reply = await chat.ask()
        chat.add({"role": "user", "content": "Are you sure?"})
        return float(item.answer in (await chat.ask()).text)

Sampling, delivery, evaluation and restarts are the runner's work.

Environments are found by name (`load_environment`), or by the file that they are written in.
"""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.load import parse, suggest
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import Outcome, RewardLike, RewardResult, registry
from treadle.envs.rewards.addresses import describe, is_session_code, load_file, user_code_location
from treadle.errors import ConfigError, TreadleError, as_user_error

if TYPE_CHECKING:
    from treadle.envs.chat import Model


T = TypeVar("T")
Message = dict[str, Any]  # {"role": "user", "content": "..."}
ROUNDING = 1e-6  # a sum of float32 rewards may miss 1 by this much


def stable_seed(*parts: int | str) -> int:
    """A 63-bit hash of `parts`: `stable_seed(0, "train", 1, 0)`; 1 is not "1".

    The same on every machine, in every process and Python version, unlike `hash` and `random.shuffle`.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stable_shuffle(values: Sequence[T], *parts: int | str) -> list[T]:
    """`values` in an order that depends only on `parts` and their number."""
    order = sorted(range(len(values)), key=lambda place: stable_seed(*parts, place))
    return [values[place] for place in order]


@dataclass(frozen=True)
class Item:
    """One prompt as chat messages, its right answer, and the rest of its data row."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # passed to rewards
    is_chat: bool = True  # False: the messages were made of one text; reward functions that take lists get that text
    source: str = ""  # the data source that it comes from, if there are several

    @classmethod
    def ask(cls, question: str, *, answer: str | float, system: str = "", **metadata: Any) -> Self:
        """An item of one question. A number as the answer is formatted without decimals if possible: 51.0 is "51"."""
        before = ({"role": "system", "content": system},) if system else ()
        messages = (*before, {"role": "user", "content": question})
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        return cls(messages=messages, answer=str(answer), metadata=metadata, is_chat=False)

    @property
    def prompt(self) -> str:
        """The prompt as plain text."""
        return "\n".join(str(message.get("content", "")) for message in self.messages)


@dataclass(frozen=True)
class Score:
    """`reward` is trained on (None: scoring failed with `error`), `is_right` counts as accuracy."""

    reward: float | None
    is_right: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # the score of each reward, before weights
    outcome: Outcome | Literal["too_short"] = "scored"
    error: str = ""
    seconds: float = 0.0  # time of scoring
    metrics: Mapping[str, float] = field(default_factory=dict)  # of its rewards: {"judge/requests": 1}


def is_enough(score: float, right: float) -> bool:
    """Whether a score counts as right: at least `right`, within rounding errors."""
    return score >= right - ROUNDING


class Environment(ABC):
    """A task. It must return the same item for the same index and `config.seed`, in every process."""

    rewards: RewardLike | Sequence[RewardLike] = ()
    min_trained_tokens: ClassVar[int] = 0  # shorter rollouts are not trained on
    waits_for_agents: bool = False  # whether rollouts wait for agents that are started outside of this environment
    # Defaults of settings for this task; the ones of the base class apply in addition.
    defaults: ClassVar[Mapping[str, Any]] = {"max_token_length": 512}

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._train: Sequence[Item] | None = None
        self._orders: dict[int, list[int]] = {}  # the order of the last epoch used

    def prepare(self) -> None:  # noqa: B027 - most tasks need none
        """Read the data, so that missing data is reported before anything is started. Starts and connects to nothing.

        Called in a thread, perhaps more than once; `open` must not rely on it.
        """

    async def open(self) -> None:  # noqa: B027
        """Called once before the first item: load data, connect."""

    async def close(self) -> None:  # noqa: B027
        """Called once at the end."""

    def train_items(self) -> Sequence[Item]:
        """The training prompts, if they can be listed. Called once."""
        raise NotImplementedError(f"{type(self).__name__} needs a method train_items or train_item")

    def train_item(self, index: int) -> Item:
        """The prompt with this index. Indices are unbounded: each epoch uses all items in its own order."""
        return self.listed_items()[self.place_of(index)]

    def place_of(self, index: int) -> int:
        """The place in `train_items` of the item with this index."""
        num_items = len(self.listed_items())
        epoch, turn = divmod(index, num_items)
        if epoch not in self._orders:
            self._orders = {epoch: stable_shuffle(range(num_items), "order", self.config.seed, epoch)}
        return self._orders[epoch][turn]

    def candidate(self, index: int, number: int) -> int:
        """The index of an item that may be taken instead of this one; `number` chooses it."""
        return number % len(self.listed_items())

    @property
    def sources(self) -> Sequence[str]:
        """The names of the data sources, if there are several: figures are kept for each."""
        return ()

    def listed_items(self) -> Sequence[Item]:
        """`train_items`, called once; ConfigError if there are none."""
        if self._train is None:
            self._train = self.train_items()
        if not self._train:
            raise ConfigError(f"the environment '{self.config.name}' has no training items")
        return self._train

    @abstractmethod
    def eval_items(self) -> Sequence[Item]:
        """Held-out prompts: always the same ones in the same order, for every seed."""

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score | float:
        """Score a completion in this process; for tasks without `rewards`."""
        raise NotImplementedError(f"{type(self).__name__} needs rewards, or a method score")

    def gold_completion(self, item: Item) -> str:
        """The right answer in the format that the task asks for; `treadle env NAME validate` scores it."""
        from treadle.envs.rewards.combined import format_gold_answer

        return format_gold_answer(self.rewards, item.answer)

    async def rollout(self, item: Item, model: Model) -> Score | float | None:
        """Chat with the model and return the score; None: `rewards` score the last reply.

        Everything that was sampled is trained on, in whichever chat.
        """
        raise NotImplementedError

    def is_right(self, result: RewardResult) -> bool:
        """Whether a result counts as right: a reward's verdict (`correct`), else `config.right` from the first one."""
        if result.correct is not None:
            return result.correct
        first = next((worth for worth in result.parts.values() if worth is not None), None)
        return first is not None and is_enough(first, self.config.right)

    @property
    def has_turns(self) -> bool:
        """Whether the task overrides `rollout`, instead of sampling one completion."""
        return type(self).rollout is not Environment.rollout


def prepare_task(environment: Environment) -> None:
    """Check the packages of its rewards and call `environment.prepare()`; exceptions of user code become ConfigError
    with their location."""
    try:
        if environment.rewards:
            registry.create(environment.rewards).check_installed()
        environment.prepare()
    except TreadleError:
        raise
    except (Exception, SystemExit) as error:  # user code
        if not user_code_location(error):
            raise  # no user code involved: a bug in treadle, shown with its traceback
        known = as_user_error(error)
        name = environment.config.name
        raise known or ConfigError(
            f"prepare() of the environment '{name}' raised {describe(error)}",
            fix=f"correct it; treadle env {name} validate",
        ) from error


A = TypeVar("A", bound=msgspec.Struct)
E = TypeVar("E", bound=type[Environment])
_REGISTRY: dict[str, type[Environment]] = {}
_BUILT_IN = {
    "agent": "treadle.envs.foreign.agent",
    "arithmetic": "treadle.envs.tasks.arithmetic",
    "code": "treadle.envs.tasks.code",
    "echo": "treadle.envs.tasks.arithmetic",
    "gsm8k": "treadle.envs.tasks.datasets",
    "jsonl": "treadle.envs.tasks.datasets",
    "reasoning_gym": "treadle.envs.tasks.reasoning_gym",
    "svamp": "treadle.envs.tasks.datasets",
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
        stem, colon, chosen = config.name.partition(":")
        if stem and Path(f"{stem}.py").is_file():  # the suffix is missing
            hint = f"did you mean {stem}.py{colon}{chosen}?"
        else:
            hint = suggest(config.name, known)
        hint = hint or f"known environments: {', '.join(known)}; or the path of a .py file"
        raise ConfigError(f"unknown environment '{config.name}'", fix=hint)
    return _REGISTRY[config.name]


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
