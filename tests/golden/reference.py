"""The objectives once more, in plain Python and float64: written from their formulas, token by token.

Nothing of the trainer is imported here, and nothing is clever: loops over sequences and tokens, gradients by central
differences. `frozen` are the logprobs at which a gradient is taken; what the formulas hold fixed (the old policy in the
first epoch, CISPO's weights) is computed from them and does not move with the differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, nan
from typing import Any

import numpy as np

Rows = list[list[float]]


@dataclass(frozen=True)
class Token:
    advantage: float
    rollout: float | None  # the engine's logprob, where one was sent
    old: float | None  # the trainer's own before the first update; None in the first epoch
    reference: float
    teacher: float | None = None  # where its logprob is known
    distill_coef: float = 0.0


Sequences = list[list[Token]]


def advantages(scores: list[float], *, leave_one_out: bool, normalize: bool, ddof: int, epsilon: float) -> list[float]:
    count = len(scores)
    if count == 1 or all(score == scores[0] for score in scores):
        return [0.0] * count
    mean = sum(scores) / count
    deviation = (sum((score - mean) ** 2 for score in scores) / (count - ddof)) ** 0.5
    result = []
    for i, score in enumerate(scores):
        others = scores[:i] + scores[i + 1 :]
        advantage = score - (sum(others) / len(others) if leave_one_out else mean)
        result.append(advantage / (deviation + epsilon) if normalize else advantage)
    return result


def own_logprob(token: Token, frozen: float) -> float:
    return frozen if token.old is None else token.old


def sampled_logprob(token: Token, frozen: float) -> float:
    return own_logprob(token, frozen) if token.rollout is None else token.rollout


def total_advantage(token: Token, frozen: float) -> float:
    """The score's, minus the reverse KL to the teacher."""
    if token.teacher is None:
        return token.advantage
    return token.advantage - token.distill_coef * (own_logprob(token, frozen) - token.teacher)


def mismatch(token: Token, frozen: float) -> float:
    return exp(own_logprob(token, frozen) - sampled_logprob(token, frozen))


def is_masked(token: Token, frozen: float, options: Any) -> bool:
    if options.importance_mask is None:
        return False
    low, high = options.importance_mask
    return not low <= mismatch(token, frozen) <= high


def ratios(logprobs: list[float], frozen: list[float], sequence: list[Token], options: Any) -> list[float]:
    """One per token of the sequence: pi / pi_old of the token, or of the sequence."""
    logs = []
    for logprob, at, token in zip(logprobs, frozen, sequence, strict=True):
        old = sampled_logprob(token, at) if options.old_logprobs == "rollout" else own_logprob(token, at)
        logs.append(logprob - old)
    if options.ratio == "token":
        return [exp(value) for value in logs]
    together = exp(sum(logs) / len(logs)) if options.ratio == "sequence_mean" else exp(sum(logs))
    return [together] * len(logs)


def gain(ratio: float, advantage: float, options: Any) -> float:
    """PPO's, with the second bound of dual-clip PPO."""
    bounded = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    smaller = min(ratio * advantage, bounded * advantage)
    if options.dual_clip is not None and advantage < 0:
        return max(smaller, options.dual_clip * advantage)
    return smaller


def kl(logprob: float, target: float, estimator: str) -> float:
    if estimator == "k1":
        return logprob - target
    if estimator == "k2":
        return 0.5 * (logprob - target) ** 2
    return exp(target - logprob) - (target - logprob) - 1


def kl_of(logprob: float, frozen: float, token: Token, options: Any) -> float:
    target = token.reference if options.kl_against == "reference" else sampled_logprob(token, frozen)
    return kl(logprob, target, options.kl_estimator)


def aggregate(terms: Rows, how: str, constant: float) -> float:
    if how == "token_mean":
        return sum(sum(row) for row in terms) / sum(len(row) for row in terms)
    if how == "sequence_mean":
        return sum(sum(row) / len(row) for row in terms) / len(terms)
    assert how == "sequence_constant"
    return sum(sum(row) / constant for row in terms) / len(terms)


def losses(logprobs: Rows, frozen: Rows, sequences: Sequences, options: Any, constant: float) -> tuple[float, float]:
    """The whole loss, and its policy part alone."""
    policy_terms: Rows = []
    kl_terms: Rows = []
    for row, frozen_row, sequence in zip(logprobs, frozen, sequences, strict=True):
        moving = ratios(row, frozen_row, sequence, options)
        fixed = ratios(frozen_row, frozen_row, sequence, options)
        policy_terms.append([])
        kl_terms.append([])
        for t, token in enumerate(sequence):
            if is_masked(token, frozen_row[t], options):
                policy_terms[-1].append(0.0)
                kl_terms[-1].append(0.0)
                continue
            advantage = total_advantage(token, frozen_row[t])
            if options.surrogate == "cispo":
                term = -min(fixed[t], 1 + options.clip_high) * advantage * row[t]
            else:
                term = -gain(moving[t], advantage, options)
            if options.importance_cap is not None:
                term *= min(mismatch(token, frozen_row[t]), options.importance_cap)
            policy_terms[-1].append(term)
            kl_terms[-1].append(kl_of(row[t], frozen_row[t], token, options))
    policy = aggregate(policy_terms, options.aggregation, constant)
    return policy + options.kl_coef * aggregate(kl_terms, options.aggregation, constant), policy


