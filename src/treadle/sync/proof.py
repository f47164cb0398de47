"""Proof that a publish arrived, for every mode and by default.

    trainer                                   engine
    expect(): fingerprint of each weight ──┐  ┌── fingerprint of each weight
              logprobs of the canary     ──┤  ├── logprobs of the canary
              the version                ──┘  └── the version it says it serves
                                 check(): any difference is an error that names it and its likely cause

A fingerprint says which weight is wrong. The canary says whether what the engine computes with them is right: adapters,
caches, number formats. It finds what is grossly wrong; differences below what rounding explains it cannot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from treadle.config import TrainConfig
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.background import Background
from treadle.sync.canary import MAX_OVER_MEAN, MEAN_BOUNDS, Canary, ask_canary, prepare_canary
from treadle.sync.engine_link import EngineLink
from treadle.sync.fingerprint import StandingWeights, begin_fingerprints
from treadle.sync.receipt import NOT_VERIFIED, Publishable, Verified
from treadle.wire.bridge import AskFingerprints, BridgeInfo, Fingerprints

log = get_logger("sync")
OTHER_TEXT = 1
NUM_NAMED = 3
NOT_LOADED = "the engine did not load this adapter, or another one answers for it"
LOOK_AT_ADAPTERS = "look at GET /lora/status of the engine and at its log"
Compared = Literal["weights", "adapter"]
_ASK_AGAIN = "restart the engine, then treadle run --resume"


@dataclass(frozen=True, eq=False, kw_only=True)
class Expected:
    """What the engine must have and answer after a publish, as the trainer knows it."""

    version: int
    dtype: str
    mean_bound: float
    fingerprints: Callable[[], Mapping[str, str]] | None  # waits for a GPU that still computes them
    canary: Canary | None
    other_canary: Callable[[], Canary] | None  # of a text that no cache holds: tells a stale cache from wrong weights
    seconds: float  # that it took to know


class Proof:
    """`compares`: what is to be the trainer's in the engine, tensor for tensor: all weights, or an adapter's matrices.
    `is_checked_later`: the policy may have moved on when the engine answers.

    Fingerprints are compared at every publish. The canary, which is two prefills at the engine and a forward here, is
    asked at the first and the last, and in between so often that it takes `canary_share` of the time.

    An engine that is busy with completions answers late. Where weights stay as they are until the next publish
    (`verify`), training goes on meanwhile, and the next publish begins with the answer (`settle`).
    """

    def __init__(
        self, config: TrainConfig, engine: EngineLink, *, compares: Compared = "weights", is_checked_later: bool = False
    ) -> None:
        self._config = config
        self._engine = engine
        self._compares = compares
        self._is_checked_later = is_checked_later
        self._standing = StandingWeights()
        self._canary_due = -math.inf  # on the monotonic clock
        self._comparing = Background("comparing weights")
        self._unsettled: Future[None] | None = None
        self._settling_s = 0.0
        self._has_told_names = False

    def expect(self, policy: Publishable, version: int) -> Expected:
        """After the live weights were written, and before they change again."""
        started = time.monotonic()
        own = canary = other_canary = None
        if self._config.verify_publish and self._compares == "adapter":
            own = begin_fingerprints(policy.served_adapter(), version, self._standing)
        elif self._config.verify_publish:
            standing = None if policy.merges_adapters else self._standing
            own = begin_fingerprints(policy.served_weights(), version, standing)
        if self._config.verify_publish and self._asks_canary(version):
            canary = prepare_canary(policy)
            other_canary = None if self._is_checked_later else partial(prepare_canary, policy, OTHER_TEXT)
        return Expected(
            version=version,
            dtype=str(policy.dtype).removeprefix("torch."),
            mean_bound=self._config.canary_tolerance or MEAN_BOUNDS[policy.dtype],
            fingerprints=own,
            canary=canary,
            other_canary=other_canary,
            seconds=time.monotonic() - started,
        )

    def _asks_canary(self, version: int) -> bool:
        is_due = time.monotonic() >= self._canary_due or self._config.canary_share == 1
        return is_due or version >= self._config.steps

    def verify(self, policy: Publishable, version: int, echoed_version: int, adapter: str | None = None) -> Verified:
        """For an engine that serves the new weights now. With a canary all is known when it returns, else when it is
        settled."""
        refuse_other_version(self._engine, version, echoed_version)
        if not self._config.verify_publish:
            return NOT_VERIFIED
        started = time.monotonic()
        expected = self.expect(policy, version)  # first: a thread that asks meanwhile would hold it up
        compared = self._comparing.begin(partial(self._compare_weights, expected, adapter))
        if expected.canary is None:
            self._unsettled, verified = compared, Verified()
        else:
            compared.result()
            verified = self._ask_canary(expected, expected.canary)
        settling_s, self._settling_s = self._settling_s, 0.0
        return replace(verified, seconds=time.monotonic() - started + settling_s)

    def settle(self) -> None:
        """Before the weights change again: what was wrong with the last publish is raised here."""
        if self._unsettled is None:
            return
        started, compared = time.monotonic(), self._unsettled
        self._unsettled = None
        compared.result()
        self._settling_s = time.monotonic() - started

    def check(self, expected: Expected, echoed_version: int, adapter: str | None = None) -> Verified:
        """Raises SyncError. `echoed_version` is what the engine answered to the publish itself."""
        refuse_other_version(self._engine, expected.version, echoed_version)
        if not self._config.verify_publish:
            return NOT_VERIFIED
        started = time.monotonic()
        self._compare_weights(expected, adapter)
        verified = Verified() if expected.canary is None else self._ask_canary(expected, expected.canary)
        return replace(verified, seconds=expected.seconds + time.monotonic() - started)

    def _compare_weights(self, expected: Expected, adapter: str | None) -> None:
        if expected.fingerprints is None:
            return
        question = AskFingerprints(policy_version=expected.version, adapter=adapter)
        engines = self._engine.post("/bridge/fingerprints", question, Fingerprints)
        own = expected.fingerprints()
        if engines.fingerprints == own:
            return
        if self._compares == "adapter" and not engines.fingerprints:
            raise SyncError(f"after the publish of version {expected.version}, {NOT_LOADED}", fix=LOOK_AT_ADAPTERS)
        if self._compares == "adapter" and len(own) == len(engines.fingerprints):
            own, engines = self._with_common_names(own, engines)
            if engines.fingerprints == own:
                return
        info = self._engine.get("/bridge/info", BridgeInfo)
        message, fix = explain(own, engines.fingerprints, own_dtype=expected.dtype, engine_dtype=info.dtype)
        raise SyncError(f"after the publish of version {expected.version}, {message}", fix=fix)

    def _with_common_names(
        self, own: Mapping[str, str], engines: Fingerprints
    ) -> tuple[Mapping[str, str], Fingerprints]:
        """vLLM calls some layers of some models by names of its own; of those the canary alone can tell."""
        common = [name for name in own if name in engines.fingerprints]
        if len(common) < len(own) and not self._has_told_names:
            self._has_told_names = True
            log.warning(
                "adapter_compared_in_part", number=len(common), of=len(own), reason="the engine names it otherwise"
            )
        found = {name: engines.fingerprints[name] for name in common}
        return {name: own[name] for name in common}, msgspec.structs.replace(engines, fingerprints=found)

    def _ask_canary(self, expected: Expected, canary: Canary) -> Verified:
        started = time.monotonic()
        difference = ask_canary(self._engine, canary, expected.version)
        now, share = time.monotonic(), self._config.canary_share
        self._canary_due = now + (expected.seconds + now - started) / share if share else math.inf
        if difference.is_within(expected.mean_bound):
            return Verified(canary_mean=difference.mean, canary_max=difference.max)
        cause, fix = self._why_canary(expected)
        raise SyncError(
            f"after the publish of version {expected.version}, trainer and engine differ by {difference.mean:.3g} nats "
            f"in the mean and {difference.max:.3g} at most on the canary, where {expected.mean_bound:g} and "
            f"{MAX_OVER_MEAN * expected.mean_bound:g} are allowed: {cause}",
            fix=fix,
        )

    def _why_canary(self, expected: Expected) -> tuple[str, str]:
        other = expected.other_canary and ask_canary(self._engine, expected.other_canary(), expected.version)
        if other and other.is_within(expected.mean_bound):
            return (
                "on a text that it was never asked before they agree, so it answers from what it cached under earlier "
                "weights",
                "an engine of ours drops its caches at a publish; switch off prefix caching at a foreign one",
            )
        if self._compares == "adapter":
            return NOT_LOADED, LOOK_AT_ADAPTERS
        return (
            "its weights are the trainer's, so it computes with them differently: another number format, another "
            "revision of the model's code, or an adapter that is still loaded",
            "give engine and trainer the same --model and --dtype; if both are right, --canary-tolerance allows more",
        )


def refuse_other_version(engine: EngineLink, version: int, echoed: int) -> None:
    if echoed != version:
        raise SyncError(
            f"the engine at {engine.url} says that it serves version {echoed} after a publish of {version}",
            fix=f"let one trainer publish to one engine, and nothing else; {_ASK_AGAIN}",
        )


def explain(
    own: Mapping[str, str], engines: Mapping[str, str], *, own_dtype: str, engine_dtype: str
) -> tuple[str, str]:
    """Which weights differ, why they may, and what to do. Pure.

    >>> own = {"up": "1", "gate": "2", "norm": "3"}
    >>> explain(own, {"up": "2", "gate": "1", "norm": "3"}, own_dtype="float32", engine_dtype="float32")[0]
    'up and gate have changed places in the engine'
    """
    absent = [name for name in own if name not in engines]
    unknown = [name for name in engines if name not in own]
    if absent or unknown:
        what = f"has no {_named(absent)}" if absent else f"has {_named(unknown)}, which the trainer does not know"
        return f"the engine {what}: it serves another model", "give engine and trainer the same --model"
    different = [name for name in own if engines[name] != own[name]]
    if own_dtype != engine_dtype:
        return (
            f"{_named(different)} differ: the engine's weights are {engine_dtype}, the trainer's {own_dtype}",
            "give engine and trainer the same --dtype",
        )
    for name in different:
        taken_from = next((other for other in different if other != name and engines[name] == own[other]), None)
        if taken_from is not None and engines[taken_from] == own[name]:
            return (
                f"{name} and {taken_from} have changed places in the engine",
                "this engine loads two halves of this model in the wrong order: use another, --engine transformers",
            )
    counted = f"{len(different)} of {len(own)} weights differ, {_named(different)}"
    if len(different) > len(own) / 2:
        return (
            f"{counted}: the engine has other weights than were published; it did not load them, was restarted "
            "meanwhile, or another trainer wrote them",
            _ASK_AGAIN,
        )
    return (
        f"{counted}: skipped or half written by the engine, or kept in another number format",
        f"its log may name what it did not load; {_ASK_AGAIN}",
    )


def _named(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
