"""Tasks that a small model learns on a CPU within minutes: arithmetic, the default environment, and echo."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.load import suggest
from treadle.envs.base import Environment, Item, Score, environment, parse_args, stable_seed
from treadle.envs.engine_client import Completion
from treadle.errors import ConfigError

Numbers = tuple[int, ...]  # that a question is about
MAX_DIFFICULTY = 20  # a dozen numbers of a dozen digits
CUT_OFF_REWARD = 0.5  # for a right answer that was truncated


@dataclass(frozen=True)
class Task:
    """Questions about `num_terms` numbers of `low`..`high`. Their split does not depend on a run's seed."""

    name: str
    question: str  # numbers come last, so that prompts share a prefix in the engine's cache
    sign: str  # between the numbers
    answer: Callable[[Numbers], int]
    low: int
    high: int
    last_sign: str = ""  # between the last two; empty: the same
    num_terms: int = 2
    num_held_out: int = 256
    num_train: int = 4000  # at most; a small task trains on all that is not held out
    is_fair: Callable[[Numbers], bool] = lambda numbers: True

    def item(self, numbers: Numbers) -> Item:
        *others, last = map(str, numbers)
        terms = f"{self.sign.join(others)}{self.last_sign or self.sign}{last}"
        return Item.ask(self.question.format(terms), answer=str(self.answer(numbers)))


TASKS = {
    task.name: task
    for task in (
        Task(
            name="addition",
            question="Answer with only the number. What is {}?",
            sign=" + ",
            answer=sum,
            low=10,
            high=99,
        ),
        Task(
            name="comparison",
            question="Answer with only the number. Which number is larger, {}?",
            sign=", ",
            last_sign=" or ",
            answer=max,
            low=100,
            high=999,
            is_fair=lambda numbers: len(set(numbers)) == len(numbers),
        ),
        Task(
            name="multiplication",
            question="Answer with only the number. What is {}?",
            sign=" x ",
            answer=math.prod,
            low=2,
            high=12,
            num_held_out=24,  # of 66 products
        ),
    )
}
# Multiplication (by 2..12) continues with numbers of two digits, the others with one digit more.
_FIRST_HARDER_DIGITS = {"addition": 3, "comparison": 4, "multiplication": 2}


def harder(task: Task, difficulty: int) -> Task:
    """0: the task itself; 1: a digit more; 2: a number more; 3: another digit; 4: another number; and so on."""
    if difficulty == 0:
        return task
    if difficulty > MAX_DIFFICULTY:
        raise ConfigError(
            f"the environment 'arithmetic' has no difficulty {difficulty}", fix=f"choose 0 to {MAX_DIFFICULTY}"
        )
    digits = _FIRST_HARDER_DIGITS[task.name] + (difficulty - 1) // 2
    num_terms = task.num_terms + difficulty // 2
    return replace(
        task,
        name=f"{task.name}-{difficulty}",
        question=task.question.replace("larger", "the largest") if num_terms > 2 else task.question,
        low=10 ** (digits - 1),
        high=10**digits - 1,
        num_terms=num_terms,
        num_held_out=256,
    )


@dataclass(frozen=True)
class Split:
    held_out: tuple[Numbers, ...]
    train: tuple[Numbers, ...]


def split(task: Task) -> Split:
    """Always the same two sets. Held-out numbers are not trained on in another order either."""
    questions = _distinct_questions(task)
    held_out: dict[Numbers, Numbers] = {}
    while len(held_out) < task.num_held_out:
        numbers = next(questions)
        held_out.setdefault(tuple(sorted(numbers)), numbers)
    train = (numbers for numbers in questions if tuple(sorted(numbers)) not in held_out)
    return Split(tuple(held_out.values()), tuple(itertools.islice(train, task.num_train)))


class ArithmeticArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`brevity`: the largest bonus for a right answer that ends early."""

    brevity: float = 0.0


@environment("arithmetic")
class Arithmetic(Environment):
    """Reward 1 for the right number, CUT_OFF_REWARD if the answer is truncated.

    `--env.args '{"brevity": 0.2}'` adds a bonus of at most 0.2 for a right answer that ends early.

    >>> Arithmetic(EnvConfig(task="addition")).train_item(0).prompt
    'Answer with only the number. What is 20 + 27?'
    """

    # A temperature of 0.7 learns as much as 1.0 from half the tokens: completions of a prompt have longer common
    # prefixes, which are computed once. `config.difficulty`: see `harder`.
    defaults: ClassVar = {"task": "addition", "max_token_length": 16, "temperature": 0.7}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        if config.task not in TASKS:
            hint = suggest(config.task, TASKS) or f"known tasks: {', '.join(TASKS)}"
            raise ConfigError(f"unknown task '{config.task}' of the environment 'arithmetic'", fix=hint)
        self._task = harder(TASKS[config.task], config.difficulty)
        self._split = split(self._task)
        self._brevity = parse_args(config, ArithmeticArgs).brevity

    def train_items(self) -> Sequence[Item]:
        return [self._task.item(numbers) for numbers in self._split.train]

    def eval_items(self) -> Sequence[Item]:
        return [self._task.item(numbers) for numbers in self._split.held_out]

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        if last_number(completion_text) != Decimal(item.answer):
            return Score(reward=0.0, is_right=False)
        if completion.finish_reason != "stop":
            return Score(reward=CUT_OFF_REWARD, is_right=True)
        bonus = self._brevity * (1 - len(completion.token_ids) / self.config.max_token_length)
        return Score(reward=1 + bonus, is_right=True)


# A minus sign counts only if no digit precedes it: "-140" is negative, "60-140" has 140.
# A point may come first if nothing precedes it: ".5" is a half, but "It is.5" has 5.
_NUMBER = re.compile(
    r"(?<![0-9])(?P<sign>[-−]?)"
    r"(?P<size>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]+\b)?"
)


def numbers_in(text: str) -> list[str]:
    """Every number in a text, as Decimal parses it: `numbers_in("57 + 83 = 1,240.") == ["57", "83", "1240"]`."""
    return [
        ("-" if match["sign"] else "") + match["size"].replace(",", "") + (match["exponent"] or "")
        for match in _NUMBER.finditer(text)
    ]


def last_number(text: str) -> Decimal | None:
    """The last number in a text: `last_number("57 + 83 = 1,240.") == 1240`; None when there is none."""
    numbers = numbers_in(text)
    return _to_decimal(numbers[-1]) if numbers else None


def only_number(text: str) -> Decimal | None:
    """The number in a text with one: `only_number("7 crowns") == 7`; None for "10-3" and "1,0"."""
    numbers = numbers_in(text)
    return _to_decimal(numbers[0]) if len(numbers) == 1 else None


def _to_decimal(number: str) -> Decimal | None:
    try:
        return Decimal(number)
    except InvalidOperation:  # an exponent of twenty digits
        return None


def _distinct_questions(task: Task) -> Iterator[Numbers]:
    """Generate all fair questions of the task in a fixed random order."""
    num_questions = (task.high - task.low + 1) ** task.num_terms
    seen: set[Numbers] = set()
    for draw in itertools.count():
        if len(seen) == num_questions:
            return
        numbers = _draw(task, draw)
        if numbers in seen:
            continue
        seen.add(numbers)
        if task.is_fair(numbers):
            yield numbers


def _draw(task: Task, draw: int) -> Numbers:
    """Two numbers come from one seed, more numbers from one seed each: a 63-bit seed is too small for all."""
    span = task.high - task.low + 1
    if task.num_terms == 2:
        first, second = divmod(stable_seed("arithmetic", task.name, draw) % (span * span), span)
        return task.low + first, task.low + second
    return tuple(task.low + stable_seed("arithmetic", task.name, draw, place) % span for place in range(task.num_terms))


@environment("echo")
class Echo(Environment):
    """Right if the completion starts with the digit; even a model with random weights learns it."""

    defaults: ClassVar = {"max_token_length": 24}

    def train_item(self, index: int) -> Item:
        return _ask(index % 10)

    def eval_items(self) -> Sequence[Item]:
        return [_ask(digit) for digit in range(10)]

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        is_right = completion_text.strip().startswith(item.answer)
        return Score(reward=float(is_right), is_right=is_right)


def _ask(digit: int) -> Item:
    return Item.ask(f"Say {digit}", answer=str(digit))
