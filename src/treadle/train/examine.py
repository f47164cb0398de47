"""What a group teaches: which tokens are trained, with what advantage, and what they weigh in the step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from treadle.config import TrainConfig
from treadle.train.advantage import group_advantages
from treadle.wire.groups import IGNORED, ScoredGroup

TEMPERATURES = (1e-3, 1e3)  # beyond these, logits over temperature leave what numbers can say
# Nobody samples a token of probability 1e-11. An engine that says so, or that a logprob is positive, does not know it;
# taken at its word, one such token would outweigh a whole step.
LOGPROBS = (-25.0, 0.1)
NOT_SAMPLED = 1.0  # what clients send in place of a logprob that they do not know
REPEATED_TOKENS = 4  # a run of tokens that occurs again in the same completion is a repetition
MIN_REPEATING = 32  # tokens of a completion: in shorter ones repetition says nothing


class Examined:
    """A group, with what each of its rollouts teaches. What cannot be used is rejected, not raised: one client's odd
    numbers must not stop a training."""

    def __init__(self, group: ScoredGroup, config: TrainConfig, vocab_size: int | None = None) -> None:
        self.group = group
        self.tokens = [np.array(tokens, dtype=np.int64) for tokens in group.tokens]
        self.is_cut_off = np.array([was_cut_off(group, i, config.seq_len) for i in range(group.size)])
        trainable = [np.array(mask, dtype=np.int64) != IGNORED for mask in group.masks]
        self.completion_lengths = [int(flags.sum()) for flags in trainable]
        self.num_positive = sum(num_positive_logprobs(group, i, flags) for i, flags in enumerate(trainable))
        self.repetitions = [
            repetition(tokens[flags])
            for tokens, flags in zip(self.tokens, trainable, strict=True)
            if flags.sum() >= MIN_REPEATING
        ]
        self.prefix = shared_prefix(self.tokens, trainable)
        for flags in trainable:
            flags[:1] = False  # nothing stands before the first token that could predict it
        self.num_masked = 0
        if config.mask_overlong:
            self.num_masked = sum(int(trainable[i].sum()) for i in np.flatnonzero(self.is_cut_off))
            trainable = [flags & ~cut for flags, cut in zip(trainable, self.is_cut_off, strict=True)]
        self.lengths = np.array([int(flags.sum()) for flags in trainable])  # tokens that count in the mean
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is rejected
            self.advantages = token_advantages(group, trainable, config)
            self.is_rejected = [self._is_unusable(i, config.seq_len, vocab_size) for i in range(group.size)]
        self.carries_loss = [self._needed(i, flags, config) for i, flags in enumerate(trainable)]

    def _needed(self, rollout: int, trainable: np.ndarray, config: TrainConfig) -> np.ndarray:
        """The tokens that must be forwarded: those with a gradient, and what a sequence's own ratio is made of."""
        if self.is_rejected[rollout]:
            return np.zeros_like(trainable)
        taught = trainable & (self.advantages[rollout] != 0)
        if config.kl_coef > 0 or (config.ratio != "token" and taught.any()):
            return trainable
        return taught

    def _is_unusable(self, rollout: int, seq_len: int, vocab_size: int | None) -> bool:
        tokens = self.tokens[rollout]
        low, high = TEMPERATURES
        return not (
            0 < len(tokens) <= seq_len
            and (vocab_size is None or int(tokens.max()) < vocab_size)
            and low <= temperature_of(self.group, rollout) <= high
            and bool(np.isfinite(self.advantages[rollout].astype(np.float32)).all())
        )

    @cached_property
    def rollouts(self) -> list[int]:
        """Those with something to teach."""
        return [i for i, flags in enumerate(self.carries_loss) if flags.any()]


class TokenWeights:
    """A token's share in the mean over the whole optimizer step."""

    def __init__(self, examined: Sequence[Examined], config: TrainConfig) -> None:
        self.num_tokens = sum(int(e.lengths.sum()) for e in examined)
        self._num_sequences = sum(int(np.count_nonzero(e.lengths)) for e in examined)
        self._aggregation = config.aggregation
        self._constant = config.aggregation_length or config.seq_len

    def of(self, num_tokens: int) -> float:
        """The weight of each token of a sequence that has so many."""
        if self._aggregation == "token_mean":
            return 1 / max(1, self.num_tokens)
        if self._aggregation == "sequence_mean":
            return 1 / (max(1, self._num_sequences) * max(1, num_tokens))
        return 1 / (max(1, self._num_sequences) * self._constant)


