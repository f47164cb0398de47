"""Groups -> what the model forwards: no padding, and what rollouts have in common only once. Pure.

    two groups of two rollouts           packed:  R R R P P a a a b b Q c c d d
      R R R P P a a a                    position 0 1 2 3 4 5 6 7 5 6 3 4 5 4 5
      R R R P P b b
      R R R Q c c                        R, the root, is what all prompts of the micro begin with; a completion's token
      R R R Q d d                        sees the root, its group's prompt and its own completion up to itself

Groups whose advantages are all zero have no gradient (unless there is a KL term) and are not forwarded; their tokens
still count in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.errors import TrainingError
from treadle.train.advantage import group_advantages
from treadle.wire.groups import IGNORED, ScoredGroup, common_prefix


@dataclass(frozen=True)
class Segment:
    """One group in the packed row: where the root, the rest of its prompt and each of its completions lie."""

    root: tuple[int, int]
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
        own = {
            f"rollout/{n}": float(np.mean([(g.metrics or {}).get(n, 0.0) for g in self.groups])) for n in sorted(named)
        }
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


def pack(
    groups: Sequence[ScoredGroup], *, normalize_std: bool, micro_tokens: int, all_tokens: bool = False
) -> PackedBatch:
    """Pack groups, in their order, into micros of at most `micro_tokens` (a larger single group gets its own).

    `all_tokens` keeps those without advantage too: a KL term has a gradient there.
    """
    micros: list[list[_Trained]] = [[]]
    room = micro_tokens
    num_loss_tokens = num_tokens = 0
    for group in groups:
        num_loss_tokens += sum(m != IGNORED for mask in group.masks for m in mask)
        num_tokens += sum(map(len, group.tokens))
        advantages = token_advantages(group, normalize_std=normalize_std)
        if not (all_tokens or any(a.any() for a in advantages)):
            continue
        prefix = shared_prefix(group)
        size = prefix + sum(len(t) - prefix for t in group.tokens)
        if micros[-1] and size > room:
            micros.append([])
            room = micro_tokens
        trained = [np.array(mask) != IGNORED for mask in group.masks] if all_tokens else [a != 0 for a in advantages]
        micros[-1].append(_Trained(group, advantages, trained, prefix))
        room -= size
    return PackedBatch(tuple(_build(m) for m in micros if m), num_loss_tokens, num_tokens, groups)


def token_advantages(group: ScoredGroup, *, normalize_std: bool) -> list[np.ndarray]:
    """One advantage per token: the environment's own where it sent them, else the rollout's; zero where masked."""
    per_rollout = group_advantages(group.scores, normalize_std=normalize_std)
    own = group.advantages or []  # clients send them in any length; what does not fit is not meant per token
    overrides = group.overrides or []
    result = []
    for i, mask in enumerate(group.masks):
        if i < len(own) and len(own[i]) == len(mask):
            values = np.array(own[i], dtype=np.float64)
        else:
            values = np.full(len(mask), per_rollout[i])
        if i < len(overrides) and overrides[i].get("set_advantage_to_zero"):
            values[:] = 0.0
        values[np.array(mask) == IGNORED] = 0.0
        result.append(values * group.weight)
    return result


def shared_prefix(group: ScoredGroup) -> int:
    """How many leading tokens all rollouts share, none of which carries loss."""
    first_loss = min(next((i for i, m in enumerate(mask) if m != IGNORED), len(mask)) for mask in group.masks)
    return min(first_loss, common_prefix(group.tokens))


def temperature_of(group: ScoredGroup, rollout: int) -> float:
    """The temperature a rollout was sampled at, in the order Atropos' trainer looks for it."""
    places = (
        group.overrides[rollout] if group.overrides else None, group.generation_params, group.group_overrides,
    )  # fmt: skip
    for place in places:
        if place and isinstance(place.get("temperature"), int | float) and place["temperature"] > 0:
            return float(place["temperature"])
    return 1.0


@dataclass(frozen=True)
class _Trained:
    """A group that has something to teach."""

    group: ScoredGroup
    advantages: list[np.ndarray]  # one per token
    carries_loss: list[np.ndarray]  # which tokens
    prefix: int  # leading tokens that all its rollouts share

    @property
    def prompt(self) -> list[int]:
        return self.group.tokens[0][: self.prefix]


def _build(trained: list[_Trained]) -> Micro:
    builder = _MicroBuilder(common_root([t.prompt for t in trained]))
    for t in trained:
        builder.add(t)
    return builder.build()


def common_root(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with; each keeps at least one token of its own."""
    if len(prompts) < 2:
        return []
    return prompts[0][: max(0, min(common_prefix(prompts), min(map(len, prompts)) - 1))]


class _MicroBuilder:
    """Lays the groups of one micro behind their root."""

    def __init__(self, root: list[int]) -> None:
        self._root = (0, len(root))
        self._ids: list[int] = list(root)
        self._positions: list[int] = list(range(len(root)))
        self._segments: list[Segment] = []
        self._source: list[int] = []
        self._targets: list[int] = []
        self._rollout_logprobs: list[float] = []
        self._advantages: list[float] = []
        self._temperatures: list[float] = []

    def add(self, trained: _Trained) -> None:
        group, prefix = trained.group, trained.prefix
        if group.inference_logprobs is None:
            raise TrainingError(
                "a group came without inference_logprobs; without them there is no ratio to train on",
                fix="let the environment post the engine's logprobs (server_type vllm)",
            )
        prompt_start = len(self._ids)
        self._append(group.tokens[0], self._root[1], prefix)
        prompt_end = len(self._ids)
        completions = []
        for i, tokens in enumerate(group.tokens):
            start = len(self._ids)
            self._append(tokens, prefix, len(tokens))
            completions.append((start, len(self._ids)))
            temperature = temperature_of(group, i)
            for t in np.flatnonzero(trained.carries_loss[i]):
                if t == 0:
                    continue  # nothing stands before the first token that could predict it
                self._source.append(start + int(t) - prefix - 1 if t > prefix else prompt_end - 1)
                self._targets.append(tokens[t])
                self._rollout_logprobs.append(group.inference_logprobs[i][t])
                self._advantages.append(float(trained.advantages[i][t]))
                self._temperatures.append(temperature)
        self._segments.append(Segment(self._root, (prompt_start, prompt_end), tuple(completions)))

    def _append(self, tokens: list[int], start: int, end: int) -> None:
        self._ids += tokens[start:end]
        self._positions += range(start, end)

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
