"""How to write an environment: what to ask, and what an answer is worth.

    @environment("capitals")
    class Capitals(Environment):
        rewards = ["exact_match"]

        def train_items(self) -> Sequence[Item]:
            return [_ask(country, capital) for country, capital in TRAIN]

        def eval_items(self) -> Sequence[Item]:
            return [_ask(country, capital) for country, capital in HELD_OUT]

    def _ask(country: str, capital: str) -> Item:
        return Item.ask(f"What is the capital of {country}? One word.", answer=capital)

`rewards` is what `treadle.envs.rewards.registry.create` takes; they run in processes that can be killed, and
`--env.rewards` replaces them. A task whose score is quick and harmless may override `score` instead. `defaults` are
settings that suit the task, for whatever the user does not set. A task of several turns overrides `rollout`:

    async def rollout(self, item: Item, model: Model) -> float:
        chat = model.chat(item.messages)
        reply = await chat.ask()
        chat.add({"role": "user", "content": "Are you sure?"})
        return float(item.answer in (await chat.ask()).text)

Everything else (sampling, delivery, evaluation, restarts) is the runner's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from treadle.config.env import EnvConfig
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import Outcome, RewardLike, RewardResult, registry
from treadle.envs.rewards.addresses import user_code_location
from treadle.envs.rewards.calls import describe
from treadle.envs.seeds import stable_shuffle
from treadle.errors import ConfigError, TreadleError, as_user_error

if TYPE_CHECKING:
    from treadle.envs.chat import Model

Message = dict[str, Any]  # {"role": "user", "content": "..."}
ROUNDING = 1e-6  # a sum of float32 rewards may miss 1 by this much


@dataclass(frozen=True)
class Item:
    """One prompt as chat messages, the answer that is right, and the rest of its data row."""

    messages: tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # rewards see it
    is_chat: bool = True  # False: the messages were made of one text; reward functions that take lists get texts then

    @classmethod
    def ask(cls, question: str, *, answer: str | float, system: str = "", **metadata: Any) -> Self:
        """A number as the answer is written as a person would: 51.0 is "51"."""
        before = ({"role": "system", "content": system},) if system else ()
        messages = (*before, {"role": "user", "content": question})
        return cls(messages=messages, answer=_as_text(answer), metadata=metadata, is_chat=False)

    @property
    def prompt(self) -> str:
        """The prompt as a person reads it."""
        return "\n".join(str(message.get("content", "")) for message in self.messages)


def _as_text(answer: str | float) -> str:
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


@dataclass(frozen=True)
class Score:
    """`reward` is trained on, `is_right` is counted as accuracy. None: it could not be scored, and `error` says why."""

    reward: float | None
    is_right: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # what each reward gave, before weights
    outcome: Outcome | Literal["too_short"] = "scored"
    error: str = ""
    seconds: float = 0.0  # that scoring took


def is_enough(score: float, right: float) -> bool:
    """Whether a score counts as right: at least `right`, but for rounding."""
    return score >= right - ROUNDING


class Environment(ABC):
    """A task. It must give the same item for the same index and `config.seed`, in every process."""

    rewards: RewardLike | Sequence[RewardLike] = ()
    min_trained_tokens: ClassVar[int] = 0  # a rollout that sampled fewer teaches nothing
    # Settings that suit the task, for whatever the user does not set. Those of the base hold where a task names others.
    defaults: ClassVar[Mapping[str, Any]] = {"max_token_length": 512}

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._train: Sequence[Item] | None = None
        self._orders: dict[int, list[int]] = {}  # of the epoch asked for last

    def prepare(self) -> None:  # noqa: B027 - most tasks need none
        """Read the data, so that what is missing is told before anything is started; connects to and starts nothing.

        Called in a thread, and perhaps again: `open` must not count on it.
        """

    async def open(self) -> None:  # noqa: B027
        """Called once before the first item: load data, connect."""

    async def close(self) -> None:  # noqa: B027
        """Called once at the end."""

    def train_items(self) -> Sequence[Item]:
        """The training prompts, when they can be listed. Called once."""
        raise NotImplementedError(f"{type(self).__name__} needs a method train_items or train_item")

    def train_item(self, index: int) -> Item:
        """The prompt with this ordinal. Indexes never end: each epoch goes through all items in an order of its own."""
        items = self._listed_items()
        epoch, place = divmod(index, len(items))
        if epoch not in self._orders:
            self._orders = {epoch: stable_shuffle(range(len(items)), "order", self.config.seed, epoch)}
        return items[self._orders[epoch][place]]

    @property
    def num_train_items(self) -> int | None:
        """How many there are, when they can be listed."""
        return len(self._listed_items()) if type(self).train_items is not Environment.train_items else None

    def _listed_items(self) -> Sequence[Item]:
        if self._train is None:
            self._train = self.train_items()
        if not self._train:
            raise ConfigError(f"the environment '{self.config.name}' has no training items")
        return self._train

    @abstractmethod
    def eval_items(self) -> Sequence[Item]:
        """Held-out prompts, always the same ones in the same order, whatever the seed."""

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score | float:
        """What this completion is worth, computed right here; for tasks without `rewards`."""
        raise NotImplementedError(f"{type(self).__name__} needs rewards, or a method score")

    def gold_completion(self, item: Item) -> str:
        """The right answer, written as the task asks for it; `treadle env NAME validate` scores it."""
        from treadle.envs.rewards.combined import format_gold_answer

        return format_gold_answer(self.rewards, item.answer)

    async def rollout(self, item: Item, model: Model) -> Score | float | None:
        """Talk to the model, and say what that was worth; None: `rewards` judge the last reply.

        Whatever was sampled is trained on, whichever chat it was in.
        """
        raise NotImplementedError

    def is_right(self, result: RewardResult) -> bool:
        """What counts as accuracy: a reward's verdict (`correct`), else `config.right` points from the first one."""
        if result.correct is not None:
            return result.correct
        first = next((worth for worth in result.parts.values() if worth is not None), None)
        return first is not None and is_enough(first, self.config.right)

    @property
    def waits_for_agents(self) -> bool:
        """Whether rollouts wait for agents that are started outside of this environment."""
        return False

    @property
    def has_turns(self) -> bool:
        """Whether a rollout is a coroutine of its own, instead of one completion."""
        return type(self).rollout is not Environment.rollout


def prepare_task(environment: Environment) -> None:
    """`environment.prepare()`, and a look whether its rewards have what they need; what a user's code raises there
    becomes an error that says where, and what to do."""
    try:
        if environment.rewards:
            registry.create(environment.rewards).check_installed()
        environment.prepare()
    except TreadleError:
        raise
    except (Exception, SystemExit) as error:  # the border to code that a user writes
        if not user_code_location(error):
            raise  # none of theirs: a mistake of ours, and all of it is to be seen
        known = as_user_error(error)
        name = environment.config.name
        raise known or ConfigError(
            f"prepare() of the environment '{name}' raised {describe(error)}",
            fix=f"correct it; treadle env {name} validate",
        ) from error
