"""Small functions to write, made up from patterns: the tasks of the environment `code` when it is given no data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from treadle.envs.seeds import stable_seed

NUM_TESTS = 6
_WORDS = ("loom", "weft", "a", "shuttle", "warp", "of", "heddle", "reed", "bobbin", "the", "treadle", "selvedge", "in")


@dataclass(frozen=True)
class CodeTask:
    """A function to write, a correct solution, and its tests."""

    question: str
    solution: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """`wish` and `solution` are filled with a number k; `make` draws an argument."""

    call: str  # "sum_of_multiples(values)"
    wish: str
    solution: str
    make: Callable[[int], Any]

    def task(self, k: int) -> CodeTask:
        name = self.call.partition("(")[0]
        solution = f"def {self.call}:\n    {self.solution.format(k=k)}\n"
        namespace: dict[str, Any] = {}
        exec(solution, namespace)  # noqa: S102  # our own lines, from below
        given: list[Any] = []
        for number in itertools.count():
            argument = self.make(stable_seed("code", name, k, number))
            given += [] if argument in given else [argument]
            if len(given) > NUM_TESTS:
                break
        example, *tests = [f"{name}({argument!r}) == {namespace[name](argument)!r}" for argument in given]
        question = f"Write a Python function {self.call} that {self.wish.format(k=k)}\nFor example, {example}"
        return CodeTask(question, solution, tuple(f"assert {test}" for test in tests))


def generated_tasks() -> Iterator[tuple[CodeTask, bool]]:
    """All tasks, always the same, and whether each is held out: about one in five of every pattern."""
    for pattern in PATTERNS:
        for k in range(2, 18):
            yield pattern.task(k), k % 5 == 3


def _numbers(seed: int) -> list[int]:
    """5 to 12 numbers of -20 to 40, some of them more than once."""
    return [stable_seed(seed, place) % 61 - 20 for place in range(5 + seed % 8)]


def _few_numbers(seed: int) -> list[int]:
    """The same of 0 to 9, so that values meet again."""
    return [stable_seed(seed, place) % 10 for place in range(8 + seed % 12)]


def _text(seed: int) -> str:
    return " ".join(_WORDS[stable_seed(seed, place) % len(_WORDS)] for place in range(4 + seed % 6))


def _count(seed: int) -> int:
    return 20 + seed % 180


PATTERNS = (
    Pattern(
        "sum_of_multiples(values)",
        "returns the sum of those integers in the list values that are divisible by {k}.",
        "return sum(value for value in values if value % {k} == 0)",
        _numbers,
    ),
    Pattern(
        "scale(values)",
        "returns a list with every integer of the list values multiplied by {k} and then decreased by 1.",
        "return [value * {k} - 1 for value in values]",
        _numbers,
    ),
    Pattern(
        "clamp(values)",
        "returns the list values with everything below -{k} replaced by -{k} and everything above {k} by {k}.",
        "return [max(-{k}, min({k}, value)) for value in values]",
        _numbers,
    ),
    Pattern(
        "rotate(values)",
        "returns the list values rotated to the left by {k} places, as often around as it takes.",
        "return values[{k} % len(values):] + values[:{k} % len(values)]",
        _numbers,
    ),
    Pattern(
        "chunks(values)",
        "splits the list values into lists of {k} elements, in order; the last one may be shorter.",
        "return [values[start:start + {k}] for start in range(0, len(values), {k})]",
        _few_numbers,
    ),
    Pattern(
        "running_total(values)",
        "returns the list of running totals of the list values, where a total above {k} starts again at 0.",
        "totals, total = [], 0\n    for value in values:\n        total += value\n"
        "        if total > {k}:\n            total = 0\n        totals.append(total)\n    return totals",
        _few_numbers,
    ),
    Pattern(
        "pairs_with_sum(values)",
        "counts the pairs of places i < j in the list values where values[i] + values[j] is {k}.",
        "return sum(a + b == {k} for i, a in enumerate(values) for b in values[i + 1:])",
        _few_numbers,
    ),
    Pattern(
        "without_neighbours(values)",
        "returns the list values without those elements that differ by less than {k} from the element before them "
        "in values. The first element stays.",
        "return values[:1] + [b for a, b in zip(values, values[1:]) if abs(a - b) >= {k}]",
        _numbers,
    ),
    Pattern(
        "shift(text)",
        "moves every lower-case letter of text by {k} places along the alphabet, from z on to a, and leaves all "
        "other characters as they are.",
        'return "".join(chr((ord(c) - 97 + {k}) % 26 + 97) if "a" <= c <= "z" else c for c in text)',
        _text,
    ),
    Pattern(
        "every_other(text)",
        "returns text without the characters at the places {k}, 2 * {k}, 3 * {k} and so on; the first place is 1.",
        'return "".join(c for place, c in enumerate(text, start=1) if place % {k})',
        _text,
    ),
    Pattern(
        "mark(text)",
        "returns text with every word of {k} or more letters in capitals. Words are separated by single spaces.",
        'return " ".join(word.upper() if len(word) >= {k} else word for word in text.split(" "))',
        _text,
    ),
    Pattern(
        "digits(number)",
        "returns the digits of the positive integer number in base {k}, as a list, the most significant first.",
        "found = []\n    while number:\n        found.insert(0, number % {k})\n        number //= {k}\n"
        "    return found",
        _count,
    ),
    Pattern(
        "steps(number)",
        "counts how often the positive integer number must be divided by {k}, rounding down, until it is 0.",
        "count = 0\n    while number:\n        number //= {k}\n        count += 1\n    return count",
        _count,
    ),
)
