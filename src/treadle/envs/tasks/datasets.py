"""Tasks from rows of data: any file of prompts and answers (jsonl), and word problems with a number as the answer.

treadle env jsonl serve --env.data rows.jsonl
treadle env jsonl serve --env.data rows.jsonl --env.args '{"answer_field": "target", "rewards": ["boxed_math"]}'
treadle env gsm8k serve --env.data FOLDER      train.jsonl and test.jsonl; without it, the dataset is fetched
treadle env svamp serve --env.data SVAMP.json  for models that are too small for GSM8K
"""

from __future__ import annotations

import functools
import json
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, Message, Score, environment, parse_args
from treadle.envs.data import DataEnvironment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import BatchFunctionReward, registry
from treadle.envs.rewards.combined import expects_box, leaves
from treadle.envs.rewards.parsing import answer_text, read_number
from treadle.envs.rows import Row, RowError
from treadle.envs.tasks.arithmetic import last_number

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


_GSM8K_PROMPT = (
    "You reason before you answer. Write down your reasoning between <think> and </think>, work through the problem "
    "there step by step, and check the result. You have {budget} tokens for everything, so keep some for the answer. "
    "Behind </think>, state the final answer, and nothing else in it than the number, like this: \\boxed{{42}}"
)
_SENTENCE_ENDS = (".", "!", "?", ",", ";", ":")
_TOLERANCE = Decimal("1e-6")


@environment("gsm8k")
class Gsm8k(DataEnvironment):
    r"""1 if the last \boxed{...} after the thinking has the value of the answer, else -1.

    If a whole group is right, long completions score less (`length_penalty`); groups with equal scores are dropped; a
    completion of fewer than `min_trained_tokens` tokens is not trained on.
    """

    rewards = ("boxed_math",)
    dataset: ClassVar = "openai/gsm8k:main"
    min_trained_tokens: ClassVar = 10
    defaults: ClassVar = {
        "group_size": 8,
        "max_token_length": 2048,
        "temperature": 1.0,
        "ensure_scores_are_not_same": True,
        "length_penalty": True,
        "num_eval": 1319,  # all of the test split
        "steps_per_eval": 100,
    }

    def to_item(self, row: Row) -> Item:
        return Item.ask(row.text("question"), answer=gold_answer(row.text("answer")), system=self.system_prompt)

    def own_system_prompt(self) -> str:
        return _GSM8K_PROMPT.format(budget=self.config.max_token_length)

    def gold_completion(self, item: Item) -> str:
        return f"<think>The reasoning stands here.</think>\n\\boxed{{{item.answer}}}"


def gold_answer(solution: str) -> str:
    """The text after the last '#': `gold_answer("She has 3 + 4 = 7.\\n#### 1,007") == "1007"`."""
    gold = solution.rpartition("#")[2].strip().replace(",", "")
    if read_number(gold) is None:
        raise RowError(f"the answer {gold!r:.60} is no number (it is what follows the last #)")
    return gold


@environment("svamp")
class Svamp(DataEnvironment):
    r"""Reward 1 if the last number after the last `</think>` is the answer, else 0.

    The prompt asks for the number only. The same rule holds for a model that reasons first or boxes its answer.
    """

    defaults: ClassVar = {"max_token_length": 64}

    def to_item(self, row: Row) -> Item:
        body, question, answer = row.text("Body").strip(), row.text("Question").strip(), row.text("Answer").strip()
        try:
            is_number = Decimal(answer).is_finite()
        except InvalidOperation:
            is_number = False
        if not is_number:
            raise RowError(f"the field 'Answer' is {answer!r:.60}, not a number")
        story = body if body.endswith(_SENTENCE_ENDS) else f"{body}."
        return Item.ask(
            f"{story} {question} Answer with only the number.",
            answer=answer,
            system=self.system_prompt,
            **{name: value for name, value in row.rest().items() if name in ("ID", "Type", "Equation")},
        )

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        predicted, answer = last_number(answer_text(completion_text)), Decimal(item.answer)
        # Compared, not subtracted: 1e999999999 is too large for arithmetic.
        is_right = predicted is not None and answer - _TOLERANCE <= predicted <= answer + _TOLERANCE
        return Score(reward=float(is_right), is_right=is_right)
