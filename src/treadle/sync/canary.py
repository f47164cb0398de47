"""A short text that trainer and engine must think the same of: the end-to-end proof of a publish.

It is the same text each time, so an engine that answers from what it cached under earlier weights is found out. It is
asked twice: once for the logprobs of the text itself, which engines compute anew, and once for a token that follows it,
for which they may use their cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from treadle.errors import SyncError
from treadle.sync.engine_link import EngineLink
from treadle.sync.receipt import Publishable, TokenScores
from treadle.wire.generate import GenerateRequest

NUM_TOKENS = 33  # two blocks of 16 that a prefix cache can hold, and one token that it cannot
# In nats; for one token alone it may be ten times that. What is normal (docs/weights.md has the figures): 1e-5 in
# float32, 0.01 in float16, up to 0.1 in bfloat16, because these are unlikely tokens, whose logits are large.
MEAN_BOUNDS = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
MAX_OVER_MEAN = 10.0


@dataclass(frozen=True, eq=False)
class Canary:
    """The text, and what the trainer thinks of it."""

    token_ids: list[int]
    scores: TokenScores


@dataclass(frozen=True)
class Difference:
    """Trainer's against engine's logprobs, absolute."""

    mean: float
    max: float

    def is_within(self, mean_bound: float) -> bool:
        return self.mean <= mean_bound and self.max <= MAX_OVER_MEAN * mean_bound  # NaN is not


class CanaryAnswer(msgspec.Struct):
    """Of POST /generate, what is looked at."""

    token_ids: list[list[int]]
    policy_version: int
    logprobs: list[list[Any]]
    prompt_logprobs: list[Any] | None = None


def canary_tokens(vocab_size: int, seed: int = 0) -> list[int]:
    """The same on every machine; other seeds give other texts."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=draw).tolist()


def prepare_canary(policy: Publishable, seed: int = 0) -> Canary:
    token_ids = canary_tokens(policy.vocab_size, seed)
    return Canary(token_ids, policy.score_tokens(token_ids))


def ask_canary(engine: EngineLink, canary: Canary, version: int) -> Difference:
    """The engine's answer, which must be of this version, against the trainer's."""
    text = _ask(engine, canary, version, prompt_logprobs=1)
    if text.prompt_logprobs is None or len(text.prompt_logprobs) != NUM_TOKENS:
        raise SyncError(
            f"the engine at {engine.url} gives no logprobs of prompts, so it cannot be asked for a canary",
            fix="use another engine, or set --verify-publish false",
        )
    own = canary.scores.logprobs_T.tolist()
    engines = [
        _logprob_of(entry, token) for entry, token in zip(text.prompt_logprobs[1:], canary.token_ids[1:], strict=True)
    ]
    for following in (text, _ask(engine, canary, version, prompt_logprobs=None)):
        token = following.token_ids[0][0]
        own.append(float(canary.scores.next_logprobs_V[token]))
        engines.append(_logprob_of(following.logprobs[0][0], token))
    return _difference(torch.tensor(own), torch.tensor(engines))


def _ask(engine: EngineLink, canary: Canary, version: int, *, prompt_logprobs: int | None) -> CanaryAnswer:
    """One token at temperature 1: its logprob is then a raw one, whatever the engine reports."""
    body = GenerateRequest(
        prompt={"prompt_token_ids": canary.token_ids},
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=prompt_logprobs,
    )
    answer = engine.post("/generate", body, CanaryAnswer)
    if answer.policy_version != version:
        raise SyncError(
            f"the engine at {engine.url} answered the canary under version {answer.policy_version} after a publish of "
            f"{version}",
            fix="let one trainer publish to one engine, and nothing else",
        )
    return answer


def _logprob_of(entry: Any, token: int) -> float:
    """From {"17": -2.5} or [{"17": -2.5}], perhaps beside other tokens; NaN where it is missing."""
    tops = entry[0] if isinstance(entry, list) and entry else entry
    value = tops.get(str(token)) if isinstance(tops, dict) else None
    if isinstance(value, dict):  # {"17": {"logprob": -2.5, ...}}
        value = value.get("logprob")
    return float("nan") if value is None else float(value)


def _difference(own: Tensor, engines: Sequence[float] | Tensor) -> Difference:
    gap = (own - torch.as_tensor(engines)).abs()
    return Difference(float(gap.mean()), float(gap.max()))
