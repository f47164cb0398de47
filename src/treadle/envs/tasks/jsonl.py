"""Train on any file of prompts and answers.

treadle env jsonl serve --env.data rows.jsonl
treadle env jsonl serve --env.data rows.jsonl --env.args '{"answer_field": "target", "rewards": ["boxed_math"]}'
"""

from __future__ import annotations

import functools
import json
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, Message
from treadle.envs.catalogue import environment, parse_args
from treadle.envs.data import DataEnvironment
from treadle.envs.rewards import BatchFunctionReward, registry
from treadle.envs.rewards.combined import expects_box, leaves
from treadle.envs.rows import Row, RowError

PROMPT_FIELDS = ("messages", "prompt", "question")
ANSWER_FIELDS = ("answer", "solution", "gold")


class JsonlArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`."""

    prompt_field: str | None = None  # text or chat messages; None: the first of PROMPT_FIELDS
    # None: the first of ANSWER_FIELDS, which is optional if all rewards are functions that take columns;
    # "": the rows have no answers, and the rewards need none
    answer_field: str | None = None
    rewards: Any = ("exact_match",)  # a value for `registry.create`


@environment("jsonl")
class Jsonl(DataEnvironment):
    """A row is a prompt and its answer; its other fields are metadata for rewards."""

    defaults: ClassVar = {"max_token_length": 256}
    args_type: ClassVar[type[JsonlArgs]] = JsonlArgs

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._args = parse_args(config, self.args_type)
        registry.create(self._args.rewards)  # report a misspelt reward before the data is loaded
        self.rewards = self._args.rewards

    def to_item(self, row: Row) -> Item:
        prompt_fields = (self._args.prompt_field,) if self._args.prompt_field is not None else PROMPT_FIELDS
        answer_fields = (self._args.answer_field,) if self._args.answer_field is not None else ANSWER_FIELDS
        prompt_field, answer_field = row.has(*prompt_fields), row.has(*answer_fields)
        take_columns = self._take_columns
        needs_answer = answer_field is None and self._args.answer_field != "" and not all(take_columns)
        if prompt_field is None or needs_answer:
            missing = prompt_fields if prompt_field is None else answer_fields
            wanted = [*["prompt_field"] * (prompt_field is None), *["answer_field"] * needs_answer]
            other_fields = [name for name in row.fields if name not in (prompt_field, answer_field)]
            named = dict(zip(wanted, other_fields, strict=False))
            args = json.dumps({**self.config.args, **named}, ensure_ascii=False)
            fix = f"if these are the fields that you mean, pass --env.args '{args}'" if named else ""
            raise RowError(row.lacks(*missing), fix=fix)
        prompt = row.fields[prompt_field]
        if isinstance(prompt, list):
            messages = _as_messages(prompt)
        else:
            messages = [{"role": "user", "content": row.text(*prompt_fields)}]
        if self.system_prompt:  # it replaces those of the row
            others = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system_prompt}, *others]
        return Item(
            messages=tuple(messages),
            answer="" if answer_field is None or self._args.answer_field == "" else row.text(*answer_fields),
            # A function that takes columns gets the answer under the column's own name.
            metadata=row.rest(prompt_field, "" if any(take_columns) else answer_field or ""),
            is_chat=isinstance(prompt, list),
        )

    @functools.cached_property
    def _take_columns(self) -> list[bool]:
        """For each reward, whether it is a function that takes the row's columns as lists."""
        return [isinstance(leaf, BatchFunctionReward) for leaf in leaves(registry.create(self.rewards))]

    def own_system_prompt(self) -> str:
        return "Put your final answer into \\boxed{}." if expects_box(self.rewards) else ""


def _as_messages(given: list[Any]) -> list[Message]:
    """Validate chat messages: the last one must be something to answer."""
    for message in given:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError('has a message that is not {"role": "user", "content": "..."}')
    if not given or given[-1]["role"] == "assistant":
        raise RowError("has messages that do not end with something to answer")
    return given
