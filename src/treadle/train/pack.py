"""Pack groups into micros for the model's forward: no padding, and shared tokens only once. Pure.

    two groups of two rollouts           packed:  R R R P P a a b Q s c d
      R R R P P a a .                    position 0 1 2 3 4 5 6 5 3 4 5 5
      R R R P P b .
      R R R Q s c .                      R, the root, is the common start of all stems in the micro. A stem (P P, Q s)
      R R R Q s d .                      is the common start of several rollouts of a group: the prompt, and tokens of
                                         their completions up to the first difference.

A token sees the root, its stem and its own rollout up to itself. The last token of a rollout (.) is predicted but
predicts nothing, so it is not forwarded. A rollout is never split, a group may be. Every loss token has its weight in
the mean over the whole optimizer step, so the losses of micros add up to the same number however the step is split.

Rollouts without advantage have no gradient (unless there is a KL term) and are not forwarded; their tokens still count
in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.config.train import MICRO_TOKENS
from treadle.train.loss import LossTokens
from treadle.train.prepare import PreparedGroup, TokenShares, is_all_good, rollout_logprobs, temperature_of
from treadle.wire.groups import ScoredGroup, common_prefix

SHARING_PAYS = 0.98  # shared tokens are packed once if at most this share of all tokens remains
TOKEN_COST = 6 * 2048  # cost of a token in the linear layers, in query-key pairs: about six times the hidden size
_LOSS_FIELDS = ("source", "target", "temperature", "logprob", "advantage", "weight", "sequence")
_TEACHER_FIELDS = ("teacher_logprob", "teacher_coef")  # of a run that distills


@dataclass(frozen=True)
class Segment:
    """Rollouts that share a stem: ranges of the root, the rest of the stem and the rest of each rollout in the row."""

    root: tuple[int, int]
    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Micro:
    """The input of one forward pass. `_T` runs over packed tokens, `_L` over loss tokens, `_D` over distinct
    predictions: rollouts that share a stem have the same predictions for its tokens."""

    token_ids_T: Tensor
    positions_T: Tensor
    segments: tuple[Segment, ...]
    source_L: Tensor  # index into T of the token whose hidden state predicts the loss token
    targets_L: Tensor
    temperatures_L: Tensor
    first_D: Tensor  # index into L of the first of each distinct prediction
    prediction_L: Tensor  # index into D of each loss token's prediction
    loss_tokens: LossTokens
    origins: tuple[tuple[ScoredGroup, int], ...]  # group and rollout index of each sequence
    cost: float


@dataclass(frozen=True)
class PackedBatch:
    micros: tuple[Micro, ...]
    num_tokens: int  # of all rollouts
    num_tokens_with_advantage: int  # of rollouts with loss tokens
    num_masked_tokens: int  # completion tokens without loss because the rollout was cut off
    num_rejected: int  # rollouts with unusable numbers
    num_cut_off: int
    num_positive_logprobs: int  # sampled tokens with a positive logprob
    completion_lengths: Sequence[int]  # sampled tokens of each rollout
    repetitions: Sequence[float]  # of each completion of at least MIN_REPEATING tokens
    groups: Sequence[ScoredGroup]

    @property
    def num_forwarded_tokens(self) -> int:
        return sum(len(micro.token_ids_T) for micro in self.micros)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return sum(len(micro.targets_L) for micro in self.micros)

    @np.errstate(over="ignore", invalid="ignore")  # overflows of odd scores, which were rejected
    def metrics(self, version: int) -> dict[str, float]:
        """Rewards, lengths and staleness of the batch; `version`: of the policy that is trained on it."""
        spreads_G = np.array([np.std(g.scores) for g in self.groups])
        is_dead_G = np.array([min(g.scores) == max(g.scores) for g in self.groups])
        is_good_G = is_dead_G & np.array([is_all_good(g) for g in self.groups])
        lengths = self.completion_lengths
        ages = [version - g.policy_version for g in self.groups if g.policy_version is not None]
        named = {name for g in self.groups for name in (g.metrics or {})}
        own = {
            f"rollout/{n}": float(np.mean([g.metrics[n] for g in self.groups if g.metrics and n in g.metrics]))
            for n in sorted(named)
        }
        costs = [micro.cost for micro in self.micros]
        return {
            "reward": float(np.mean(np.concatenate([g.scores for g in self.groups]))),
            "reward_std": float(spreads_G.mean()),
            "frac_reward_zero_std": float(is_dead_G.mean()),
            "by_group/frac_mixed": float(1 - is_dead_G.mean()),
            "by_group/frac_all_good": float(is_good_G.mean()),
            "by_group/frac_all_bad": float((is_dead_G & ~is_good_G).mean()),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/min_length": float(np.min(lengths)),
            "completions/max_length": float(np.max(lengths)),
            "completions/clipped_ratio": self.num_cut_off / len(lengths),
            **({"completions/repetition": float(np.mean(self.repetitions))} if self.repetitions else {}),
            "sample/staleness_mean": float(np.mean(ages)) if ages else math.nan,  # unknown
            "sample/staleness_max": float(np.max(ages)) if ages else math.nan,
            "batch/groups_per_step": len(self.groups),
            "batch/samples_per_step": len(lengths),
            "batch/microbatches_per_step": len(self.micros),
            "batch/tokens_per_step": self.num_tokens,
            "batch/forwarded_tokens_per_step": self.num_forwarded_tokens,
            "batch/trained_tokens_per_step": self.num_loss_tokens,
            "batch/packing_ratio": self.num_tokens_with_advantage / self.num_forwarded_tokens if self.micros else 1.0,
            "batch/row_imbalance": max(costs) / (sum(costs) / len(costs)) if costs else 1.0,
            "batch/masked_token_frac": self.num_masked_tokens / max(1, sum(lengths)),
            "batch/rejected_rollouts": self.num_rejected,
            "batch/positive_logprobs_frac": self.num_positive_logprobs / max(1, sum(lengths)),
            **own,
        }


def pack_into_bins(items: Sequence[tuple[int, float]], capacity: int) -> list[list[int]]:
    """Indices of (size, cost) items by bin. A bin holds at most `capacity`; a larger item gets a bin of its own.

    Greedy: the most expensive item first, each into the cheapest bin with space, so that the worst bin is at most a
    third above the optimum. Deterministic; items keep their order within a bin.

    >>> pack_into_bins([(4, 4.0), (3, 3.0), (3, 3.0), (2, 2.0)], capacity=6)
    [[0, 3], [1, 2]]
    """
    num_bins = -(-sum(min(size, capacity) for size, _ in items) // capacity)
    while (bins := _fill_bins(items, capacity, num_bins)) is None:
        num_bins += 1
    return [sorted(chosen) for chosen in bins if chosen]


def _fill_bins(items: Sequence[tuple[int, float]], capacity: int, num_bins: int) -> list[list[int]] | None:
    """None: an item does not fit. Then all start again with one bin more, so that no bin holds only what was left."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sizes, costs = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins)
    for index in sorted(range(len(items)), key=lambda i: (-items[i][1], i)):
        size, cost = items[index]
        has_space = (sizes == 0) | (sizes + size <= capacity)
        if not has_space.any():
            return None
        chosen = int(np.where(has_space, costs, np.inf).argmin())
        bins[chosen].append(index)
        sizes[chosen] += size
        costs[chosen] += cost
    return bins


