"""Groups -> what the model forwards: no padding, and the prompt of a group only once. Pure.

    a group of three rollouts            packed:  P P P P a a a b b c c c c
      P P P P a a a                      position 0 1 2 3 4 5 6 4 5 4 5 6 7
      P P P P b b
      P P P P c c c c                    a completion's token sees P and what stands before it in its own completion

Groups whose advantages are all zero have no gradient and are not forwarded; their tokens still count in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.errors import TrainingError
from treadle.train.advantage import group_advantages
from treadle.wire.groups import IGNORED, ScoredGroup


@dataclass(frozen=True)
class Segment:
    """One group in the packed row: where its shared prompt and each of its completions lie."""

    prompt: tuple[int, int]
    completions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Micro:
    """What one forward takes. `_T` runs over packed tokens, `_L` over the tokens that carry loss."""

    token_ids_T: Tensor
    positions_T: Tensor
    segments: tuple[Segment, ...]
    source_L: Tensor  # index into T of the token whose hidden state predicts the loss token
    targets_L: Tensor
    rollout_logprobs_L: Tensor
    advantages_L: Tensor
    temperatures_L: Tensor


@dataclass(frozen=True)
class PackedBatch:
    micros: tuple[Micro, ...]
    num_loss_tokens: int  # over the whole optimizer step, whatever was forwarded
    num_tokens: int
    groups: Sequence[ScoredGroup]

    def metrics(self, version: int) -> dict[str, float]:
        """What the batch looked like: rewards, lengths, age against the policy `version` it is trained on."""
        rewards_G = np.array([np.mean(g.scores) for g in self.groups])
        spreads_G = np.array([np.std(g.scores) for g in self.groups])
        lengths = [sum(m != IGNORED for m in mask) for g in self.groups for mask in g.masks]
        ages = [version - g.policy_version for g in self.groups if g.policy_version is not None]
        named = {name for g in self.groups for name in (g.metrics or {})}
        own = {f"rollout/{n}": float(np.mean([(g.metrics or {}).get(n, 0.0) for g in self.groups])) for n in sorted(named)}
        return {
            "reward/mean": float(rewards_G.mean()),
            "reward/std": float(spreads_G.mean()),
            "reward/zero_std_frac": float((spreads_G == 0).mean()),
            "completion/mean_length": float(np.mean(lengths)),
            "completion/max_length": float(np.max(lengths)),
            "age/mean": float(np.mean(ages)) if ages else 0.0,
            "age/max": float(np.max(ages)) if ages else 0.0,
            "batch/groups": len(self.groups),
            "batch/sequences": sum(g.size for g in self.groups),
            "batch/micros": len(self.micros),
            "batch/tokens": self.num_tokens,
            "batch/forwarded_tokens": sum(len(m.token_ids_T) for m in self.micros),
            "batch/loss_tokens": self.num_loss_tokens,
            **own,
        }


def pack(groups: Sequence[ScoredGroup], *, normalize_std: bool, micro_tokens: int) -> PackedBatch:
    """Pack groups, in their order, into micros of at most `micro_tokens` (a larger single group gets its own)."""
    micros: list[Micro] = []
    builder = _MicroBuilder()
    num_loss_tokens = num_tokens = 0
    for group in groups:
        num_loss_tokens += sum(m != IGNORED for mask in group.masks for m in mask)
        num_tokens += sum(map(len, group.tokens))
        advantages = token_advantages(group, normalize_std=normalize_std)
        if not any(a.any() for a in advantages):
            continue
        prefix = shared_prefix(group)
        size = prefix + sum(len(t) - prefix for t in group.tokens)
        if builder.num_tokens and builder.num_tokens + size > micro_tokens:
            micros.append(builder.build())
            builder = _MicroBuilder()
        builder.add(group, advantages, prefix)
    if builder.num_tokens:
        micros.append(builder.build())
    return PackedBatch(tuple(micros), num_loss_tokens, num_tokens, groups)


def token_advantages(group: ScoredGroup, *, normalize_std: bool) -> list[np.ndarray]:
    """One advantage per token: the environment's own where it sent them, else that of the rollout; zero where masked."""
    per_rollout = group_advantages(group.scores, normalize_std=normalize_std)
    result = []
    for i, mask in enumerate(group.masks):
        own = group.advantages[i] if group.advantages else None
        if own is not None and len(own) == len(mask):
            values = np.array(own, dtype=np.float64)
        else:
            values = np.full(len(mask), per_rollout[i])
        if group.overrides and group.overrides[i].get("set_advantage_to_zero"):
            values[:] = 0.0
        values[np.array(mask) == IGNORED] = 0.0
        result.append(values)
    return result


def shared_prefix(group: ScoredGroup) -> int:
    """How many leading tokens all rollouts share, none of which carries loss."""
    shortest = min(map(len, group.tokens))
    first_loss = min((next((i for i, m in enumerate(mask) if m != IGNORED), len(mask)) for mask in group.masks))
    limit = min(shortest, first_loss)
    first = group.tokens[0]
    return next((i for i in range(limit) if any(t[i] != first[i] for t in group.tokens)), limit)


def temperature_of(group: ScoredGroup, rollout: int) -> float:
    """The temperature a rollout was sampled at, in the order Atropos' trainer looks for it."""
    places = (
        group.overrides[rollout] if group.overrides else None, group.generation_params, group.group_overrides,
    )  # fmt: skip
    for place in places:
        if place and isinstance(place.get("temperature"), int | float) and place["temperature"] > 0:
            return float(place["temperature"])
    return 1.0


class _MicroBuilder:
    """Collects groups until a micro is full."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._segments: list[Segment] = []
        self._source: list[int] = []
        self._targets: list[int] = []
        self._rollout_logprobs: list[float] = []
        self._advantages: list[float] = []
        self._temperatures: list[float] = []

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, group: ScoredGroup, advantages: list[np.ndarray], prefix: int) -> None:
        if group.inference_logprobs is None:
            raise TrainingError(
                "a group came without inference_logprobs; without them there is no ratio to train on",
                fix="let the environment post the engine's logprobs (server_type vllm)",
            )
        prompt_start = self.num_tokens
        self._ids += group.tokens[0][:prefix]
        self._positions += range(prefix)
        completions = []
        for i, tokens in enumerate(group.tokens):
            start = self.num_tokens
            self._ids += tokens[prefix:]
            self._positions += range(prefix, len(tokens))
            completions.append((start, self.num_tokens))
            temperature = temperature_of(group, i)
            for t in np.flatnonzero(advantages[i]):
                if t == 0:
                    continue  # nothing stands before the first token that could predict it
                previous = start + int(t) - prefix - 1
                self._source.append(previous if t > prefix else prompt_start + prefix - 1)
                self._targets.append(tokens[t])
                self._rollout_logprobs.append(group.inference_logprobs[i][t])
                self._advantages.append(float(advantages[i][t]))
                self._temperatures.append(temperature)
        self._segments.append(Segment((prompt_start, prompt_start + prefix), tuple(completions)))

    def build(self) -> Micro:
        return Micro(
            token_ids_T=torch.tensor(self._ids),
            positions_T=torch.tensor(self._positions),
            segments=tuple(self._segments),
            source_L=torch.tensor(self._source, dtype=torch.long),
            targets_L=torch.tensor(self._targets, dtype=torch.long),
            rollout_logprobs_L=torch.tensor(self._rollout_logprobs, dtype=torch.float32),
            advantages_L=torch.tensor(self._advantages, dtype=torch.float32),
            temperatures_L=torch.tensor(self._temperatures, dtype=torch.float32),
        )
