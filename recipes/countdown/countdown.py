"""Countdown: make a number out of given numbers with + - * /, each used at most once.

treadle run --config recipes/countdown/recipe.toml
"""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs import Environment, Item, Score, environment
from treadle.envs.base import parse_args, stable_seed, stable_shuffle
from treadle.envs.engine_client import Completion
from treadle.envs.tasks.reasoning_gym import extract_answer
from treadle.errors import ConfigError

NUM_HELD_OUT = 256
FORMAT_REWARD = 0.1  # for an expression of the given numbers with another value
LONGEST = 200  # characters of an expression
LARGEST_TARGET = 999
QUESTION = (
    "Make {target} out of the numbers {numbers}. Use + - * / and parentheses, and each number at most once. "
    "Think step by step, and write the expression last, like this: <answer>(1 + 2) * 3</answer>"
)
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class CountdownArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`."""

    min_numbers: int = 3
    max_numbers: int = 4
    largest: int = 99


@environment("countdown")
class Countdown(Environment):
    """1 for an expression with the value, FORMAT_REWARD for another one of these numbers, else 0."""

    defaults: ClassVar = {"task": "", "max_token_length": 512}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._args = parse_args(config, CountdownArgs)
        if not 2 <= self._args.min_numbers <= self._args.max_numbers <= 6 or self._args.largest < 10:
            raise ConfigError(
                "2 <= min_numbers <= max_numbers <= 6, and largest is at least 10", fix="change --env.args"
            )
        puzzles = (make_puzzle(stable_seed("countdown", "held out", n), self._args) for n in range(NUM_HELD_OUT))
        self._held_out = {puzzle.key: puzzle for puzzle in puzzles}

    def train_item(self, index: int) -> Item:
        """Generated from its index; a held-out puzzle is replaced by the next attempt."""
        attempt = 0
        while True:
            puzzle = make_puzzle(stable_seed("countdown", self.config.seed, index, attempt), self._args)
            if puzzle.key not in self._held_out:
                return _to_item(puzzle)
            attempt += 1

    def eval_items(self) -> list[Item]:
        return [_to_item(puzzle) for puzzle in self._held_out.values()]

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        said = extract_answer(completion_text)
        try:
            value = evaluate(said or "", item.metadata["numbers"])
        except ValueError:
            return Score(reward=0.0, is_right=False, parts={"valid": 0.0})
        is_right = value == item.metadata["target"]
        return Score(reward=1.0 if is_right else FORMAT_REWARD, is_right=is_right, parts={"valid": 1.0})

    def gold_completion(self, item: Item) -> str:
        return f"<answer>{item.answer}</answer>"


class Puzzle(msgspec.Struct, frozen=True):
    """`solution` uses all numbers; `numbers` are in another order."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        return tuple(sorted(self.numbers)), self.target


def make_puzzle(seed: int, args: CountdownArgs) -> Puzzle:
    """The puzzle of this seed: numbers are combined until one is left, which is the target."""
    for attempt in range(10_000):
        count = args.min_numbers + stable_seed(seed, attempt, "count") % (args.max_numbers - args.min_numbers + 1)
        numbers = tuple(1 + stable_seed(seed, attempt, place) % args.largest for place in range(count))
        solution, value = str(numbers[0]), Fraction(numbers[0])
        for place, number in enumerate(numbers[1:]):
            sign = "+-*/"[stable_seed(seed, attempt, place, "sign") % 4]
            kind = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div}[sign]
            value = _OPERATORS[kind](value, Fraction(number))
            solution = f"({solution}) {sign} {number}" if place and sign in "*/" else f"{solution} {sign} {number}"
        if value.denominator == 1 and 10 <= value <= LARGEST_TARGET and value not in numbers:
            return Puzzle(tuple(stable_shuffle(numbers, seed, "order")), int(value), solution)
    raise ConfigError(f"no puzzle found for {args}", fix="change --env.args")


def evaluate(expression: str, numbers: list[int]) -> Fraction:
    """The exact value; ValueError if it is not an expression of these numbers, each used at most once."""
    text = expression.partition("=")[0].strip()  # "3 * 8 = 24" is read as "3 * 8"
    if not text or len(text) > LONGEST:
        raise ValueError(f"an expression has 1 to {LONGEST} characters")
    try:
        tree = ast.parse(text, mode="eval")
        used: Counter[int] = Counter()
        value = _value(tree.body, used)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        raise ValueError(f"{text!r:.60} has no value") from None
    if used - Counter(numbers):
        raise ValueError("it uses other numbers, or one too often")
    return value


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("only numbers, + - * / and parentheses")


def _to_item(puzzle: Puzzle) -> Item:
    question = QUESTION.format(target=puzzle.target, numbers=", ".join(map(str, puzzle.numbers)))
    return Item.ask(question, answer=puzzle.solution, numbers=list(puzzle.numbers), target=puzzle.target)
