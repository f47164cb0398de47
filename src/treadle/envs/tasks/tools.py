r"""Several turns with tools: look facts up, calculate with them, answer in \boxed{}.

treadle env tools serve --env.args '{"max_turns": 6, "invalid_call_penalty": 0.1}'

The questions are about a small invented world, which can be looked up but not known; every item has its own world.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Message, Score, environment, parse_args, stable_seed, stable_shuffle
from treadle.envs.chat import Model
from treadle.envs.chat_format import BrokenCall, ChatTokenizer, ToolCall, find_tool_calls
from treadle.envs.rewards.parsing import answer_text, last_box
from treadle.envs.tasks.arithmetic import last_number, only_number
from treadle.errors import ConfigError, ModelError

LONGEST = 200  # characters
_LARGEST = 10**30
_LARGEST_EXPONENT = 64

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FIRST_NAMES = ("Orla", "Tamsin", "Bram", "Ilse", "Joss", "Maren", "Piet", "Runa", "Sorrel", "Wim", "Yara", "Edda")
_LAST_NAMES = (
    "Venn",
    "Askew",
    "Quill",
    "Marl",
    "Tolley",
    "Harrow",
    "Fenn",
    "Ludd",
    "Sparrow",
    "Wick",
    "Oake",
    "Dunmore",
)
_TOWN_BEGINNINGS = ("Tar", "Wesk", "Nym", "Pell", "Hag", "Corr", "Osk", "Ulv", "Bram", "Quen", "Sil", "Dorr")
_TOWN_ENDS = ("mouth", "by", "stead", "ford", "haven", "wick", "mere", "holt", "gate", "crag", "dale", "moor")
_GOODS = ("lantern", "kettle", "saddle", "compass", "blanket", "spindle", "hatchet", "candle", "basket", "whistle")
_EMPTY_WORDS = {"a", "an", "the", "in", "of", "is", "are", "do", "does", "how", "many", "what", "who", "where", "old"}
NUM_HELD_OUT = 256


# ---- calculator


def calculate(expression: str) -> Number:
    """Evaluate numbers, + - * / // % ** and parentheses, without running them as code; ValueError if it cannot.

    >>> calculate("3 * (14 + 8)")
    66
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    not_arithmetic = f"{expression!r} is no arithmetic expression"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: null bytes before 3.11.4, surrogates
        raise ValueError(not_arithmetic) from None
    try:
        result = _value(tree.body)
    except RecursionError:
        raise ValueError(not_arithmetic) from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the numbers get too large") from None
    return int(result) if result == int(result) else result


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]  # just checked
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise ValueError(f"an exponent is at most {_LARGEST_EXPONENT}")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses, not {ast.unparse(node)!r:.40}")


def _bounded(number: Number) -> Number:
    if isinstance(number, complex) or math.isnan(number):
        raise ValueError("the result is no number")
    if abs(number) > _LARGEST:
        raise ValueError("the numbers get too large")
    return number


# ---- questions


@dataclass(frozen=True)
class World:
    """A few people, towns and prices, as numbers and as the sentences that `search` finds."""

    age: dict[str, int]
    home: dict[str, str]
    inhabitants: dict[str, int]
    price: dict[tuple[str, str], int]  # of a good in a town

    @property
    def facts(self) -> list[str]:
        return [
            *(f"{person} is {age} years old." for person, age in self.age.items()),
            *(f"{person} lives in {town}." for person, town in self.home.items()),
            *(f"{town} has {count} inhabitants." for town, count in self.inhabitants.items()),
            *(f"In {town}, a {good} costs {price} crowns." for (good, town), price in self.price.items()),
        ]


@dataclass(frozen=True)
class Puzzle:
    question: str
    answer: int
    facts: tuple[str, ...]


def make_puzzle(seed: int, difficulty: int = 0) -> Puzzle:
    """The puzzle of this seed. Difficulty 1: one fact; 2: two facts; 3: facts that depend on others; 0: any."""
    world = _make_world(seed)
    level = difficulty or 1 + stable_seed(seed, "level") % len(_LEVELS)
    kinds = _LEVELS[min(level, len(_LEVELS)) - 1]
    question, answer = kinds[stable_seed(seed, "kind") % len(kinds)](world, seed)
    return Puzzle(question, answer, tuple(stable_shuffle(world.facts, seed, "facts")))


