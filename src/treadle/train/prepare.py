"""Prepare groups for packing: validate rollouts, compute advantages, choose the tokens that carry loss. Pure, in
float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.config import TrainConfig
from treadle.config.train import ObjectiveOptions
from treadle.wire.groups import IGNORED, ScoredGroup, TaughtGroup, common_prefix

TEMPERATURES = (1e-3, 1e3)  # outside of these, logits divided by the temperature overflow
# No engine samples a token of probability 1e-11. Such a logprob, or a positive one, is wrong, and would let a single
# token outweigh a whole step.
LOGPROBS = (-25.0, 0.1)
NOT_SAMPLED = 1.0  # sent by clients in place of an unknown logprob
REPEATED_TOKENS = 4  # length of a run that counts as repetition if it occurs again in the same completion
MIN_REPEATING = 32  # tokens; repetition is not measured in shorter completions


def group_advantages(scores: Sequence[float], options: ObjectiveOptions) -> np.ndarray:
    """Score minus the mean of the group (or of the other rollouts), divided by the standard deviation if configured.

    The advantages of a group of one, and of one with equal scores, are exactly zero.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], ObjectiveOptions(normalize_std=False)).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> group_advantages([3.0, 0.0, 0.0], ObjectiveOptions(advantage="leave_one_out", normalize_std=False)).tolist()
    [3.0, -1.5, -1.5]
    """
    scores_G = np.asarray(scores, dtype=np.float64)
    size = len(scores_G)
    if size < 2 or scores_G.min() == scores_G.max():  # compared, because the mean of three 0.1 is not exactly 0.1
        return np.zeros(size)
    advantages_G = scores_G - scores_G.mean()
    if options.advantage == "leave_one_out":
        advantages_G *= size / (size - 1)  # equal to subtracting the mean of the others
    if options.normalize_std:
        advantages_G /= scores_G.std(ddof=options.std_ddof) + options.std_epsilon
    return advantages_G


class PreparedGroup:
    """A group with the advantages and loss tokens of its rollouts. Unusable rollouts are rejected without an error: odd
    numbers from one client must not stop the training."""

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
        first_trained = min(int(flags.argmax()) if flags.any() else len(flags) for flags in trainable)
        self.prefix = min(first_trained, common_prefix(group.tokens))  # shared by all rollouts, and not trained
        for flags in trainable:
            flags[:1] = False  # nothing predicts the first token
        self.num_masked = 0
        if config.mask_overlong:
            self.num_masked = sum(int(trainable[i].sum()) for i in np.flatnonzero(self.is_cut_off))
            trainable = [flags & ~cut for flags, cut in zip(trainable, self.is_cut_off, strict=True)]
        self.lengths = np.array([int(flags.sum()) for flags in trainable])  # tokens that count in the mean
        self.teacher_logprobs: list[np.ndarray] | None = None  # NaN where unknown; None: nothing is distilled
        if config.distill_coef:
            self.teacher_logprobs = [teacher_logprobs(group, i, flags) for i, flags in enumerate(trainable)]
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are rejected
            self.advantages = token_advantages(group, trainable, config)
            self.is_rejected = [self._is_unusable(i, config.seq_len, vocab_size) for i in range(group.size)]
        self.carries_loss = [self._needed(i, flags, config) for i, flags in enumerate(trainable)]
        self.rollouts = [i for i, flags in enumerate(self.carries_loss) if flags.any()]  # those with loss tokens

    def _needed(self, rollout: int, trainable: np.ndarray, config: TrainConfig) -> np.ndarray:
        """Tokens that must be forwarded: those with a gradient, and all that a sequence-level ratio needs."""
        if self.is_rejected[rollout]:
            return np.zeros_like(trainable)
        has_gradient = trainable & (self.advantages[rollout] != 0)
        if self.teacher_logprobs is not None:
            has_gradient |= ~np.isnan(self.teacher_logprobs[rollout])
        if config.kl_coef > 0 or (config.ratio != "token" and has_gradient.any()):
            return trainable
        return has_gradient

    def _is_unusable(self, rollout: int, seq_len: int, vocab_size: int | None) -> bool:
        tokens = self.tokens[rollout]
        low, high = TEMPERATURES
        return not (
            0 < len(tokens) <= seq_len
            and (vocab_size is None or int(tokens.max()) < vocab_size)
            and low <= temperature_of(self.group, rollout) <= high
            and bool(np.isfinite(self.advantages[rollout].astype(np.float32)).all())
        )


class TokenShares:
    """A token's share in the mean over the whole optimizer step."""

    def __init__(self, groups: Sequence[PreparedGroup], config: TrainConfig) -> None:
        self.num_tokens = sum(int(group.lengths.sum()) for group in groups)
        self._num_sequences = sum(int(np.count_nonzero(group.lengths)) for group in groups)
        self._aggregation = config.aggregation
        self._seq_len = config.seq_len

    def of(self, num_tokens: int) -> float:
        """The weight of each token of a sequence with `num_tokens` loss tokens."""
        if self._aggregation == "token_mean":
            return 1 / max(1, self.num_tokens)
        if self._aggregation == "sequence_mean":
            return 1 / (max(1, self._num_sequences) * max(1, num_tokens))
        return 1 / (max(1, self._num_sequences) * self._seq_len)