def gradient(logprobs: Rows, sequences: Sequences, options: Any, constant: float, step: float = 1e-6) -> np.ndarray:
    """By central differences, token after token."""
    result = []
    for i, row in enumerate(logprobs):
        for t in range(len(row)):
            values = []
            for sign in (+1, -1):
                moved = [list(r) for r in logprobs]
                moved[i][t] += sign * step
                values.append(losses(moved, logprobs, sequences, options, constant)[0])
            result.append((values[0] - values[1]) / (2 * step))
    return np.array(result)


def mean(values: list[float], empty: float = 0.0) -> float:
    return sum(values) / len(values) if values else empty


def metrics(logprobs: Rows, entropies: Rows, sequences: Sequences, options: Any, constant: float) -> dict[str, float]:
    """Every metric, from its definition."""
    tokens = [token for sequence in sequences for token in sequence]
    flat = [logprob for row in logprobs for logprob in row]
    ratio = [r for row, seq in zip(logprobs, sequences, strict=True) for r in ratios(row, row, seq, options)]
    pairs = list(zip(flat, tokens, strict=True))
    known = [(logprob, token) for logprob, token in pairs if token.rollout is not None]
    weights = [mismatch(token, at) for at, token in known]
    own = [own_logprob(token, at) for at, token in known]
    sampled = [sampled_logprob(token, at) for at, token in known]
    advantage = [total_advantage(token, at) for at, token in pairs]
    taught = [own_logprob(token, at) - token.teacher for at, token in pairs if token.teacher is not None]
    distilled = {"distill/reverse_kl": mean(taught, nan), "distill/taught_frac": len(taught) / len(tokens)}
    low = high = 0
    for r, a in zip(ratio, advantage, strict=True):
        if options.surrogate == "cispo":
            high += r > 1 + options.clip_high
        elif a < 0:
            low += r < 1 - options.clip_low
            high += options.dual_clip is not None and r > options.dual_clip
        elif a > 0:
            high += r > 1 + options.clip_high
    least, most = 0.5, 2.0 if options.importance_cap is None else options.importance_cap
    if options.importance_mask is not None:
        least, most = options.importance_mask
    total, policy = losses(logprobs, logprobs, sequences, options, constant)
    positive = [logprob for logprob, a in zip(flat, advantage, strict=True) if a > 0]
    negative = [logprob for logprob, a in zip(flat, advantage, strict=True) if a < 0]
    squares = [w * w for w in weights]
    return {
        "loss": total,
        "policy_loss": policy,
        "kl": mean([kl_of(at, at, token, options) for at, token in pairs]),
        "entropy": mean([entropy for row in entropies for entropy in row]),
        "mean_ratio": mean(ratio, 1.0),
        "mean_kl": mean([kl(at, sampled_logprob(token, at), "k3") for at, token in known]),
        "clipped_fraction": (low + high) / len(tokens),
        "clip_ratio/low_mean": low / len(tokens),
        "clip_ratio/high_mean": high / len(tokens),
        "clip_ratio/region_mean": (low + high) / len(tokens),
        "sampling/sampling_logp_difference/mean": mean([abs(o - s) for o, s in zip(own, sampled, strict=True)]),
        "sampling/sampling_logp_difference/max": max([abs(o - s) for o, s in zip(own, sampled, strict=True)] or [0]),
        "sampling/importance_sampling_ratio/mean": mean(weights, 1.0),
        "sampling/importance_sampling_ratio/min": min(weights or [1.0]),
        "sampling/importance_sampling_ratio/max": max(weights or [1.0]),
        "rollout_corr/kl": mean([s - o for o, s in zip(own, sampled, strict=True)]),
        "rollout_corr/k3_kl": mean([w - log(w) - 1 for w in weights]),
        "rollout_corr/chi2_token": mean(squares, 1.0) - 1,
        "rollout_corr/training_ppl": exp(-mean(own)) if own else 0.0,
        "rollout_corr/rollout_ppl": exp(-mean(sampled)) if sampled else 0.0,
        "rollout_corr/rollout_is_eff_sample_size": sum(weights) ** 2 / (len(weights) * sum(squares)) if weights else 1,
        "rollout_corr/rollout_is_oob_ratio": mean([float(w < least or w > most) for w in weights]),
        "rollout_corr/rollout_rs_masked_fraction": mean([float(is_masked(token, at, options)) for at, token in known]),
        "batch/without_logprobs_frac": 1 - len(known) / len(tokens),
        "pos_logp": mean(positive),
        "neg_logp": mean(negative),
        "pos_count": len(positive),
        "neg_count": len(negative),
        **(distilled if any(token.distill_coef for token in tokens) else {}),
    }
