r"""Several turns with tools: look facts up, calculate with them, answer in \boxed{}.

treadle env tools serve --env.args '{"max_turns": 6, "invalid_call_penalty": 0.1}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.args import parse_args
from treadle.envs.base import Environment, Item, Message, Score
from treadle.envs.catalogue import environment
from treadle.envs.chat import Model
from treadle.envs.rewards.parsing import answer_text, last_box
from treadle.envs.seeds import stable_seed
from treadle.envs.tasks.arithmetic import last_number, only_number
from treadle.envs.tasks.calculator import calculate
from treadle.envs.tasks.tool_tasks import Puzzle, make_puzzle, search
from treadle.envs.tokens import ChatTokenizer
from treadle.envs.tool_calls import BrokenCall, ToolCall, find_tool_calls
from treadle.errors import ConfigError, ModelError

NUM_HELD_OUT = 256


class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--env.args` may say."""

    max_turns: int = 4  # of the model; what it says in the last one is its answer
    invalid_call_penalty: float = 0.05  # for each call that cannot be made, at most 0.5 in all


class ToolError(ValueError):
    """What the model is told instead of a result."""


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
    """1 for the right number, less a little for every call that could not be made."""

    defaults: ClassVar = {"task": "", "max_token_length": 256}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._args = parse_args(config, Args)
        if self._args.max_turns < 1 or not 0 <= self._args.invalid_call_penalty <= 1:
            raise ConfigError("max_turns is at least 1, and invalid_call_penalty 0 to 1", fix="change --env.args")
        puzzles = (make_puzzle(stable_seed("tools", "held out", n), config.difficulty) for n in range(NUM_HELD_OUT))
        self._held_out = {puzzle.question: puzzle for puzzle in puzzles}

    def train_item(self, index: int) -> Item:
        """Made up by its index. Where chance asks a held-out question, the next of its kind is taken."""
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
        is_right = not calls and _answer_in(said) == Decimal(item.answer)
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
    """Whether the chat template shows messages of the role "tool"; else results are sent as a user's words."""
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
    # One message: some templates want user and assistant to take turns.
    text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
    return [{"role": "user", "content": text}]


def _result_of(call: ToolCall | BrokenCall, facts: Sequence[str]) -> tuple[str, bool]:
    """What the model hears, and whether its call could be made."""
    try:
        if isinstance(call, BrokenCall):
            raise ToolError(call.problem)
        return _call(call, facts), True
    except ToolError as error:
        return f"error: {error}", False


def _call(call: ToolCall, facts: Sequence[str]) -> str:
    if call.name == "search":
        return "\n".join(search(facts, _text(call, "query"))) or "nothing was found"
    if call.name == "calculator":
        try:
            return str(calculate(_text(call, "expression")))
        except ValueError as error:
            raise ToolError(str(error)) from None
    known = ", ".join(str(tool["name"]) for tool in TOOLS)
    raise ToolError(f"there is no tool {call.name!r:.40}; there are: {known}")


def _text(call: ToolCall, name: str) -> str:
    value = call.arguments.get(name)
    if set(call.arguments) != {name} or not isinstance(value, str):
        raise ToolError(f'{call.name} takes {{"{name}": "..."}}')
    return value


def _answer_in(text: str) -> Decimal | None:
    """The number in the last box; without a box, the last number. A sum, or numbers to choose from, are no answer."""
    box = last_box(text)
    return last_number(text) if box is None else only_number(box)