def token_advantages(group: ScoredGroup, trained: Sequence[np.ndarray], config: TrainConfig) -> list[np.ndarray]:
    """Advantages per token: the environment's if it sent them, else the rollout's; zero where not `trained`."""
    per_rollout = group_advantages(group.scores, config)
    own = group.advantages or []  # only used if the length fits: some clients send other things here
    result = []
    for i, flags in enumerate(trained):
        if i < len(own) and len(own[i]) == len(flags):
            values = np.where(flags, np.array(own[i], dtype=np.float64), 0.0)
        else:
            values = np.where(flags, per_rollout[i], 0.0)
        if is_without_advantage(group, i):
            values[:] = 0.0
        result.append(values * (config.reward_coef * group.weight))
    return result


def teacher_logprobs(group: ScoredGroup, rollout: int, trained: np.ndarray) -> np.ndarray:
    """The teacher's logprobs of the `trained` tokens; NaN elsewhere, and where they are unknown."""
    if is_without_advantage(group, rollout):
        return np.full(len(trained), np.nan)
    values = _sent_logprobs(group, rollout, trained)
    if isinstance(group, TaughtGroup):
        answered = np.array(group.teacher_logprobs[rollout], dtype=np.float64)
        values = np.where(np.isnan(answered) | ~trained, values, answered)
    low, high = LOGPROBS
    return np.where(values > high, np.nan, values.clip(min=low))


def _sent_logprobs(group: ScoredGroup, rollout: int, trained: np.ndarray) -> np.ndarray:
    """Those that the environment sent: of each position, the entry with the position's own token."""
    values = np.full(len(trained), np.nan)
    ids, logprobs = group.distill_token_ids or [], group.distill_logprobs or []
    tokens = group.tokens[rollout]
    if not (rollout < len(ids) and rollout < len(logprobs)):
        return values
    ids_T, logprobs_T = ids[rollout], logprobs[rollout]
    if not len(tokens) == len(ids_T) == len(logprobs_T):
        return values
    for t in np.flatnonzero(trained).tolist():
        for token, logprob in zip(ids_T[t], logprobs_T[t], strict=False):
            if token == tokens[t]:
                values[t] = logprob
                break
    return values


def is_without_advantage(group: ScoredGroup, rollout: int) -> bool:
    """Whether the environment said that nothing is to be learned from a rollout."""
    overrides = group.overrides or []
    return rollout < len(overrides) and bool(overrides[rollout].get("set_advantage_to_zero"))


def temperature_of(group: ScoredGroup, rollout: int) -> float:
    """The sampling temperature of a rollout, from the same fields and in the same order as Atropos' trainer."""
    sources = (
        group.overrides[rollout] if group.overrides else None, group.generation_params, group.group_overrides,
    )  # fmt: skip
    for source in sources:
        if source and isinstance(source.get("temperature"), int | float) and source["temperature"] > 0:
            return float(source["temperature"])
    return 1.0


def was_cut_off(group: ScoredGroup, rollout: int, seq_len: int) -> bool:
    """Whether a completion ended at the length limit: as the environment says, else if it fills the sequence."""
    reason = group.overrides[rollout].get("finish_reason") if group.overrides else None
    return reason == "length" if reason is not None else len(group.tokens[rollout]) >= seq_len


def is_all_good(group: ScoredGroup) -> bool:
    """Whether equal scores mean success: by the accuracy that the environment sent, else if they are positive."""
    accuracy = (group.metrics or {}).get("accuracy")
    return accuracy == 1 if accuracy is not None else min(group.scores) > 0


def rollout_logprobs(group: ScoredGroup, rollout: int, positions: np.ndarray) -> np.ndarray:
    """The engine's logprobs of the tokens at `positions`; NaN if unknown."""
    if group.inference_logprobs is None:
        return np.full(len(positions), np.nan)
    values = np.array(group.inference_logprobs[rollout], dtype=np.float64)[positions]
    low, high = LOGPROBS
    return np.where((values < low) | (values > high), np.nan, values)


def num_positive_logprobs(group: ScoredGroup, rollout: int, trained: np.ndarray) -> int:
    """Number of trained tokens with a positive logprob: the values are wrong, or shifted."""
    if group.inference_logprobs is None:
        return 0
    values = np.array(group.inference_logprobs[rollout], dtype=np.float64)[trained]
    return int(np.count_nonzero((values > LOGPROBS[1]) & (values != NOT_SAMPLED)))


def repetition(tokens: np.ndarray) -> float:
    """Share of runs of four tokens that occurred before in the same completion.

    >>> repetition(np.array([1, 2, 3, 4, 5, 6, 7]))
    0.0
    >>> repetition(np.array([1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1]))
    0.75
    """
    num_runs = len(tokens) - REPEATED_TOKENS + 1
    runs = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(REPEATED_TOKENS):  # a hash of each run; the multiplication overflows on purpose
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + num_runs].astype(np.uint64)
    return 1 - len(np.unique(runs)) / num_runs
