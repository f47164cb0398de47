"""Groups -> what the model forwards: no padding, and what rollouts have in common only once. Pure.

    two groups of two rollouts           packed:  R R R P P a a b Q s c d
      R R R P P a a .                    position 0 1 2 3 4 5 6 5 3 4 5 5
      R R R P P b .
      R R R Q s c .                      R, the root, is what all stems of the micro begin with. A stem (P P, Q s) is
      R R R Q s d .                      what several rollouts of a group begin with: the prompt, and the tokens of
                                         their completions up to the first that differs.

A token sees the root, its stem and its own rollout up to itself. The last token of a rollout (.) is predicted but
predicts nothing, so it is not forwarded. A rollout is never cut, a group may be. Every token that carries loss brings
its weight in the mean over the whole optimizer step, so the losses of micros add up to the same number however the step
is split.

Rollouts without any advantage have no gradient (unless there is a KL term) and are not forwarded; their tokens still
count in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.config.train import ON_CPU
from treadle.train.examine import Examined, TokenWeights, is_all_good, num_alike, rollout_logprobs, temperature_of
from treadle.train.loss import LossTokens
from treadle.train.partition import spread
from treadle.wire.groups import ScoredGroup

SHARING_PAYS = 0.98  # forwarding this share of the tokens or less is worth the detour
TOKEN_COST = 6 * 2048  # what a token costs in all other layers, in query-key pairs: about six times the hidden size


@dataclass(frozen=True)
class Segment:
    """Rollouts that share a stem: where the root, the rest of the stem and the rest of each rollout lie in the row."""

    root: tuple[int, int]
    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Micro:
    """What one forward takes. `_T` runs over packed tokens, `_L` over the tokens that carry loss, `_D` over distinct
    predictions: rollouts that share a stem predict its tokens alike."""

    token_ids_T: Tensor
    positions_T: Tensor
    segments: tuple[Segment, ...]
    source_L: Tensor  # index into T of the token whose hidden state predicts the loss token
    targets_L: Tensor
    temperatures_L: Tensor
    first_D: Tensor  # index into L of the first of each distinct prediction
    prediction_L: Tensor  # index into D of each loss token's prediction
    loss_tokens: LossTokens
    origins: tuple[tuple[ScoredGroup, int], ...]  # of each sequence: its group, and which rollout of it
    cost: float

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def places_L(self) -> Tensor:
        """Where in its rollout each loss token stands."""
        return self.positions_T[self.source_L] + 1


@dataclass(frozen=True)
class PackedBatch:
    micros: tuple[Micro, ...]
    num_tokens: int  # of all rollouts
    num_taught_tokens: int  # of the rollouts that teach something
    num_masked_tokens: int  # completion tokens of rollouts that were cut off and therefore carry no loss
    num_rejected: int  # rollouts whose numbers cannot be used
    num_cut_off: int
    num_positive_logprobs: int  # sampled tokens whose logprob cannot be one
    completion_lengths: Sequence[int]  # sampled tokens of each rollout
    repetitions: Sequence[float]  # of each completion that is long enough to tell
    groups: Sequence[ScoredGroup]

    @property
    def num_forwarded_tokens(self) -> int:
        return sum(micro.num_tokens for micro in self.micros)

    @property
    def num_loss_tokens(self) -> int:
        """Those that were forwarded for their own sake."""
        return sum(len(micro.targets_L) for micro in self.micros)

    @np.errstate(over="ignore", invalid="ignore")  # odd scores were rejected; here they merely show
    def metrics(self, version: int) -> dict[str, float]:
        """What the batch looked like: rewards, lengths, age against the policy `version` it is trained on."""
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
            "sample/staleness_mean": float(np.mean(ages)) if ages else math.nan,  # nobody said
            "sample/staleness_max": float(np.max(ages)) if ages else math.nan,
            "batch/groups_per_step": len(self.groups),
            "batch/samples_per_step": len(lengths),
            "batch/microbatches_per_step": len(self.micros),
            "batch/tokens_per_step": self.num_tokens,
            "batch/forwarded_tokens_per_step": self.num_forwarded_tokens,
            "batch/trained_tokens_per_step": self.num_loss_tokens,
            "batch/packing_ratio": self.num_taught_tokens / self.num_forwarded_tokens if self.micros else 1.0,
            "batch/row_imbalance": max(costs) / (sum(costs) / len(costs)) if costs else 1.0,
            "batch/masked_token_frac": self.num_masked_tokens / max(1, sum(lengths)),
            "batch/rejected_rollouts": self.num_rejected,
            "batch/positive_logprobs_frac": self.num_positive_logprobs / max(1, sum(lengths)),
            **own,
        }


def pack(
    groups: Sequence[ScoredGroup],
    config: TrainConfig,
    *,
    token_cost: float = TOKEN_COST,
    vocab_size: int | None = None,
) -> PackedBatch:
    """Pack groups into micros of at most `config.micro_tokens`, alike in cost (a longer rollout gets its own)."""
    examined = [Examined(group, config, vocab_size) for group in groups]
    weights = TokenWeights(examined, config)
    share = _pays_to_share(examined, config)
    budget = config.micro_tokens or ON_CPU["micro_tokens"]
    num_root = root_length([e.tokens[i][: e.prefix] for e in examined for i in e.rollouts[:1]]) if share else 0
    portions = [portion for e in examined for portion in cut_into_portions(e, budget, num_root, share=share)]
    bins = spread([(p.num_tokens, p.cost(token_cost)) for p in portions], budget)
    return PackedBatch(
        micros=tuple(_build([portions[i] for i in chosen], weights, token_cost) for chosen in bins),
        num_taught_tokens=sum(len(e.tokens[i]) for e in examined for i in e.rollouts),
        num_tokens=sum(len(tokens) for group in groups for tokens in group.tokens),
        num_masked_tokens=sum(e.num_masked for e in examined),
        num_rejected=sum(sum(e.is_rejected) for e in examined),
        num_cut_off=sum(int(e.is_cut_off.sum()) for e in examined),
        num_positive_logprobs=sum(e.num_positive for e in examined),
        completion_lengths=[length for e in examined for length in e.completion_lengths],
        repetitions=[share for e in examined for share in e.repetitions],
        groups=groups,
    )


def root_length(prompts: Sequence[np.ndarray]) -> int:
    """How many tokens all prompts begin with alike; each keeps at least one token of its own."""
    if len(prompts) < 2:
        return 0
    return max(0, min(num_alike(prompts), min(map(len, prompts)) - 1))


@dataclass(frozen=True)
class _Portion:
    """Rollouts of one group that are forwarded together behind the `stem` tokens that they share."""

    examined: Examined
    rollouts: tuple[int, ...]
    stem: int

    @property
    def stem_tokens(self) -> np.ndarray:
        return self.examined.tokens[self.rollouts[0]][: self.stem]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout behind the stem, without the last."""
        return [len(self.examined.tokens[i]) - 1 - self.stem for i in self.rollouts]

    @property
    def num_tokens(self) -> int:
        return self.stem + sum(self.lengths)

    def cost(self, token_cost: float) -> float:
        """In query-key pairs: what the linear layers take, and the triangles and rectangles of attention."""
        pairs = self.stem**2 / 2 + sum(n * (self.stem + n / 2) for n in self.lengths)
        return self.num_tokens * token_cost + pairs