def search(facts: Sequence[str], query: str, *, most: int = 3) -> list[str]:
    """The facts with the most words in common with the query; among equals, the shortest."""
    wanted = _words(query)
    ranked = sorted(facts, key=lambda fact: (-len(wanted & _words(fact)), len(fact), fact))
    return [fact for fact in ranked[:most] if wanted & _words(fact)]


def _words(text: str) -> set[str]:
    words = set(re.findall(r"\w+", text.lower()))
    return {word.removesuffix("s") for word in words - _EMPTY_WORDS or words}


def _make_world(seed: int) -> World:
    lists = (_FIRST_NAMES, _LAST_NAMES, _TOWN_BEGINNINGS, _TOWN_ENDS, _GOODS)
    first, last, beginnings, ends, goods = (stable_shuffle(names, seed, n) for n, names in enumerate(lists))
    people = [f"{one} {other}" for one, other in zip(first[:4], last[:4], strict=True)]
    towns = [f"{beginning}{end}" for beginning, end in zip(beginnings[:3], ends[:3], strict=True)]

    def draw(low: int, high: int, *what: str) -> int:
        return low + stable_seed(seed, *what) % (high - low + 1)

    return World(
        age={person: draw(18, 90, "age", person) for person in people},
        home={person: towns[draw(0, 2, "home", person)] for person in people},
        inhabitants={town: draw(200, 90_000, "inhabitants", town) for town in towns},
        price={(good, town): draw(2, 60, "price", good, town) for good in goods[:3] for town in towns},
    )


MakeQuestion = Callable[[World, int], tuple[str, int]]


def _age_later(world: World, seed: int) -> tuple[str, int]:
    person, age = next(iter(world.age.items()))
    years = 3 + seed % 40
    return f"How old will {person} be in {years} years?", age + years


def _many_goods(world: World, seed: int) -> tuple[str, int]:
    (good, town), price = next(iter(world.price.items()))
    count = 3 + seed % 20
    return f"How many crowns do {count} {good}s cost in {town}?", count * price


def _ages_together(world: World, _: int) -> tuple[str, int]:
    (one, age), (other, other_age), *_rest = world.age.items()
    return f"How old are {one} and {other} together, in years?", age + other_age


def _larger_town(world: World, _: int) -> tuple[str, int]:
    (one, count), (other, other_count), *_rest = world.inhabitants.items()
    return f"By how many inhabitants do {one} and {other} differ?", abs(count - other_count)


def _goods_at_home(world: World, seed: int) -> tuple[str, int]:
    person, town = next(iter(world.home.items()))
    good = next(iter(world.price))[0]
    count = 2 + seed % 12
    question = f"{person} buys {count} {good}s in the town where {person} lives. How many crowns is that?"
    return question, count * world.price[good, town]


def _neighbours(world: World, _: int) -> tuple[str, int]:
    person, town = next(iter(world.home.items()))
    return f"How many people besides {person} live in the town of {person}?", world.inhabitants[town] - 1


_LEVELS: tuple[tuple[MakeQuestion, ...], ...] = (
    (_age_later, _many_goods),
    (_ages_together, _larger_town),
    (_goods_at_home, _neighbours),
)


# ---- environment


class ToolsArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`."""

    max_turns: int = 4  # of the model; its reply in the last one is its answer
    invalid_call_penalty: float = 0.05  # for each invalid call, at most 0.5 in total


def _parameter(name: str, description: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string", "description": description}}, "required": [name]}


TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "name": "search",
        "description": "Finds what is known about people, towns and prices.",
        "parameters": _parameter("query", "names and words to look for"),
    },
    {
        "name": "calculator",
        "description": "Computes an arithmetic expression.",
        "parameters": _parameter("expression", "for example 3 * (14 + 8)"),
    },
)


@environment("tools")
class Tools(Environment):
    """1 for the right number, minus a penalty for every invalid call."""

    defaults: ClassVar = {"task": "", "max_token_length": 256}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._args = parse_args(config, ToolsArgs)
        if self._args.max_turns < 1 or not 0 <= self._args.invalid_call_penalty <= 1:
            raise ConfigError("max_turns is at least 1, and invalid_call_penalty 0 to 1", fix="change --env.args")
        puzzles = (make_puzzle(stable_seed("tools", "held out", n), config.difficulty) for n in range(NUM_HELD_OUT))
        self._held_out = {puzzle.question: puzzle for puzzle in puzzles}

    def train_item(self, index: int) -> Item:
        """Generated from its index; a held-out question is replaced by the next attempt."""
        attempt = 0
        while True:
            seed = stable_seed("tools", self.config.seed, index, attempt)
            puzzle = make_puzzle(seed, self.config.difficulty)
            if puzzle.question not in self._held_out:
                return self._to_item(puzzle)
            attempt += 1

    def eval_items(self) -> Sequence[Item]:
        return [self._to_item(puzzle) for puzzle in self._held_out.values()]

    async def rollout(self, item: Item, model: Model) -> Score:
        # The tools are described in the system prompt, not by `tools=`: many chat templates leave those out.
        chat = model.chat(item.messages)
        as_tool_role = knows_tool_role(model.tokenizer)
        num_calls = num_invalid = 0
        for turn in range(self._args.max_turns):
            reply = await chat.ask()
            said = answer_text(reply.text)
            calls = find_tool_calls(said)
            if not calls or turn + 1 == self._args.max_turns or reply.finish_reason == "length":
                break
            results = [_result_of(call, item.metadata["facts"]) for call in calls]
            num_calls += len(results)
            num_invalid += sum(not is_valid for _, is_valid in results)
            chat.add(*_as_messages([text for text, _ in results], as_tool_role=as_tool_role))
        box = last_box(said)  # a sum or several numbers in a box are no answer
        answer = last_number(said) if box is None else only_number(box)
        is_right = not calls and answer == Decimal(item.answer)
        penalty = min(0.5, num_invalid * self._args.invalid_call_penalty)
        return Score(
            reward=float(is_right) - penalty,
            is_right=is_right,
            parts={"right": float(is_right), "calls": float(num_calls), "invalid_calls": float(num_invalid)},
        )

    def gold_completion(self, item: Item) -> str:
        return f"\\boxed{{{item.answer}}}"

    def _to_item(self, puzzle: Puzzle) -> Item:
        given = self.config.system_prompt
        return Item.ask(
            puzzle.question,
            answer=str(puzzle.answer),
            system=_SYSTEM_PROMPT if given is None else given,
            facts=list(puzzle.facts),
        )


_SYSTEM_PROMPT = (
    "You answer questions with the help of tools. These are the tools:\n"
    + "\n".join(json.dumps({"type": "function", "function": tool}) for tool in TOOLS)
    + "\nTo use one, write its name and arguments as JSON between tags, and nothing behind the last call:\n"
    '<tool_call>{"name": "search", "arguments": {"query": "Ada Stone"}}</tool_call>\n'
    "The result comes in the next message. When you know the answer, write it without a call, like this: \\boxed{42}"
)


def knows_tool_role(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template shows messages of the role "tool"; if not, results are sent as user messages."""
    result = "(what a tool found)"
    turns: list[Message] = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "."},
        {"role": "tool", "content": result},
    ]
    try:
        return result in tokenizer.render(turns)
    except ModelError:  # the template refuses that role
        return False


def _as_messages(results: Sequence[str], *, as_tool_role: bool) -> list[Message]:
    if as_tool_role:
        return [{"role": "tool", "content": result} for result in results]
    # One message: some templates need user and assistant to alternate.
    text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": text}]


def _result_of(call: ToolCall | BrokenCall, facts: Sequence[str]) -> tuple[str, bool]:
    """The reply to the model, and whether its call was valid."""
    try:
        if isinstance(call, BrokenCall):
            raise ValueError(call.problem)
        if call.name == "search":
            return "\n".join(search(facts, _text(call, "query"))) or "nothing was found", True
        if call.name == "calculator":
            return str(calculate(_text(call, "expression"))), True
        known = ", ".join(str(tool["name"]) for tool in TOOLS)
        raise ValueError(f"there is no tool {call.name!r:.40}; there are: {known}")
    except ValueError as error:
        return f"error: {error}", False


def _text(call: ToolCall, name: str) -> str:
    value = call.arguments.get(name)
    if set(call.arguments) != {name} or not isinstance(value, str):
        raise ValueError(f'{call.name} takes {{"{name}": "..."}}')
    return value
