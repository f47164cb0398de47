"""SVAMP: short word problems with one number as the answer, for models that are too small for GSM8K.

treadle env svamp serve --env.data SVAMP.json
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import ClassVar

from treadle.envs.base import Item, Score
from treadle.envs.catalogue import environment
from treadle.envs.data import DataEnvironment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards.parsing import answer_text
from treadle.envs.rows import Row, RowError
from treadle.envs.tasks.arithmetic import last_number

_ENDS = (".", "!", "?", ",", ";", ":")
_TOLERANCE = Decimal("1e-6")


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
        story = body if body.endswith(_ENDS) else f"{body}."
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
