"""Publish by writing where the engine reads: one copy of the weights, mapped by both processes.

The engine answers no request while weights are written: `publish` pauses it (running requests finish first, new ones
wait), writes, and resumes it under the new version. So no answer can mix two versions.
"""

from __future__ import annotations

import time

import httpx
import msgspec

from treadle.errors import SyncError
from treadle.sync.layout import Layout
from treadle.sync.receipt import Publishable, Receipt
from treadle.wire.serving import is_loopback


class SharedMemorySync:
    """Publish into memory that the engine serves from."""

    def __init__(self, engine_url: str, timeout_s: float = 180.0) -> None:
        url = engine_url.rstrip("/").removesuffix("/v1")
        self._engine = httpx.Client(base_url=url, timeout=timeout_s, trust_env=not is_loopback(url))

    def fetch_layout(self, wait_s: float = 900.0) -> Layout:
        """Ask the engine where its weights are; waits for an engine that is still loading a large model."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self._read_layout()
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise SyncError(
                        f"no engine answers at {self._engine.base_url}: {error}", fix="start one, or check --engine-url"
                    ) from None
                time.sleep(0.2)

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        self._call("pause", {})
        paused = time.monotonic()
        policy.write_live_weights()
        written = time.monotonic()
        answer = self._call("resume", {"policy_version": version})
        if answer.get("policy_version") != version:
            raise SyncError(f"the engine serves version {answer.get('policy_version')} after a publish of {version}")
        return Receipt(version=version, wait_s=paused - started, write_s=written - paused)

    def _read_layout(self) -> Layout:
        answer = self._engine.get("/bridge/state_dict_info", timeout=5.0)
        if answer.status_code != 200:
            raise SyncError(f"the engine shares no weights: {answer.text}", fix="start it with --weights-file FILE")
        return msgspec.json.decode(answer.content, type=Layout)

    def _call(self, verb: str, body: dict[str, int]) -> dict[str, object]:
        try:
            answer = self._engine.post(f"/bridge/{verb}", json=body)
        except httpx.TransportError as error:
            raise SyncError(
                f"the engine did not answer '{verb}' during a publish: {error!r}", fix="its log says why"
            ) from None
        if answer.status_code != 200:
            raise SyncError(f"the engine refused '{verb}' during a publish: {answer.text}", fix="its log says why")
        result: dict[str, object] = answer.json()
        return result