def cut_into_portions(examined: Examined, budget: int, num_root: int = 0, *, share: bool) -> list[_Portion]:
    """The rollouts in portions of at most `budget` tokens, each with the stem that its rollouts share. Every further
    portion repeats a stem, except for the `num_root` tokens that the whole micro shares."""
    if not share:
        return [_Portion(examined, (i,), 0) for i in examined.rollouts]
    portions: list[_Portion] = []
    for rollouts, stem in find_stems(examined.tokens, examined.rollouts, num_root) if examined.rollouts else []:
        chosen: list[int] = []
        size = stem
        for i in rollouts:
            length = len(examined.tokens[i]) - 1 - stem
            if chosen and size + length > budget:
                portions.append(_Portion(examined, tuple(chosen), stem))
                chosen, size = [], stem
            chosen.append(i)
            size += length
        portions.append(_Portion(examined, tuple(chosen), stem))
    return portions


def find_stems(tokens: Sequence[np.ndarray], rollouts: Sequence[int], num_root: int) -> list[tuple[list[int], int]]:
    """Rollouts by what they begin with in common: [(rollouts, length of their stem)].

    Rollouts that go on alike behind the stem of all get a stem of their own where that saves tokens, although the
    shorter one is then forwarded once more.

    >>> rows = [np.array(row) for row in ([7, 1, 2, 3, 4], [7, 1, 2, 3, 5], [7, 9, 9])]
    >>> find_stems(rows, [0, 1, 2], num_root=0)
    [([0, 1], 4), ([2], 2)]
    """
    stem = _stem([tokens[i] for i in rollouts])
    by_next: dict[int, list[int]] = {}
    for i in rollouts:
        by_next.setdefault(int(tokens[i][stem]), []).append(i)
    apart = []
    for alike in by_next.values() if len(by_next) > 1 else ():
        num_saved = (len(alike) - 1) * (_stem([tokens[i] for i in alike]) - stem)
        if num_saved > stem - num_root:
            apart.append(alike)
    if not apart:
        return [(list(rollouts), stem)]
    rest = [i for i in rollouts if not any(i in alike for alike in apart)]
    return [found for part in (*apart, rest) if part for found in find_stems(tokens, part, num_root)]


