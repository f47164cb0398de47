r"""GSM8K, grade-school mathematics: think first, then the answer in a box.

treadle env gsm8k serve --env.data FOLDER      train.jsonl and test.jsonl; without it, the dataset is fetched
"""

from __future__ import annotations

from typing import ClassVar

from treadle.envs.base import Item
from treadle.envs.catalogue import environment
from treadle.envs.data import DataEnvironment
from treadle.envs.rewards.parsing import read_number
from treadle.envs.rows import Row, RowError

_SYSTEM_PROMPT = (
    "You reason before you answer. Write down your reasoning between <think> and </think>, work through the problem "
    "there step by step, and check the result. You have {budget} tokens for everything, so keep some for the answer. "
    "Behind </think>, state the final answer, and nothing else in it than the number, like this: \\boxed{{42}}"
)


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
        return _SYSTEM_PROMPT.format(budget=self.config.max_token_length)

    def gold_completion(self, item: Item) -> str:
        return f"<think>The reasoning stands here.</think>\n\\boxed{{{item.answer}}}"


def gold_answer(solution: str) -> str:
    """The text after the last '#': `gold_answer("She has 3 + 4 = 7.\\n#### 1,007") == "1007"`."""
    gold = solution.rpartition("#")[2].strip().replace(",", "")
    if read_number(gold) is None:
        raise RowError(f"the answer {gold!r:.60} is no number (it is what follows the last #)")
    return gold
