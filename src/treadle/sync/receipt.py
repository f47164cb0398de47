"""What every sync mode takes and gives.

attach()                    before the policy is built: what the engine serves, and where its weights lie
publish(policy, version)    the last optimizer step to the engine, with proof that it arrived
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from treadle.sync.layout import Layout


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a policy thinks of a text, raw (temperature 1), fp32, in host memory."""

    logprobs_T: Tensor  # of each token but the first
    next_logprobs_V: Tensor  # of every token that could follow


class Publishable(Protocol):
    """What a sync mode needs of the trainer's policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that an engine serves."""

    def write_live_weights(self) -> None:
        """Put the last optimizer step into the live weights, and those where the engine reads."""

    @property
    def merges_adapters(self) -> bool:
        """Into `served_weights`, which are made anew each time then; else they are the live ones."""

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that an engine has after this publish, by name; adapters are merged into them."""

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's matrices as an engine computes with them (wire/bridge.py, AskFingerprints); they stay where
        they are from one publish to the next."""

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        """Under the live weights, without a gradient."""

    def save_model(self, root: Path, name: str) -> Path:
        """A whole model folder for an engine to read; adapters are merged into the weights."""

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        """A folder with these tensors and nothing else."""

    def save_adapter(self, root: Path, name: str) -> Path:
        """The adapters in PEFT's format."""


@dataclass(frozen=True)
class Attached:
    """What the trainer's policy is built from."""

    folder: Path  # of the model that training begins with
    dtype: str  # of the engine's weights; "auto": nobody says
    layout: Layout | None = None  # where the engine reads its weights, when the trainer may write there
    has_one_copy: bool = False  # the live weights are to be the engine's own, where that is possible


class SyncMode(Protocol):
    def attach(self) -> Attached: ...

    def publish(self, policy: Publishable, version: int) -> Receipt: ...

    def settle(self) -> None:
        """Waits for what is not known of the last publish yet, and raises what was wrong with it. The next publish does
        so too."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a proof found. The canary is not asked at every publish: None then."""

    seconds: float = 0.0
    canary_mean: float | None = None
    canary_max: float | None = None

    def metrics(self) -> dict[str, float]:
        asked = {"sync/canary_mean_abs_diff": self.canary_mean, "sync/canary_max_abs_diff": self.canary_max}
        return {"perf/weight_sync_verify_s": self.seconds} | {k: v for k, v in asked.items() if v is not None}


NOT_VERIFIED = Verified()


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Proof of a publish: the version that the engine says it serves now, and what it cost."""

    version: int
    wait_s: float  # until the engine held still, or an earlier publish was through
    write_s: float
    hold_s: float = 0.0  # that the engine sampled no token, as it says itself
    num_bytes: int = 0  # that were handed over
    verified: Verified = NOT_VERIFIED

    def metrics(self) -> dict[str, float]:
        return {
            "perf/weight_sync_pause_s": self.wait_s,
            "perf/weight_sync_transfer_s": self.write_s,
            "perf/weight_sync_hold_s": self.hold_s,
            "sync/bytes": self.num_bytes,
            **self.verified.metrics(),
        }