def pack(
    groups: Sequence[ScoredGroup],
    config: TrainConfig,
    *,
    token_cost: float = TOKEN_COST,
    vocab_size: int | None = None,
) -> PackedBatch:
    """Pack groups into micros of at most `config.micro_tokens` and similar cost; a longer rollout gets its own
    micro."""
    prepared = [PreparedGroup(group, config, vocab_size) for group in groups]
    weights = TokenShares(prepared, config)
    share = _pays_to_share(prepared, config)
    budget = config.micro_tokens or MICRO_TOKENS["cpu"]
    num_root = root_length([g.group.tokens[i][: g.prefix] for g in prepared for i in g.rollouts[:1]]) if share else 0
    portions = [portion for g in prepared for portion in cut_into_portions(g, budget, num_root, share=share)]
    bins = pack_into_bins([(p.num_tokens, p.cost(token_cost)) for p in portions], budget)
    return PackedBatch(
        micros=tuple(
            _MicroBuilder([portions[i] for i in chosen], weights, config.distill_coef).build(token_cost)
            for chosen in bins
        ),
        num_tokens_with_advantage=sum(len(g.tokens[i]) for g in prepared for i in g.rollouts),
        num_tokens=sum(len(tokens) for group in groups for tokens in group.tokens),
        num_masked_tokens=sum(g.num_masked for g in prepared),
        num_rejected=sum(sum(g.is_rejected) for g in prepared),
        num_cut_off=sum(int(g.is_cut_off.sum()) for g in prepared),
        num_positive_logprobs=sum(g.num_positive for g in prepared),
        completion_lengths=[length for g in prepared for length in g.completion_lengths],
        repetitions=[share for g in prepared for share in g.repetitions],
        groups=groups,
    )


