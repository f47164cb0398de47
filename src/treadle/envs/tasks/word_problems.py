"""Word problems with one number as the answer: GSM8K, and SVAMP for models that are too small for GSM8K.

treadle env gsm8k serve --env.data FOLDER      train.jsonl and test.jsonl; without it, the dataset is fetched
treadle env svamp serve --env.data SVAMP.json
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import ClassVar

from treadle.envs.base import Item, Score
from treadle.envs.catalogue import environment
from treadle.envs.data import DataEnvironment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards.parsing import answer_text, read_number
from treadle.envs.rows import Row, RowError
from treadle.envs.tasks.arithmetic import last_number

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