def _stem(rollouts: Sequence[np.ndarray]) -> int:
    """How many tokens rollouts begin with alike. The last of each is not forwarded, so it is no part of a stem."""
    return min(num_alike(rollouts), min(map(len, rollouts)) - 1)


def _pays_to_share(examined: Sequence[Examined], config: TrainConfig) -> bool:
    if config.share_prompts != "auto":
        return config.share_prompts == "on"
    whole = sum(len(e.group.tokens[i]) for e in examined for i in e.rollouts)
    saved = sum(e.prefix * (len(e.rollouts) - 1) for e in examined if e.rollouts)
    return whole > 0 and (whole - saved) / whole <= SHARING_PAYS


def _build(portions: Sequence[_Portion], weights: TokenWeights, token_cost: float) -> Micro:
    shares = any(portion.stem for portion in portions)
    num_root = root_length([portion.stem_tokens for portion in portions]) if shares else 0
    builder = _MicroBuilder(portions[0].stem_tokens[:num_root], weights)
    for portion in portions:
        builder.add(portion)
    return builder.build(sum(portion.cost(token_cost) for portion in portions))


class _MicroBuilder:
    """Lays portions behind their root."""

    def __init__(self, root: np.ndarray, weights: TokenWeights) -> None:
        self._weights = weights
        self._root = (0, len(root))
        self._ids: list[np.ndarray] = [root]
        self._positions: list[np.ndarray] = [np.arange(len(root))]
        self._num_tokens = len(root)
        self._segments: list[Segment] = []
        self._per_loss_token: dict[str, list[np.ndarray]] = {name: [] for name in _LOSS_FIELDS}
        self._origins: list[tuple[ScoredGroup, int]] = []

    def add(self, portion: _Portion) -> None:
        stem_start = self._num_tokens
        self._append(portion.stem_tokens, self._root[1], portion.stem)
        stem_end = self._num_tokens
        completions = []
        for i in portion.rollouts:
            start = self._num_tokens
            tokens = portion.examined.tokens[i]
            self._append(tokens, portion.stem, len(tokens) - 1)
            completions.append((start, self._num_tokens))
            self._add_loss_tokens(portion, i, stem_start, start)
        self._segments.append(Segment(self._root, (stem_start, stem_end), tuple(completions)))

    def _append(self, tokens: np.ndarray, start: int, end: int) -> None:
        self._ids.append(tokens[start:end])
        self._positions.append(np.arange(start, end))
        self._num_tokens += max(0, end - start)

    def _add_loss_tokens(self, portion: _Portion, rollout: int, stem_start: int, own_start: int) -> None:
        examined, group = portion.examined, portion.examined.group
        places = np.flatnonzero(examined.carries_loss[rollout])
        before = places - 1
        in_stem = np.where(before < self._root[1], before, stem_start + before - self._root[1])
        values = {
            "source": np.where(before < portion.stem, in_stem, own_start + before - portion.stem),
            "target": examined.tokens[rollout][places],
            "temperature": np.full(len(places), temperature_of(group, rollout)),
            "logprob": rollout_logprobs(group, rollout, places),
            "advantage": examined.advantages[rollout][places],
            "weight": np.full(len(places), self._weights.of(int(examined.lengths[rollout]))),
            "sequence": np.full(len(places), len(self._origins)),
        }
        for name, array in values.items():
            self._per_loss_token[name].append(array)
        self._origins.append((group, rollout))

    def build(self, cost: float) -> Micro:
        fields = {name: np.concatenate(arrays) for name, arrays in self._per_loss_token.items()}
        long = {name: torch.from_numpy(fields[name].astype(np.int64)) for name in ("source", "target", "sequence")}
        real = {
            name: torch.from_numpy(fields[name].astype(np.float32))
            for name in ("temperature", "logprob", "advantage", "weight")
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
            ),
            origins=tuple(self._origins),
            cost=cost,
        )


_LOSS_FIELDS = ("source", "target", "temperature", "logprob", "advantage", "weight", "sequence")
