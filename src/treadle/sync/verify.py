"""Verify every publish by fingerprints, canary logprobs and the version; any difference raises SyncError.

    trainer                                   engine
    expect(): fingerprint of each weight ──┐  ┌── fingerprint of each weight
              logprobs of the canary     ──┤  ├── logprobs of the canary
              the version                ──┘  └── the version that it reports
                                 check(): an error names the difference and its likely cause

A fingerprint shows which weight is wrong. The canary is a short fixed text; its logprobs show whether the engine
computes correctly with the weights (adapters, caches, number formats), as far as rounding allows. Because the text is
always the same, stale caches are detected. The engine is asked twice: for the logprobs of the text, which engines
always compute, and for the next token, for which they may use their prefix cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from safetensors import safe_open
from torch import Tensor

from treadle.background import BackgroundWorker
from treadle.config import TrainConfig
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.canary import MAX_OVER_MEAN, MEAN_BOUNDS, Canary, ask_canary, prepare_canary
from treadle.sync.fingerprint import FingerprintCache, begin_fingerprints, fingerprints
from treadle.sync.model_folders import weight_files
from treadle.sync.protocol import NOT_VERIFIED, EngineLink, Publishable, Verified
from treadle.sync.shards import ShardMap, check_shards, distinct_shards, for_every_holder
from treadle.wire.bridge import AskFingerprints, BridgeInfo, Fingerprints, Shards

UNCACHED_TEXT = 1  # seed of a second canary
NUM_NAMED = 3
CANARY_SHARE = 0.0025  # of the time, spent on canaries between the first and the last publish
NOT_LOADED = "the engine did not load this adapter, or another one answers for it"
LOOK_AT_ADAPTERS = "look at GET /lora/status of the engine and at its log"
Compared = Literal["weights", "adapter"]
_ASK_AGAIN = "restart the engine, then treadle run --resume"
log = get_logger("sync")


# ---- the verifier
@dataclass(frozen=True, eq=False, kw_only=True)
class ExpectedState:
    """What the engine must have and answer after a publish."""

    version: int
    dtype: str
    mean_bound: float
    fingerprints: Callable[[], Mapping[str, str]] | None  # waits for the GPU that computes them
    canary: Canary | None
    uncached_canary: Callable[[], Canary] | None  # a text that is in no cache: tells a stale cache from wrong weights
    seconds: float  # spent to compute this


class PublishVerifier:
    """`compares`: which tensors must be equal: all weights, or an adapter's matrices. `is_checked_later`: the policy
    may have changed by the time the engine answers.

    Fingerprints are compared at every publish. The canary costs two prefills in the engine and a forward pass here: it
    is sent at the first and the last publish, and in between as often as fits into CANARY_SHARE of the time.

    A busy engine answers late. Where weights do not change before the next publish (`verify`), training continues, and
    the next publish starts with the answer (`settle`).
    """

    def __init__(
        self, config: TrainConfig, engine: EngineLink, *, compares: Compared = "weights", is_checked_later: bool = False
    ) -> None:
        self._config = config
        self._is_on = config.verify_publish != "off"
        self._engine = engine
        self._compares = compares
        self._is_checked_later = is_checked_later
        self._shards: ShardMap | None = None  # None: not asked yet; empty: the engine has one process
        self._fingerprint_cache = FingerprintCache()
        self._canary_due = -math.inf  # on the monotonic clock
        self._worker = BackgroundWorker("comparing weights")
        self._pending: Future[None] | None = None
        self._settling_s = 0.0
        self._has_logged_names = False

    def expect(self, policy: Publishable, version: int) -> ExpectedState:
        """Call after the live weights were written, and before they change again."""
        started = time.monotonic()
        own = canary = uncached_canary = None
        if self._is_on and self._compares == "adapter":
            own = begin_fingerprints(policy.served_adapter(), version, self._fingerprint_cache)
        elif self._is_on:
            own = self._begin_fingerprints(policy, version)
        is_due = (
            time.monotonic() >= self._canary_due
            or self._config.verify_publish == "always"
            or version >= self._config.steps
        )
        if self._is_on and is_due:
            canary = prepare_canary(policy)
            uncached_canary = None if self._is_checked_later else partial(prepare_canary, policy, UNCACHED_TEXT)
        return ExpectedState(
            version=version,
            dtype=str(policy.dtype).removeprefix("torch."),
            mean_bound=self._config.canary_tolerance or MEAN_BOUNDS[policy.dtype],
            fingerprints=own,
            canary=canary,
            uncached_canary=uncached_canary,
            seconds=time.monotonic() - started,
        )

    def _begin_fingerprints(self, policy: Publishable, version: int) -> Callable[[], dict[str, str]]:
        """Of all weights; for an engine that is split over several workers, of each worker's part of each."""
        if self._shards is None:
            self._shards = self._fetch_shards(policy)
        shards = self._shards
        if not shards:
            cache = None if policy.serves_copies else self._fingerprint_cache
            return begin_fingerprints(policy.served_weights(), version, cache)
        # Not cached: parts by columns are copied, and the copies of all weights would exist at the same time.
        found = begin_fingerprints(distinct_shards(policy.served_weights(), shards), version)
        return lambda: for_every_holder(found(), shards)

    def _fetch_shards(self, policy: Publishable) -> ShardMap:
        """They stay the same when the engine is restarted."""
        if self._engine.get("/bridge/info", BridgeInfo).num_workers == 1:
            return []
        workers = self._engine.get("/bridge/shards", Shards).workers
        check_shards(policy.served_shapes(), workers)
        return workers

    def verify(self, policy: Publishable, version: int, echoed_version: int, adapter: str | None = None) -> Verified:
        """Verify an engine that serves the new weights. Without a canary the result is pending until `settle`."""
        check_served_version(self._engine, version, echoed_version)
        if not self._is_on:
            return NOT_VERIFIED
        started = time.monotonic()
        expected = self.expect(policy, version)  # first: a thread that asks meanwhile would slow it down
        compared = self._worker.submit(partial(self._compare_weights, expected, adapter))
        if expected.canary is None:
            self._pending, verified = compared, Verified()
        else:
            compared.result()
            verified = self._ask_canary(expected, expected.canary)
        settling_s, self._settling_s = self._settling_s, 0.0
        return replace(verified, seconds=time.monotonic() - started + settling_s)

    def settle(self) -> None:
        """Wait for the pending comparison and raise its error. Call before the weights change again."""
        if self._pending is None:
            return
        started, compared = time.monotonic(), self._pending
        self._pending = None
        compared.result()
        self._settling_s = time.monotonic() - started

    def check(self, expected: ExpectedState, echoed_version: int, adapter: str | None = None) -> Verified:
        """Raise SyncError on any difference. `echoed_version`: the version in the engine's answer to the publish."""
        check_served_version(self._engine, expected.version, echoed_version)
        if not self._is_on:
            return NOT_VERIFIED
        started = time.monotonic()
        self._compare_weights(expected, adapter)
        verified = Verified() if expected.canary is None else self._ask_canary(expected, expected.canary)
        return replace(verified, seconds=expected.seconds + time.monotonic() - started)

    def _compare_weights(self, expected: ExpectedState, adapter: str | None) -> None:
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
        """vLLM renames some layers of some models; those are checked by the canary only."""
        common = [name for name in own if name in engines.fingerprints]
        if len(common) < len(own) and not self._has_logged_names:
            self._has_logged_names = True
            log.warning(
                "adapter_compared_in_part", number=len(common), of=len(own), reason="the engine names it otherwise"
            )
        found = {name: engines.fingerprints[name] for name in common}
        return {name: own[name] for name in common}, msgspec.structs.replace(engines, fingerprints=found)

    def _ask_canary(self, expected: ExpectedState, canary: Canary) -> Verified:
        started = time.monotonic()
        difference = ask_canary(self._engine, canary, expected.version)
        now = time.monotonic()
        self._canary_due = now + (expected.seconds + now - started) / CANARY_SHARE
        if difference.is_within(expected.mean_bound):
            return Verified(canary_mean=difference.mean, canary_max=difference.max)
        cause, fix = self._why_canary(expected)
        raise SyncError(
            f"after the publish of version {expected.version}, trainer and engine differ by {difference.mean:.3g} nats "
            f"in the mean and {difference.max:.3g} at most on the canary, where {expected.mean_bound:g} and "
            f"{MAX_OVER_MEAN * expected.mean_bound:g} are allowed: {cause}",
            fix=fix,
        )

    def _why_canary(self, expected: ExpectedState) -> tuple[str, str]:
        other = expected.uncached_canary and ask_canary(self._engine, expected.uncached_canary(), expected.version)
        if other and other.is_within(expected.mean_bound):
            return (
                "on a text that it was never asked before they agree, so it answers from what it cached under earlier "
                "weights",
                "Treadle's engines drop their caches at a publish; switch off prefix caching in other engines",
            )
        if self._compares == "adapter":
            return NOT_LOADED, LOOK_AT_ADAPTERS
        return (
            "its weights are the trainer's, so it computes with them differently: another number format, another "
            "revision of the model's code, or an adapter that is still loaded",
            "give engine and trainer the same --model and --dtype; if both are right, --canary-tolerance allows more",
        )


