"""Define the interface of a sync mode: what it needs from the policy, and what it returns.

attach()                    called before the policy is built: what the engine serves, and where its weights are
publish(policy, version)    sends the last optimizer step to the engine and verifies that it arrived
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
    """Logprobs of a text at temperature 1, in fp32 and in host memory."""

    logprobs_T: Tensor  # of each token except the first
    next_logprobs_V: Tensor  # of every possible next token


class Publishable(Protocol):
    """What a sync mode needs from the trainer's policy."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights that an engine serves."""

    def write_live_weights(self) -> None:
        """Apply the last optimizer step to the live weights, and copy those to where the engine reads."""

    @property
    def merges_adapters(self) -> bool:
        """Whether `served_weights` are merged with adapters on each call; otherwise they are the live weights."""

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that an engine serves after this publish, by name, with adapters merged in."""

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's matrices in the engine's number format (wire/bridge.py, AskFingerprints). Their memory does not
        move between publishes."""

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        """Score one text under the live weights, without gradients."""

    def save_model(self, root: Path, name: str) -> Path:
        """Write a complete model folder for an engine, with adapters merged into the weights."""

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        """Write a folder with only these tensors."""

    def save_adapter(self, root: Path, name: str) -> Path:
        """Write the adapters in PEFT's format."""


@dataclass(frozen=True)
class AttachedModel:
    """What the trainer builds its policy from."""

    folder: Path  # of the model that training starts from
    dtype: str  # of the engine's weights; "auto": unknown
    layout: Layout | None = None  # where the engine's weights are, if the trainer may write there
    has_one_copy: bool = False  # use the engine's own memory for the live weights, if possible


class SyncMode(Protocol):
    def attach(self) -> AttachedModel: ...

    def publish(self, policy: Publishable, version: int) -> Receipt: ...

    def settle(self) -> None:
        """Wait for the pending verification of the last publish and raise its error. The next publish does too."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of verifying a publish. The canary is not sent with every publish; then its values are None."""

    seconds: float = 0.0
    canary_mean: float | None = None
    canary_max: float | None = None

    def metrics(self) -> dict[str, float]:
        canary = {"sync/canary_mean_abs_diff": self.canary_mean, "sync/canary_max_abs_diff": self.canary_max}
        return {"perf/weight_sync_verify_s": self.seconds} | {k: v for k, v in canary.items() if v is not None}


NOT_VERIFIED = Verified()


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Result of a publish: the version that the engine reports, and the cost."""

    version: int
    wait_s: float  # until the engine was paused, or an earlier publish was complete
    write_s: float
    hold_s: float = 0.0  # during which the engine sampled no token, as reported by the engine
    num_bytes: int = 0  # sent
    verified: Verified = NOT_VERIFIED

    def metrics(self) -> dict[str, float]:
        return {
            "perf/weight_sync_pause_s": self.wait_s,
            "perf/weight_sync_transfer_s": self.write_s,
            "perf/weight_sync_hold_s": self.hold_s,
            "sync/bytes": self.num_bytes,
            **self.verified.metrics(),
        }
