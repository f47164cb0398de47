"""Small sums with one right answer: the default environment, learnable on a CPU within minutes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from treadle.config.load import suggest
from treadle.config.schema import EnvConfig
from treadle.envs.base import Environment, Item, Score, environment
from treadle.envs.engine_client import Completion
from treadle.envs.seeds import stable_seed, stable_shuffle
from treadle.errors import ConfigError

Pair = tuple[int, int]


@dataclass(frozen=True)
class Task:
    """Questions about two numbers of `low`..`high`. How they are split does not depend on a run's seed."""

    name: str
    question: str
    answer: Callable[[int, int], int]
    low: int
    high: int
    num_held_out: int = 256
    num_train: int = 4000  # at most; a small task trains on whatever is not held out
    is_fair: Callable[[int, int], bool] = lambda a, b: True

    def item(self, pair: Pair) -> Item:
        return Item.ask(self.question.format(*pair), answer=str(self.answer(*pair)))


TASKS = {
    task.name: task
    for task in (
        Task(
            name="addition",
            question="What is {} + {}? Answer with only the number.",
            answer=lambda a, b: a + b,
            low=10,
            high=99,
        ),
        Task(
            name="comparison",
            question="Which number is larger, {} or {}? Answer with only the number.",
            answer=max,
            low=100,
            high=999,
            is_fair=lambda a, b: a != b,
        ),
        Task(
            name="multiplication",
            question="What is {} x {}? Answer with only the number.",
            answer=lambda a, b: a * b,
            low=2,
            high=12,
            num_held_out=24,  # of 66 products
        ),
    )
}


@dataclass(frozen=True)
class Split:
    held_out: tuple[Pair, ...]
    train: tuple[Pair, ...]


def split(task: Task) -> Split:
    """The same two sets for ever. A pair that is held out is not trained on the other way round either."""
    pairs = _distinct_pairs(task)
    held_out: dict[frozenset[int], Pair] = {}
    while len(held_out) < task.num_held_out:
        pair = next(pairs)
        held_out.setdefault(frozenset(pair), pair)
    train = (pair for pair in pairs if frozenset(pair) not in held_out)
    return Split(tuple(held_out.values()), tuple(itertools.islice(train, task.num_train)))


@environment("arithmetic")
class Arithmetic(Environment):
    """Reward 1 for the right number; `config.brevity` adds up to that much when it ends early.

    >>> Arithmetic(EnvConfig(task="addition")).train_item(0).prompt
    'What is 20 + 27? Answer with only the number.'
    """

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        if config.task not in TASKS:
            hint = suggest(config.task, TASKS) or f"known tasks: {', '.join(TASKS)}"
            raise ConfigError(f"unknown task '{config.task}' of the environment 'arithmetic'", fix=hint)
        self._task = TASKS[config.task]
        self._split = split(self._task)
        self._orders: dict[int, list[Pair]] = {}  # of the epoch asked for last

    def train_item(self, index: int) -> Item:
        """Every epoch goes once through all training pairs, in an order of its own."""
        epoch, place = divmod(index, len(self._split.train))
        if epoch not in self._orders:
            self._orders = {epoch: stable_shuffle(self._split.train, "order", self.config.seed, epoch)}
        return self._task.item(self._orders[epoch][place])

    def eval_items(self) -> Sequence[Item]:
        return [self._task.item(pair) for pair in self._split.held_out]

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        is_right = last_number(completion_text) == Decimal(item.answer)
        return Score(reward=is_right + self._brevity_bonus(completion) if is_right else 0.0, is_right=is_right)

    def _brevity_bonus(self, completion: Completion) -> float:
        """Only for right answers (a short wrong one is worth nothing), and cut off is not brief."""
        if completion.finish_reason != "stop":
            return 0.0
        return self.config.brevity * (1 - len(completion.token_ids) / self.config.max_token_length)


# A minus sign counts only where no digit stands before it: "-140" is negative, "60-140" holds 140.
_NUMBER = re.compile(r"(?<![0-9])([-−]?)([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last number in a text: `last_number("57 + 83 = 1,240.") == 1240`; None when there is none."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    sign, whole, fraction = matches[-1].groups(default="")
    return Decimal(("-" if sign else "") + whole.replace(",", "") + fraction)


def _distinct_pairs(task: Task) -> Iterator[Pair]:
    """All fair pairs of the task, one after the other in a fixed random order, without listing them first."""
    span = task.high - task.low + 1
    seen: set[int] = set()
    for draw in itertools.count():
        if len(seen) == span * span:
            return
        ordinal = stable_seed("arithmetic", task.name, draw) % (span * span)
        if ordinal in seen:
            continue
        seen.add(ordinal)
        pair = (task.low + ordinal // span, task.low + ordinal % span)
        if task.is_fair(*pair):
            yield pair
