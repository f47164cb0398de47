from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from treadle.config import TrainConfig
from treadle.train.pack import find_stems, pack, pack_into_bins
from treadle.train.prepare import PreparedGroup, temperature_of, token_advantages
from treadle.wire.groups import IGNORED, ScoredGroup

PLAIN = TrainConfig(normalize_std=False, micro_tokens=100)


def settings(**changes):
    return PLAIN.model_copy(update=changes)


def group(prompt, completions, scores, **more):
    return ScoredGroup(
        tokens=[[*prompt, *c] for c in completions],
        masks=[[-100] * len(prompt) + list(c) for c in completions],
        scores=scores,
        inference_logprobs=[[1.0] * len(prompt) + [-0.1 * t for t in c] for c in completions],
        **more,
    )


def advantages_of(g, config=PLAIN):
    return token_advantages(g, [np.array(mask) != IGNORED for mask in g.masks], config)


def test_prompt_is_packed_once_and_positions_restart():
    (micro,) = pack([group([5, 6, 7], [[1, 2], [3]], [1.0, 0.0])], PLAIN).micros
    assert micro.token_ids_T.tolist() == [5, 6, 7, 1]  # the last token of a rollout predicts nothing
    assert micro.positions_T.tolist() == [0, 1, 2, 3]
    assert micro.segments[0].prompt == (0, 3)
    assert micro.segments[0].completions == ((3, 4), (4, 4))
    assert micro.source_L.tolist() == [2, 3, 2]  # the token before each loss token, in its own rollout
    assert micro.targets_L.tolist() == [1, 2, 3]
    tokens = micro.loss_tokens
    assert tokens.advantages_L.tolist() == [0.5, 0.5, -0.5]
    assert tokens.sequences_L.tolist() == [0, 0, 1]
    np.testing.assert_allclose(tokens.rollout_logprobs_L, [-0.1, -0.2, -0.3], rtol=1e-6)


def test_without_sharing_every_rollout_brings_its_prompt():
    (micro,) = pack([group([5, 6, 7], [[1, 2], [3]], [1.0, 0.0])], settings(share_prompts="off")).micros
    assert micro.token_ids_T.tolist() == [5, 6, 7, 1, 5, 6, 7]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert [s.completions for s in micro.segments] == [((0, 4),), ((4, 7),)]
    assert micro.source_L.tolist() == [2, 3, 6]


def test_what_completions_begin_with_is_packed_and_predicted_once():
    (micro,) = pack([group([5, 6], [[1, 2, 2, 3], [1, 2, 2, 4, 8], [9, 7]], [1.0, 0.0, 0.0])], PLAIN).micros
    assert micro.token_ids_T.tolist() == [5, 6, 1, 2, 2, 4, 9]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 2]
    assert [s.root for s in micro.segments] == [(0, 2), (0, 2)]
    assert [(s.prompt, s.completions) for s in micro.segments] == [((2, 5), ((5, 5), (5, 6))), ((6, 7), ((7, 7),))]
    assert micro.source_L.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 6]
    assert micro.targets_L.tolist() == [1, 2, 2, 3, 1, 2, 2, 4, 8, 9, 7]
    assert len(micro.first_D) == 8  # three of the eleven predictions are those of another rollout
    predictions = list(zip(micro.source_L.tolist(), micro.targets_L.tolist(), strict=True))
    assert predictions == [predictions[micro.first_D[d]] for d in micro.prediction_L.tolist()]


def test_a_longer_stem_is_shared_only_where_that_saves_tokens():
    rows = [[7, 8, 1, 2, 3], [7, 8, 1, 2, 4], [7, 8, 9]]
    assert find_stems(rows, [0, 1, 2], num_root=0) == [([0, 1, 2], 2)]  # two tokens saved, two repeated
    assert find_stems(rows, [0, 1, 2], num_root=1) == [([0, 1], 4), ([2], 2)]


def test_prompts_are_shared_by_themselves_only_when_it_pays():
    short = group([5], [list(range(10, 40)), list(range(50, 80))], [1.0, 0.0])
    long = group([5, 6, 7, 8], [[1, 2], [3]], [1.0, 0.0])
    assert pack([short], PLAIN).num_forwarded_tokens == 60
    assert pack([long], PLAIN).num_forwarded_tokens == 5


def test_what_all_prompts_begin_with_is_packed_once_for_the_whole_micro():
    groups = [group([5, 6, 7, 8], [[1, 2], [3]], [1.0, 0.0]), group([5, 6, 9], [[4], [1]], [1.0, 0.0])]
    (micro,) = pack(groups, PLAIN).micros
    assert micro.token_ids_T.tolist() == [5, 6, 7, 8, 1, 9]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 4, 2]
    assert [s.root for s in micro.segments] == [(0, 2), (0, 2)]
    assert [s.prompt for s in micro.segments] == [(2, 4), (5, 6)]
    assert micro.source_L.tolist() == [3, 4, 3, 5, 5]