def check_served_version(engine: EngineLink, version: int, echoed: int) -> None:
    if echoed != version:
        raise SyncError(
            f"the engine at {engine.url} says that it serves version {echoed} after a publish of {version}",
            fix=f"let one trainer publish to one engine, and nothing else; {_ASK_AGAIN}",
        )


def explain(
    own: Mapping[str, str], engines: Mapping[str, str], *, own_dtype: str, engine_dtype: str
) -> tuple[str, str]:
    """(message, fix): which weights differ, and the likely cause. Pure.

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


# ---- shared weights against the model's files


def check_saved_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """Check before training that shared weights equal those in the files of `folder`; returns how many were compared.

    With one copy, engine and trainer read the same bytes, so their fingerprints are equal even if a weight is mapped to
    the wrong place. Only the files show that each name has its own weight.
    """
    views = dict(weights)
    served = fingerprints(views.items(), 0)
    saved: dict[str, str] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if name in views]  # noqa: SIM118 - it is no dictionary
            own = ((name, opened.get_tensor(name).to(views[name].dtype)) for name in names)
            saved |= fingerprints(own, 0)
    if any(served[name] != found for name, found in saved.items()):
        dtype = str(next(iter(views.values())).dtype).removeprefix("torch.")
        message, _ = explain(saved, {name: served[name] for name in saved}, own_dtype=dtype, engine_dtype=dtype)
        raise SyncError(
            f"the weights that the engine shares are not those of {folder}: {message}",
            fix="start the engine from that model; if it was, leave --single-copy out (shared_vllm: and give "
            "--use-shared-memory), and report the model",
        )
    return len(saved)
