"""Rewards that compare a completion with an answer, a pattern or a schema. All look behind the last `</think>`."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from typing import Any, ClassVar

import msgspec

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.passages import answer_text
from treadle.errors import ConfigError, require


class ExactMatchReward(Reward):
    """1 when the completion is the answer, but for white space around it; else 0.

    >>> ExactMatchReward(ignore_case=True).score(RewardInput("paris\\n", answer="Paris"))
    1.0
    """

    ignore_case: bool = False

    def score(self, completion: RewardInput) -> float:
        return float(self._plain(answer_text(completion.text)) == self._plain(completion.answer))

    def _plain(self, text: str) -> str:
        plain = unicodedata.normalize("NFC", text).strip()  # é is one letter, however it is encoded
        return plain.casefold() if self.ignore_case else plain


class RegexReward(Reward):
    """1 when the pattern is found; with `compare_answer`, when its last find (group 1, if it has one) is the answer.

    >>> RegexReward(r"Answer: (\\w+)", compare_answer=True).score(RewardInput("Answer: yes", answer="yes"))
    1.0
    """

    pattern: str
    compare_answer: bool = False
    ignore_case: bool = False

    def check(self) -> None:
        try:
            self._compiled  # noqa: B018  # compiled once, and here
        except re.error as error:
            raise ConfigError(
                f"reward '{self.name}': {self.pattern!r} is no pattern: {error}", fix="correct it"
            ) from None

    def score(self, completion: RewardInput) -> float:
        text = answer_text(completion.text)
        if not self.compare_answer:
            return float(self._compiled.search(text) is not None)
        finds = list(self._compiled.finditer(text))
        if not finds:
            return 0.0
        found = finds[-1]
        said = found.group(1 if self._compiled.groups else 0) or ""
        return float(said.strip() == completion.answer.strip())

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)


class JsonSchemaReward(Reward):
    """1 when the completion is JSON that fits the schema; else 0. A ```json fence around it does no harm.

    Without `schema`, each completion is held against the "schema" in its metadata.
    """

    needs: ClassVar = ("envs", "jsonschema_rs")

    schema: dict[str, Any] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        if self.schema:
            self._validator  # noqa: B018  # a schema that is none is refused here

    def warm_up(self) -> None:
        self.check_installed()

    def score(self, completion: RewardInput) -> float:
        try:
            value = json.loads(_unfenced(answer_text(completion.text)), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return 0.0
        validator = self._validator if self.schema else _make_validator(completion.metadata["schema"], self.name)
        return float(validator.is_valid(value))

    @functools.cached_property
    def _validator(self) -> Any:
        return _make_validator(self.schema, self.name)


def _make_validator(schema: Any, name: str) -> Any:
    require(*JsonSchemaReward.needs)
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema)
    except ValueError as error:
        raise ConfigError(f"reward '{name}': this is no JSON schema: {error}", fix="correct the schema") from None


_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL | re.IGNORECASE)


def _unfenced(text: str) -> str:
    fenced = _FENCE.fullmatch(text)
    return fenced.group(1) if fenced else text


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