def root_length(prompts: Sequence[list[int]]) -> int:
    """Number of leading tokens that all prompts share; each keeps at least one token of its own."""
    return max(0, _stem(prompts)) if len(prompts) > 1 else 0


@dataclass(frozen=True)
class _Portion:
    """Rollouts of one group that are forwarded together after their shared `stem` tokens."""

    prepared: PreparedGroup
    rollouts: tuple[int, ...]
    stem: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout after the stem, without the last."""
        return [len(self.prepared.tokens[i]) - 1 - self.stem for i in self.rollouts]

    @property
    def num_tokens(self) -> int:
        return self.stem + sum(self.lengths)

    def cost(self, token_cost: float) -> float:
        """In query-key pairs: the linear layers, and the causal and full parts of attention."""
        pairs = self.stem**2 / 2 + sum(n * (self.stem + n / 2) for n in self.lengths)
        return self.num_tokens * token_cost + pairs


def cut_into_portions(prepared: PreparedGroup, budget: int, num_root: int = 0, *, share: bool) -> list[_Portion]:
    """Split the rollouts into portions of at most `budget` tokens, each with the stem that its rollouts share. Each
    further portion repeats the stem, except for the `num_root` tokens that the whole micro shares."""
    if not share:
        return [_Portion(prepared, (i,), 0) for i in prepared.rollouts]
    portions: list[_Portion] = []
    for rollouts, stem in find_stems(prepared.group.tokens, prepared.rollouts, num_root) if prepared.rollouts else []:
        chosen: list[int] = []
        size = stem
        for i in rollouts:
            length = len(prepared.tokens[i]) - 1 - stem
            if chosen and size + length > budget:
                portions.append(_Portion(prepared, tuple(chosen), stem))
                chosen, size = [], stem
            chosen.append(i)
            size += length
        portions.append(_Portion(prepared, tuple(chosen), stem))
    return portions


def find_stems(tokens: Sequence[list[int]], rollouts: Sequence[int], num_root: int) -> list[tuple[list[int], int]]:
    """Group rollouts by their common start: [(rollouts, length of their stem)].

    Rollouts that continue equally after the common stem get a longer stem of their own if that saves tokens, although
    the common stem is then forwarded again.

    >>> rows = [[7, 1, 2, 3, 4], [7, 1, 2, 3, 5], [7, 9, 9]]
    >>> find_stems(rows, [0, 1, 2], num_root=0)
    [([0, 1], 4), ([2], 2)]
    """
    stem = _stem([tokens[i] for i in rollouts])
    by_next: dict[int, list[int]] = {}
    for i in rollouts:
        by_next.setdefault(tokens[i][stem], []).append(i)
    apart = []
    for alike in by_next.values() if len(by_next) > 1 else ():
        num_saved = (len(alike) - 1) * (_stem([tokens[i] for i in alike]) - stem)
        if num_saved > stem - num_root:
            apart.append(alike)
    if not apart:
        return [(list(rollouts), stem)]
    rest = [i for i in rollouts if not any(i in alike for alike in apart)]
    return [found for part in (*apart, rest) if part for found in find_stems(tokens, part, num_root)]


def _stem(rollouts: Sequence[list[int]]) -> int:
    """Number of leading tokens that rollouts share. The last token of each is not forwarded, so it cannot be in a
    stem."""
    return min(common_prefix(rollouts), min(map(len, rollouts)) - 1)


def _pays_to_share(prepared: Sequence[PreparedGroup], config: TrainConfig) -> bool:
    if config.share_prompts != "auto":
        return config.share_prompts == "on"
    whole = sum(len(g.group.tokens[i]) for g in prepared for i in g.rollouts)
    saved = sum(g.prefix * (len(g.rollouts) - 1) for g in prepared if g.rollouts)
    return whole > 0 and (whole - saved) / whole <= SHARING_PAYS


class _MicroBuilder:
    """Appends portions to their root."""

    def __init__(self, portions: Sequence[_Portion], weights: TokenShares, distill_coef: float) -> None:
        self._portions = portions
        self._weights = weights
        self._distill_coef = distill_coef
        shares = any(portion.stem for portion in portions)
        stems = [p.prepared.group.tokens[p.rollouts[0]][: p.stem] for p in portions]
        num_root = root_length(stems) if shares else 0
        root = portions[0].prepared.tokens[portions[0].rollouts[0]][:num_root]
        self._root = (0, len(root))
        self._ids: list[np.ndarray] = [root]
        self._positions: list[np.ndarray] = [np.arange(len(root))]
        self._num_tokens = len(root)
        self._segments: list[Segment] = []
        names = (*_LOSS_FIELDS, *_TEACHER_FIELDS) if distill_coef else _LOSS_FIELDS
        self._per_loss_token: dict[str, list[np.ndarray]] = {name: [] for name in names}
        self._origins: list[tuple[ScoredGroup, int]] = []

    def _add(self, portion: _Portion) -> None:
        stem_start = self._num_tokens
        self._append(portion.prepared.tokens[portion.rollouts[0]], self._root[1], portion.stem)
        stem_end = self._num_tokens
        completions = []
        for i in portion.rollouts:
            start = self._num_tokens
            tokens = portion.prepared.tokens[i]
            self._append(tokens, portion.stem, len(tokens) - 1)
            completions.append((start, self._num_tokens))
            self._add_loss_tokens(portion, i, stem_start, start)
        self._segments.append(Segment(self._root, (stem_start, stem_end), tuple(completions)))

    def _append(self, tokens: np.ndarray, start: int, end: int) -> None:
        self._ids.append(tokens[start:end])
        self._positions.append(np.arange(start, end))
        self._num_tokens += max(0, end - start)

    def _add_loss_tokens(self, portion: _Portion, rollout: int, stem_start: int, own_start: int) -> None:
        prepared, group = portion.prepared, portion.prepared.group
        positions = np.flatnonzero(prepared.carries_loss[rollout])
        before = positions - 1
        in_stem = np.where(before < self._root[1], before, stem_start + before - self._root[1])
        values = {
            "source": np.where(before < portion.stem, in_stem, own_start + before - portion.stem),
            "target": prepared.tokens[rollout][positions],
            "temperature": np.full(len(positions), temperature_of(group, rollout)),
            "logprob": rollout_logprobs(group, rollout, positions),
            "advantage": prepared.advantages[rollout][positions],
            "weight": np.full(len(positions), self._weights.of(int(prepared.lengths[rollout]))),
            "sequence": np.full(len(positions), len(self._origins)),
        }
        if prepared.teacher_logprobs is not None:
            values["teacher_logprob"] = prepared.teacher_logprobs[rollout][positions]
            values["teacher_coef"] = np.full(len(positions), self._distill_coef * group.weight)
        for name, array in values.items():
            self._per_loss_token[name].append(array)
        self._origins.append((group, rollout))

    def build(self, token_cost: float) -> Micro:
        for portion in self._portions:
            self._add(portion)
        fields = {name: np.concatenate(arrays) for name, arrays in self._per_loss_token.items()}
        long = {name: torch.from_numpy(fields[name].astype(np.int64)) for name in ("source", "target", "sequence")}
        real = {
            name: torch.from_numpy(fields[name].astype(np.float32))
            for name in ("temperature", "logprob", "advantage", "weight", *_TEACHER_FIELDS)
            if name in fields
        }
        predictions = np.stack([fields[name] for name in ("source", "target", "temperature")], 1)
        _, first_D, prediction_L = np.unique(predictions, axis=0, return_index=True, return_inverse=True)
        return Micro(
            token_ids_T=torch.from_numpy(np.concatenate(self._ids)),
            positions_T=torch.from_numpy(np.concatenate(self._positions)),
            segments=tuple(self._segments),
            source_L=long["source"],
            targets_L=long["target"],
            temperatures_L=real["temperature"],
            first_D=torch.from_numpy(first_D),
            prediction_L=torch.from_numpy(prediction_L.reshape(-1)),
            loss_tokens=LossTokens(
                rollout_logprobs_L=real["logprob"],
                old_logprobs_L=None,
                reference_logprobs_L=None,
                advantages_L=real["advantage"],
                weights_L=real["weight"],
                sequences_L=long["sequence"],
                num_sequences=len(self._origins),
                teacher_logprobs_L=real.get("teacher_logprob"),
                teacher_coefs_L=real.get("teacher_coef"),
            ),
            origins=tuple(self._origins),
            cost=sum(portion.cost(token_cost) for portion in self._portions),
        )