def test_groups_without_spread_are_counted_but_not_forwarded():
    same = group([5], [[1, 2], [3, 4]], [1.0, 1.0])
    mixed = group([6], [[1], [2]], [1.0, 0.0])
    batch = pack([same, mixed], PLAIN)
    assert [m.token_ids_T.tolist() for m in batch.micros] == [[6]]
    assert batch.micros[0].loss_tokens.weights_L.tolist() == pytest.approx([1 / 6] * 2)  # all six count in the mean
    metrics = batch.metrics(0)
    assert (metrics["batch/trained_tokens_per_step"], metrics["batch/packing_ratio"]) == (2, 4)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert (metrics["by_group/frac_all_good"], metrics["by_group/frac_all_bad"]) == (0.5, 0.0)


def test_a_batch_without_advantages_has_no_micros_and_finite_metrics():
    batch = pack([group([5], [[1], [2]], [0.0, 0.0])], PLAIN)
    assert batch.micros == ()
    assert all(math.isfinite(v) for k, v in batch.metrics(3).items() if "staleness" not in k)
    assert math.isnan(batch.metrics(3)["sample/staleness_mean"])  # nobody said which version sampled it


def test_a_kl_term_or_a_sequence_ratio_brings_tokens_without_advantage():
    same = group([5], [[1, 2], [3, 4]], [1.0, 1.0])
    assert pack([same], settings(kl_coef=0.1)).micros[0].targets_L.tolist() == [1, 2, 3, 4]
    partly = group([5], [[1, 2], [3, 4]], [1.0, 0.0], advantages=[[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    assert pack([partly], PLAIN).micros[0].targets_L.tolist() == [2]
    assert pack([partly], settings(ratio="sequence_mean")).micros[0].targets_L.tolist() == [1, 2]


def taught(**fields):
    """Two rollouts with equal scores; the teacher's logprobs of the first, and of one token of the second."""
    made = group([5], [[1, 2], [3, 4]], [1.0, 1.0])
    made.distill_token_ids = [[[0], [1], [2]], [[], [9, 3], [9]]]
    made.distill_logprobs = [[[0.0], [-0.5], [-99.0]], [[], [-3.0, -0.25], [-2.0]]]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_group_with_equal_scores_is_trained_where_a_teacher_scored_it():
    (micro,) = pack([taught(weight=0.5)], settings(distill_coef=2.0)).micros
    tokens = micro.loss_tokens
    assert micro.targets_L.tolist() == [1, 2, 3]
    assert tokens.teacher_logprobs_L.tolist() == [-0.5, -25.0, -0.25]  # no single token outweighs a step
    assert tokens.teacher_coefs_L.tolist() == [1.0] * 3  # times the weight of a stale group
    assert tokens.advantages_L.tolist() == [0.0] * 3
    assert pack([taught()], PLAIN).micros == ()  # nothing is distilled
    assert pack([taught(overrides=[{"set_advantage_to_zero": True}] * 2)], settings(distill_coef=2.0)).micros == ()


def test_a_token_without_the_teachers_logprob_is_trained_by_its_score():
    mixed = taught(scores=[1.0, 0.0])
    (micro,) = pack([mixed], settings(distill_coef=1.0, normalize_std=False)).micros
    assert micro.loss_tokens.advantages_L.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert micro.loss_tokens.teacher_logprobs_L.isnan().tolist() == [False, False, False, True]
    (micro,) = pack([mixed], settings(distill_coef=1.0, reward_coef=0.0)).micros
    assert micro.loss_tokens.advantages_L.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([[[1], [2]]] * 2, [[[-0.5], [-0.5]]] * 2),  # another number of tokens
        ([[[5], [1], [2]]], [[[0.0], [-1.0], [-1.0]]]),  # of one rollout
        ([[[], [1], [2]]] * 2, [[[], [1.0], [math.nan]]] * 2),  # not sampled, not a number
        (None, [[[], [-1.0], [-1.0]]] * 2),
    ],
)
def test_teacher_logprobs_that_do_not_fit_the_tokens_are_not_used(ids, logprobs):
    odd = taught(distill_token_ids=ids, distill_logprobs=logprobs)
    num_used = sum(len(micro.targets_L) for micro in pack([odd], settings(distill_coef=1.0)).micros)
    assert num_used == (2 if ids is not None and len(ids) == 1 else 0)


def random_groups(seed=0, num_groups=20):
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        prompt = random.integers(5, 9, random.integers(1, 6)).tolist()
        completions = [random.integers(10, 50, random.integers(1, 9)).tolist() for _ in range(4)]
        groups.append(group(prompt, completions, [0.0, 1.0, 2.0, 3.0]))
    return groups


@pytest.mark.parametrize("budget", [64, 20, 5])
def test_micros_keep_the_token_budget_and_lose_nothing(budget):
    groups = random_groups()
    batch = pack(groups, settings(micro_tokens=budget))
    longest = max(len(t) for g in groups for t in g.tokens)
    assert all(len(m.token_ids_T) <= max(budget, longest) for m in batch.micros)
    wanted = sorted(t for g in groups for mask in g.masks for t in mask if t != IGNORED)
    assert sorted(t for m in batch.micros for t in m.targets_L.tolist()) == wanted


def test_a_group_larger_than_the_budget_is_cut_between_rollouts():
    large = group([5, 6, 7], [[i, i, i, i] for i in range(10, 16)], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    batch = pack([large], settings(micro_tokens=12))
    assert [len(m.token_ids_T) for m in batch.micros] == [12, 12]  # the prompt and three completions each


def test_micros_cost_about_the_same():
    batch = pack(random_groups(), settings(micro_tokens=64))
    assert len(batch.micros) > 3
    assert batch.metrics(0)["batch/row_imbalance"] < 1.15


def test_packing_into_bins_is_deterministic_and_keeps_capacity():
    random = np.random.default_rng(1)
    things = [(int(size), float(size)) for size in random.integers(1, 30, 200)]
    bins = pack_into_bins(things, 100)
    assert bins == pack_into_bins(things, 100)
    assert sorted(i for chosen in bins for i in chosen) == list(range(200))
    assert all(sum(things[i][0] for i in chosen) <= 100 for chosen in bins)
    assert len(bins) <= sum(size for size, _ in things) // 100 + 2


def test_no_bin_holds_only_what_was_left_over():
    bins = pack_into_bins([(4218, 1.0)] * 16, 16_384)  # three fit into one bin
    assert sorted(map(len, bins)) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token_mean", [1 / 6] * 6),
        ("sequence_mean", [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2),
        ("sequence_constant", [1 / 30] * 6),
    ],
)
def test_weights_are_shares_of_the_whole_step(aggregation, wanted):
    groups = [group([5], [[1, 2, 3], [4]], [1.0, 0.0]), group([6], [[7, 8]], [1.0], advantages=[[0.0, 1.0, 1.0]])]
    config = settings(aggregation=aggregation, seq_len=10)
    got = torch.cat([m.loss_tokens.weights_L for m in pack(groups, config).micros])
    np.testing.assert_allclose(sorted(got), sorted(wanted), rtol=1e-6)


def test_completions_that_were_cut_off_carry_no_loss_when_asked():
    group_with_marks = group([5], [[1, 2], [3]], [1.0, 0.0], overrides=[{"finish_reason": "length"}, {}])
    batch = pack([group_with_marks], settings(mask_overlong=True))
    assert batch.micros[0].targets_L.tolist() == [3]
    assert batch.micros[0].loss_tokens.weights_L.tolist() == [1.0]
    assert batch.metrics(0)["completions/clipped_ratio"] == 0.5
    assert batch.metrics(0)["batch/masked_token_frac"] == pytest.approx(2 / 3)
    assert pack([group_with_marks], PLAIN).num_loss_tokens == 3  # as long as nobody asks
    full = group([5], [[1, 2], [3]], [1.0, 0.0])
    assert pack([full], settings(mask_overlong=True, seq_len=3)).micros[0].targets_L.tolist() == [3]


def test_positive_logprobs_are_counted_and_placeholders_are_not():
    shifted = group([5], [[1, 2], [3]], [1.0, 0.0])
    shifted.inference_logprobs = [[1.0, 0.9, 1.0], [1.0, -0.2]]
    batch = pack([shifted], PLAIN)
    assert batch.metrics(0)["batch/positive_logprobs_frac"] == pytest.approx(1 / 3)
    assert batch.micros[0].loss_tokens.rollout_logprobs_L.isnan().tolist() == [True, True, False]
    assert pack([group([5], [[1], [3]], [1.0, 0.0])], PLAIN).metrics(0)["batch/positive_logprobs_frac"] == 0


def test_repetition_is_that_of_completions_long_enough_to_tell():
    looping, fresh = [1, 2] * 20, list(range(40))
    batch = pack([group([5], [looping, fresh, [1]], [1.0, 0.0, 0.0])], PLAIN)
    assert batch.metrics(0)["completions/repetition"] == pytest.approx((1 - 2 / 37) / 2)
    assert "completions/repetition" not in pack([group([5], [[1], [3]], [1.0, 0.0])], PLAIN).metrics(0)


def test_shared_prefix_ends_at_a_difference_or_a_trained_token():
    def prefix(tokens, masks):
        return PreparedGroup(ScoredGroup(tokens=tokens, masks=masks, scores=[1.0, 0.0]), PLAIN).prefix

    assert prefix([[1, 2, 3, 4], [1, 2, 3, 5]], [[-100, -100, 3, 4]] * 2) == 2
    assert prefix([[1, 2, 3], [1, 9, 3]], [[-100, -100, 3]] * 2) == 1


def test_token_advantages_of_the_environment_win_if_their_length_fits():
    own = group([1], [[2, 3], [4, 5]], [1.0, 0.0], advantages=[[9.0, 0.25, -0.5], [1.0]])
    first, second = advantages_of(own)
    assert first.tolist() == [0.0, 0.25, -0.5]  # masked where the prompt is
    assert second.tolist() == [0.0, -0.5, -0.5]


def test_set_advantage_to_zero():
    overridden = group([1], [[2], [3]], [1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}])
    first, second = advantages_of(overridden)
    assert not first.any()
    assert second.tolist() == [0.0, -0.5]
    assert pack([overridden], PLAIN).micros[0].targets_L.tolist() == [3]  # nothing to teach, not forwarded


