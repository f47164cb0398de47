from __future__ import annotations

import numpy as np
import pytest

from treadle.errors import TrainingError
from treadle.train.pack import pack, shared_prefix, temperature_of, token_advantages
from treadle.wire.groups import ScoredGroup


def group(prompt, completions, scores, **more):
    return ScoredGroup(
        tokens=[[*prompt, *c] for c in completions],
        masks=[[-100] * len(prompt) + list(c) for c in completions],
        scores=scores,
        inference_logprobs=[[1.0] * len(prompt) + [-0.1 * t for t in c] for c in completions],
        **more,
    )


def test_prompt_is_packed_once_and_positions_restart():
    batch = pack([group([5, 6, 7], [[1, 2], [3]], [1.0, 0.0])], normalize_std=False, micro_tokens=100)
    (micro,) = batch.micros
    assert micro.token_ids_T.tolist() == [5, 6, 7, 1, 2, 3]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert micro.segments[0].prompt == (0, 3)
    assert micro.segments[0].completions == ((3, 5), (5, 6))
    assert micro.source_L.tolist() == [2, 3, 2]  # the token before each loss token, in its own rollout
    assert micro.targets_L.tolist() == [1, 2, 3]
    assert micro.advantages_L.tolist() == [0.5, 0.5, -0.5]
    np.testing.assert_allclose(micro.rollout_logprobs_L, [-0.1, -0.2, -0.3], rtol=1e-6)


def test_what_all_prompts_begin_with_is_packed_once_for_the_whole_micro():
    groups = [group([5, 6, 7, 8], [[1, 2], [3]], [1.0, 0.0]), group([5, 6, 9], [[4], [1]], [1.0, 0.0])]
    (micro,) = pack(groups, normalize_std=False, micro_tokens=100).micros
    assert micro.token_ids_T.tolist() == [5, 6, 7, 8, 1, 2, 3, 9, 4, 1]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 3, 3]
    assert [s.root for s in micro.segments] == [(0, 2), (0, 2)]
    assert [s.prompt for s in micro.segments] == [(2, 4), (7, 8)]
    assert micro.source_L.tolist() == [3, 4, 3, 7, 7]


def test_groups_without_spread_are_counted_but_not_forwarded():
    same = group([5], [[1, 2], [3, 4]], [1.0, 1.0])
    mixed = group([6], [[1], [2]], [1.0, 0.0])
    batch = pack([same, mixed], normalize_std=True, micro_tokens=100)
    assert [m.token_ids_T.tolist() for m in batch.micros] == [[6, 1, 2]]
    assert batch.num_loss_tokens == 6
    assert batch.metrics(0)["reward/zero_std_frac"] == 0.5


def test_micros_keep_the_token_budget_and_lose_nothing():
    random = np.random.default_rng(0)
    groups = []
    for _ in range(20):
        prompt = random.integers(5, 9, random.integers(1, 6)).tolist()
        completions = [random.integers(10, 50, random.integers(1, 9)).tolist() for _ in range(4)]
        groups.append(group(prompt, completions, [0.0, 1.0, 2.0, 3.0]))
    batch = pack(groups, normalize_std=True, micro_tokens=64)
    assert len(batch.micros) > 3
    assert all(len(m.token_ids_T) <= 64 for m in batch.micros)
    assert sum(len(m.targets_L) for m in batch.micros) == batch.num_loss_tokens


def test_shared_prefix_stops_where_rollouts_differ_and_before_the_first_loss_token():
    assert shared_prefix(group([1, 2], [[3, 4], [3, 5]], [0, 1])) == 2
    differs = ScoredGroup(tokens=[[1, 2, 3], [1, 9, 3]], masks=[[-100, -100, 3]] * 2, scores=[0.0, 1.0])
    assert shared_prefix(differs) == 1


def test_environments_own_token_advantages_win_and_wrong_lengths_are_ignored():
    own = group([1], [[2, 3], [4, 5]], [1.0, 0.0], advantages=[[9.0, 0.25, -0.5], [1.0]])
    first, second = token_advantages(own, normalize_std=False)
    assert first.tolist() == [0.0, 0.25, -0.5]  # masked where the prompt is
    assert second.tolist() == [0.0, -0.5, -0.5]


def test_set_advantage_to_zero():
    overridden = group([1], [[2], [3]], [1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}])
    first, second = token_advantages(overridden, normalize_std=False)
    assert not first.any()
    assert second.tolist() == [0.0, -0.5]


def test_temperature_is_looked_for_from_the_rollout_outwards():
    g = group([1], [[2], [3]], [1.0, 0.0], overrides=[{"temperature": 0.5}, {}], generation_params={"temperature": 0.8})
    assert temperature_of(g, 0) == 0.5
    assert temperature_of(g, 1) == 0.8
    assert temperature_of(group([1], [[2]], [0.0]), 0) == 1.0


def test_a_group_without_logprobs_is_named():
    bare = group([1], [[2], [3]], [1.0, 0.0])
    bare.inference_logprobs = None
    with pytest.raises(TrainingError, match="inference_logprobs"):
        pack([bare], normalize_std=True, micro_tokens=10)
