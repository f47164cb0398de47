"""The trainer's end of a broadcast: it meets the engine in a process group, and sends what it publishes."""

from __future__ import annotations

import secrets
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.background import in_background
from treadle.sync.buckets import BUCKET_BYTES
from treadle.sync.engine_link import LOOK_S, EngineLink
from treadle.sync.process_group import (
    PEER_FIX,
    TRAINER,
    BrokenOff,
    WeightGroup,
    form_group,
    host_store,
    own_address_towards,
)
from treadle.sync.receipt import Publishable
from treadle.wire.bridge import Joined, JoinGroup, Received, ReceiveWeights

log = get_logger("sync")
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")


class GroupLink:
    """`join` before the first `send`, and after one that failed. Both end within `timeout_s`."""

    def __init__(
        self,
        engine: EngineLink,
        backend: Literal["nccl", "gloo"],
        *,
        host: str,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`host`: this machine's name for the engine; empty: its address on the network that the engine is on."""
        self._engine = engine
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._name = ""
        self._group: WeightGroup | None = None

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    def join(self, policy: Publishable) -> None:
        weights = [(name, tuple(weight.shape), weight.device) for name, weight in policy.served_weights()]
        address = self._host or self._address_towards_engine()
        store = host_store(address, self._timeout_s)
        request = JoinGroup(
            group=secrets.token_hex(8),
            host=address,
            port=store.port,
            backend=self._backend,
            dtype=str(policy.dtype).removeprefix("torch."),
            weights=[(name, shape) for name, shape, _ in weights],
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )

        def form() -> WeightGroup:
            return form_group(
                request, store, TRAINER, own_address=address, peer=f"the engine at {self._engine.url}", device=device
            )

        device = weights[0][2]
        _, self._group = self._both("/bridge/join", request, Joined, in_background("join-engine", form))
        self._name = request.group
        log.info("group_formed", backend=self._backend, host=address, weights=len(weights))

    def send(self, policy: Publishable) -> int:
        """All weights; the engine is held, and has them when this returns. Bytes sent."""
        group, self._group = self._group, None
        assert group is not None  # noqa: S101 - joined before
        body = ReceiveWeights(group=self._name, timeout_s=self._timeout_s)
        sending = in_background("send-weights", lambda: group.send(policy.served_weights()))
        sending.add_done_callback(lambda sent: group.close() if sent.exception() else None)
        received, num_bytes = self._both("/bridge/receive", body, Received, sending)
        if received.num_bytes != num_bytes:
            raise SyncError(
                f"the engine at {self._engine.url} received {received.num_bytes} bytes, and {num_bytes} were sent",
                fix="use an engine of the same release",
            )
        self._group = group  # it can be used again
        return num_bytes

    def _both(
        self, path: str, body: msgspec.Struct, answer: type[Answer], done: Future[Outcome]
    ) -> tuple[Answer, Outcome]:
        """Ask the engine for its part, while ours (`done`) is under way; whichever fails first ends both."""
        asked = in_background("ask-engine", lambda: self._engine.post(path, body, answer))
        both: tuple[Future[Any], ...] = (asked, done)
        wait(both, self._timeout_s, FIRST_EXCEPTION)
        # The engine may be about to say why it broke off; and its part must be over before anything else is asked.
        wait((asked,), LOOK_S)
        if done.done() and not isinstance(done.exception(), BrokenOff):
            done.result()  # what fails here by itself is the cause of all else
        for part in both:
            if part.done():
                part.result()
        if not (asked.done() and done.done()):
            raise SyncError(
                f"the engine at {self._engine.url} did not end POST {path} within {self._timeout_s:.0f} s", fix=PEER_FIX
            )
        return asked.result(), done.result()

    def _address_towards_engine(self) -> str:
        parts = urlsplit(self._engine.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return own_address_towards(parts.hostname or "127.0.0.1", port)
