"""Compare the trainer's logprobs of a fixed text with the engine's (the canary; verify.py says when)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from treadle.errors import SyncError
from treadle.support import CANARY_BOUNDS
from treadle.sync.protocol import EngineLink, Publishable, TokenScores
from treadle.wire.generate import GenerateRequest

NUM_TOKENS = 33  # two blocks of 16 that fit a prefix cache, and one token that does not
# Allowed mean difference in nats; a single token may differ ten times as much. Usual values (docs/weights.md has the
# figures): 1e-5 in float32, 0.01 in float16, up to 0.1 in bfloat16, because the tokens are unlikely, with large logits.
MEAN_BOUNDS = {getattr(torch, dtype): bound for dtype, bound in CANARY_BOUNDS.items()}
MAX_OVER_MEAN = 10.0


@dataclass(frozen=True, eq=False)
class Canary:
    """The text, and the trainer's logprobs of it."""

    token_ids: list[int]
    scores: TokenScores


@dataclass(frozen=True)
class Difference:
    """Absolute difference between the trainer's and the engine's logprobs."""

    mean: float
    max: float

    def is_within(self, mean_bound: float) -> bool:
        return self.mean <= mean_bound and self.max <= MAX_OVER_MEAN * mean_bound  # False for NaN


class CanaryAnswer(msgspec.Struct):
    """The used fields of the answer to POST /generate."""

    token_ids: list[list[int]]
    policy_version: int
    logprobs: list[list[Any]]
    prompt_logprobs: list[Any] | None = None


def prepare_canary(policy: Publishable, seed: int = 0) -> Canary:
    """The same tokens on every machine, different ones for each seed."""
    draw = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(policy.vocab_size, (NUM_TOKENS,), generator=draw).tolist()
    return Canary(token_ids, policy.score_tokens(token_ids))


def ask_canary(engine: EngineLink, canary: Canary, version: int) -> Difference:
    """Difference between the trainer's logprobs and the engine's, which must answer under this version."""
    text = _ask(engine, canary, version, prompt_logprobs=1)
    if text.prompt_logprobs is None or len(text.prompt_logprobs) != NUM_TOKENS:
        raise SyncError(
            f"the engine at {engine.url} gives no logprobs of prompts, so it cannot be asked for a canary",
            fix="use another engine, or set --verify-publish off",
        )
    own = canary.scores.logprobs_T.tolist()
    engines = [
        _logprob_of(entry, token) for entry, token in zip(text.prompt_logprobs[1:], canary.token_ids[1:], strict=True)
    ]
    for following in (text, _ask(engine, canary, version, prompt_logprobs=None)):
        token = following.token_ids[0][0]
        own.append(float(canary.scores.next_logprobs_V[token]))
        engines.append(_logprob_of(following.logprobs[0][0], token))
    gap = (torch.tensor(own) - torch.tensor(engines)).abs()
    return Difference(float(gap.mean()), float(gap.max()))


def _ask(engine: EngineLink, canary: Canary, version: int, *, prompt_logprobs: int | None) -> CanaryAnswer:
    """Sample one token at temperature 1, where raw and processed logprobs are the same."""
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
    """Read {"17": -2.5} or [{"17": -2.5}], possibly among other tokens; NaN if it is missing."""
    tops = entry[0] if isinstance(entry, list) and entry else entry
    value = tops.get(str(token)) if isinstance(tops, dict) else None
    if isinstance(value, dict):  # {"17": {"logprob": -2.5, ...}}
        value = value.get("logprob")
    return float("nan") if value is None else float(value)
