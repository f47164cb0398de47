"""What is sent of a wave: completions that were cut off are marked, so that the trainer may leave them out."""

from __future__ import annotations

import pytest

from treadle.envs.base import Item, Score
from treadle.envs.engine_client import Completion, Generation
from treadle.envs.rollout import build_group


def completion(*token_ids: int, finish_reason: str) -> Completion:
    return Completion(list(token_ids), [-0.5] * len(token_ids), "text", finish_reason, policy_version=3)


@pytest.mark.parametrize(
    ("reasons", "overrides", "truncated"),
    [
        (("stop", "stop"), None, 0.0),
        (("stop", "length"), [{}, {"finish_reason": "length"}], 0.5),
        (("length", "length"), [{"finish_reason": "length"}, {"finish_reason": "length"}], 1.0),
    ],
)
def test_what_was_cut_off_at_the_length_limit_is_said(reasons, overrides, truncated) -> None:
    completions = [completion(7, 8, finish_reason=reason) for reason in reasons]
    item = Item.ask("1+1", answer="2")
    scores = [Score(1.0, is_right=True), Score(0.0, is_right=False)]
    group = build_group(item, [1, 2], Generation(completions, 0.5), scores, temperature=0.7)
    assert group.overrides == overrides
    assert group.metrics["truncated"] == truncated
    assert group.generation_params == {"temperature": 0.7}