def test_a_stale_groups_weight_scales_its_advantages():
    assert advantages_of(group([1], [[2], [3]], [1.0, 0.0], weight=0.5))[0].tolist() == [0.0, 0.25]


def test_temperature_is_looked_for_from_the_rollout_outwards():
    g = group([1], [[2], [3]], [1.0, 0.0], overrides=[{"temperature": 0.5}, {}], generation_params={"temperature": 0.8})
    assert temperature_of(g, 0) == 0.5
    assert temperature_of(g, 1) == 0.8
    assert temperature_of(group([1], [[2]], [0.0]), 0) == 1.0


ODD = {
    "a score beyond fp32": {"scores": [1e39, 0.0]},
    "scores whose sum overflows": {"scores": [1e308, 1.7e308]},
    "an advantage beyond fp32": {"advantages": [[0.0, 1e39], [0.0, -1e39]]},
    "an advantage that is no number": {"advantages": [[0.0, math.nan], [0.0, math.nan]]},
    "a temperature of nearly nothing": {"generation_params": {"temperature": 1e-45}},
    "a token that does not exist": {"tokens": [[1, 99], [1, 98]], "masks": [[-100, 99], [-100, 98]]},
    "more tokens than are taken": {"tokens": [[1, 2] * 60] * 2, "masks": [[-100, 2] * 60] * 2},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_unusable_rollouts_are_rejected_and_the_rest_is_trained(odd):
    bad = group([1], [[2], [3]], [1.0, 0.0])
    for name, value in odd.items():
        setattr(bad, name, value)
    bad.inference_logprobs = None
    good = group([6], [[7], [8]], [1.0, 0.0])
    batch = pack([bad, good], settings(seq_len=100), vocab_size=90)
    assert [m.targets_L.tolist() for m in batch.micros] == [[7, 8]]
    assert batch.metrics(0)["batch/rejected_rollouts"] == 2


@pytest.mark.parametrize("logprob", [1e39, 1e38, 3.0, -1e39, -9999.0, -30.0])
def test_a_logprob_that_cannot_be_is_unknown(logprob):
    odd = group([1], [[2, 4], [3]], [1.0, 0.0])
    odd.inference_logprobs[0][1] = logprob
    assert pack([odd], PLAIN).micros[0].loss_tokens.rollout_logprobs_L.isnan().tolist() == [True, False, False]


def test_environment_metrics_are_means_over_groups_that_have_them():
    one = group([1], [[2], [3]], [1.0, 0.0], metrics={"accuracy": 1.0, "latency": 2.0})
    other = group([1], [[2], [3], [4], [5]], [1.0, 1.0, 1.0, 0.0], metrics={"wins": 3.0})
    metrics = pack([one, other], PLAIN).metrics(0)
    assert (metrics["rollout/accuracy"], metrics["rollout/latency"], metrics["rollout/wins"]) == (1.0, 2.0, 3.0)
    assert metrics["reward"] == pytest.approx(4 / 6)  # of the rollouts, not of the groups


def test_missing_logprobs_are_unknown_not_an_error():
    bare = group([1], [[2], [3]], [1.0, 0.0])
    bare.inference_logprobs = None
    assert pack([bare], PLAIN).micros[0].loss_tokens.rollout_logprobs_L.isnan().all()
    partly = group([1], [[2, 4], [3]], [1.0, 0.0])
    partly.inference_logprobs[0][2] = 1.0  # Atropos' sign for "not sampled", on a trained token
    assert pack([partly], PLAIN).micros[0].loss_tokens.rollout_logprobs_L.isnan().tolist() == [False, True, False]