def token_advantages(group: ScoredGroup, trained: Sequence[np.ndarray], config: TrainConfig) -> list[np.ndarray]:
    """One advantage per token: the environment's own where it sent them, else the rollout's; zero if not `trained`."""
    per_rollout = group_advantages(group.scores, config)
    own = group.advantages or []  # clients send them in any length; what does not fit is not meant per token
    overrides = group.overrides or []
    result = []
    for i, flags in enumerate(trained):
        if i < len(own) and len(own[i]) == len(flags):
            values = np.where(flags, np.array(own[i], dtype=np.float64), 0.0)
        else:
            values = np.where(flags, per_rollout[i], 0.0)
        if i < len(overrides) and overrides[i].get("set_advantage_to_zero"):
            values[:] = 0.0
        result.append(values * group.weight)
    return result


def shared_prefix(tokens: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> int:
    """How many leading tokens all rollouts share, none of which is `trained`."""
    first_trained = min(int(flags.argmax()) if flags.any() else len(flags) for flags in trained)
    return min(first_trained, num_alike(tokens))


def num_alike(sequences: Sequence[np.ndarray]) -> int:
    """How many leading entries all sequences share, as far as the shortest goes."""
    shortest = min(map(len, sequences))
    differs = np.any([s[:shortest] != sequences[0][:shortest] for s in sequences], axis=0)
    return int(differs.argmax()) if differs.any() else shortest


def temperature_of(group: ScoredGroup, rollout: int) -> float:
    """The temperature a rollout was sampled at, in the order Atropos' trainer looks for it."""
    places = (
        group.overrides[rollout] if group.overrides else None, group.generation_params, group.group_overrides,
    )  # fmt: skip
    for place in places:
        if place and isinstance(place.get("temperature"), int | float) and place["temperature"] > 0:
            return float(place["temperature"])
    return 1.0


def was_cut_off(group: ScoredGroup, rollout: int, seq_len: int) -> bool:
    """Whether a completion ended at the length limit: as its environment says, else when it fills the sequence."""
    said = group.overrides[rollout].get("finish_reason") if group.overrides else None
    return said == "length" if said is not None else len(group.tokens[rollout]) >= seq_len


def is_all_good(group: ScoredGroup) -> bool:
    """Whether equal scores are those of success: as the environment says, else when they are positive."""
    accuracy = (group.metrics or {}).get("accuracy")
    return accuracy == 1 if accuracy is not None else min(group.scores) > 0


def rollout_logprobs(group: ScoredGroup, rollout: int, places: np.ndarray) -> np.ndarray:
    """The engine's logprobs of trained tokens; NaN where none is known."""
    if group.inference_logprobs is None:
        return np.full(len(places), np.nan)
    values = np.array(group.inference_logprobs[rollout], dtype=np.float64)[places]
    low, high = LOGPROBS
    return np.where((values < low) | (values > high), np.nan, values)


def num_positive_logprobs(group: ScoredGroup, rollout: int, trained: np.ndarray) -> int:
    """How many trained tokens have a logprob that no probability has: the values are wrong, or belong elsewhere."""
    if group.inference_logprobs is None:
        return 0
    values = np.array(group.inference_logprobs[rollout], dtype=np.float64)[trained]
    return int(np.count_nonzero((values > LOGPROBS[1]) & (values != NOT_SAMPLED)))


def repetition(tokens: np.ndarray) -> float:
    """The share of runs of four tokens that occurred before in the same completion.

    >>> repetition(np.array([1, 2, 3, 4, 5, 6, 7]))
    0.0
    >>> repetition(np.array([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1]))
    0.75
    """
    num_runs = len(tokens) - REPEATED_TOKENS + 1
    runs = np.zeros(num_runs, dtype=np.uint64)
    for place in range(REPEATED_TOKENS):  # a hash of each run; the multiplication wraps around
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + tokens[place : place + num_runs].astype(np.uint64)
    return 1 - len(np.unique(runs)) / num_runs
