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
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from treadle.config.env import EnvConfig
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import Outcome, RewardLike, RewardResult, registry
from treadle.envs.rewards.addresses import user_code_location
from treadle.envs.rewards.calls import describe
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
        items = self.listed_items()
        epoch, place = divmod(index, len(items))
        if epoch not in self._orders:
            self._orders = {epoch: stable_shuffle(range(len(items)), "order", self.config.seed, epoch)}
        return items[self._orders[epoch][place]]

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
