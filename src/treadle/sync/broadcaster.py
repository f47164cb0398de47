"""Broadcast weights from the trainer to one engine or several: every call reaches all of them at the same time.

    join     POST /bridge/join to each engine     beside  form_group() here      a process group of all workers
    send     POST /bridge/receive to each engine  beside  group.send() here      one broadcast, whoever takes part

When one engine fails, the group is of no use to the others either. `BroadcastFailed` says which engines failed, so that
the rest can join again without them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from treadle.background import in_background
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.net.address import is_loopback, shown_url
from treadle.sync.process_group import (
    BUCKET_BYTES,
    JOINING,
    PEER_FIX,
    TRAINER,
    BroadcastGroup,
    PeerLost,
    Store,
    abandon,
    form_group,
    host_store,
    local_address_towards,
    silent_ranks,
)
from treadle.sync.protocol import QUICK_S, EngineGone, EngineLink, Publishable
from treadle.sync.shards import worker_name
from treadle.wire.bridge import Joined, JoinGroup, Received, ReceiveWeights

Backend = Literal["nccl", "gloo"]
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")
log = get_logger("sync")


@dataclass(frozen=True, eq=False)
class Receiver:
    """An engine, and how many processes it has weights in."""

    engine: EngineLink
    num_workers: int = 1


class BroadcastFailed(SyncError):
    """`lost`: the engines that did not take part to the end; all of them where that is not known."""

    def __init__(self, message: str, *, fix: str, lost: Sequence[EngineLink]) -> None:
        super().__init__(message, fix=fix)
        self.lost = tuple(lost)


class WeightBroadcaster:
    """Sends weights to the workers of engines in a process group. Call `join` before the first `send`, after one that
    failed, and with other `receivers`. Both end within `timeout_s`."""

    def __init__(
        self,
        receivers: Sequence[Receiver],
        backend: Backend,
        *,
        host: str = "",
        port: int = 0,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`receivers` and `backend` may change before a `join`. `host`: the name of this machine for the engines; "":
        its address on their network. `port`: where workers find the trainer; 0: any free one. `timeout_s`: less than
        that of the engines' calls, so that engines that wait for another one can still answer."""
        self.receivers = tuple(receivers)
        self.backend = backend
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._request: JoinGroup | None = None
        self._store: Store = None
        self._group: BroadcastGroup | None = None
        self._sending: Future[int] | None = None

    @property
    def is_joined(self) -> bool:
        return self._group is not None

    def join(self, policy: Publishable) -> None:
        self._end_sending()
        address = self._host or self._own_address()
        store = self._store = host_store(address, self._timeout_s, self._port)
        request = self._request = JoinGroup(
            group=secrets.token_hex(8),
            host=address,
            port=store.port,
            backend=self.backend,
            dtype=str(policy.dtype).removeprefix("torch."),
            weights=policy.served_shapes(),
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            num_ranks=TRAINER + 1 + sum(receiver.num_workers for receiver in self.receivers),
        )
        form = partial(
            form_group, request, store, TRAINER, own_address=address, peer=self._names(), device=policy.device
        )
        bodies = [structs.replace(request, first_rank=ranks.start) for ranks in self._ranks()]
        with self._naming_lost(request, JOINING):
            forming: Future[BroadcastGroup] = in_background("join-engine", form)
            _, group = self._all("/bridge/join", bodies, Joined, forming, lambda: abandon(request, store))
        self._group = group
        log.info("group_formed", backend=self.backend, host=address, weights=len(request.weights))

    def send(self, policy: Publishable) -> int:
        """Send all weights to the paused engines, which have them when this returns. Returns the bytes sent to each."""
        group, request, self._group = self._group, self._request, None
        assert group is not None and request is not None  # noqa: S101, PT018 - joined before
        body, step = ReceiveWeights(group=request.group, timeout_s=self._timeout_s), group.num_broadcasts + 1
        self._sending = in_background("send-weights", lambda: group.send(policy.served_weights()))
        bodies = [body] * len(self.receivers)
        with self._naming_lost(request, step):
            answers, num_bytes = self._all("/bridge/receive", bodies, Received, self._sending, group.close)
        for receiver, received in zip(self.receivers, answers, strict=True):
            if received.num_bytes != num_bytes:
                raise BroadcastFailed(
                    f"{_name(receiver)} received {received.num_bytes} bytes, and {num_bytes} were sent",
                    fix="use an engine of the same release",
                    lost=[receiver.engine],
                )
        self._group = group  # usable again
        return num_bytes

    def _end_sending(self) -> None:
        """Leave the present group. What was being sent must end first: all trainer ranks take part in it."""
        group, self._group = self._group, None
        self._store = None  # frees its port
        if group is not None:
            group.close()
        # An engine that did not begin to receive does not end the sending: only its own timeout does.
        if self._sending is not None and not wait((self._sending,), self._timeout_s + QUICK_S).done:
            raise SyncError(f"the broadcast to {self._names()} does not end", fix=PEER_FIX)

    def _own_address(self) -> str:
        """An engine on this machine reaches any address of it; one elsewhere, that on its own network."""
        urls = [receiver.engine.url for receiver in self.receivers]
        url = urlsplit(next((url for url in urls if not is_loopback(url)), urls[0]))
        port = url.port or (443 if url.scheme == "https" else 80)
        return local_address_towards(url.hostname or "127.0.0.1", port)

    def _ranks(self) -> Iterator[range]:
        """The ranks of each engine's workers."""
        first = TRAINER + 1
        for receiver in self.receivers:
            yield range(first, first + receiver.num_workers)
            first += receiver.num_workers

    def _names(self) -> str:
        return " and ".join(map(_name, self.receivers))

    @contextmanager
    def _naming_lost(self, request: JoinGroup, step: int) -> Iterator[None]:
        """Say with an error which engines failed, and which of several workers did not come as far as this step: they
        have died, or hang."""
        try:
            yield
        except SyncError as error:
            lost = list(error.lost) if isinstance(error, BroadcastFailed) else []
            silent = silent_ranks(self._store, request, step) if request.num_ranks > TRAINER + 2 else []
            workers = []
            for receiver, ranks in zip(self.receivers, self._ranks(), strict=True):
                missing = [rank - ranks.start for rank in silent if rank in ranks]
                if missing and receiver.engine not in lost:
                    lost.append(receiver.engine)
                if receiver.num_workers > 1:
                    whose = "the engine" if len(self.receivers) == 1 else _name(receiver)
                    workers += [f"{worker_name(number, receiver.num_workers)} of {whose}" for number in missing]
            silent_text = f" ({' and '.join(workers)} did not report)" if workers else ""
            everyone = [receiver.engine for receiver in self.receivers]
            raise BroadcastFailed(
                error.message + silent_text, fix=error.fix or PEER_FIX, lost=lost or everyone
            ) from error

    def _all(
        self,
        path: str,
        bodies: Sequence[msgspec.Struct],
        answer: type[Answer],
        done: Future[Outcome],
        end: Callable[[], None],
    ) -> tuple[list[Answer], Outcome]:
        """Ask each engine for its part while the trainer's part (`done`) runs. After the first failure `end` ends the
        parts of the others, which would wait for the one that failed."""
        asked = [
            in_background("ask-engine", partial(receiver.engine.post, path, body, answer))
            for receiver, body in zip(self.receivers, bodies, strict=True)
        ]
        everything: tuple[Future[Any], ...] = (*asked, done)
        wait(everything, self._timeout_s, FIRST_EXCEPTION)
        if not all(part.done() and part.exception() is None for part in everything):
            end()
        # Engines may be about to report why they failed, and their part must be over before the next request.
        wait(asked, QUICK_S)
        lost = [
            receiver.engine
            for receiver, part in zip(self.receivers, asked, strict=True)
            if not part.done() or isinstance(part.exception(), EngineGone)
        ]
        if done.done() and not isinstance(done.exception(), PeerLost):
            done.result()  # a local failure is the root cause
        gone_first = sorted(everything, key=lambda part: not (part.done() and isinstance(part.exception(), EngineGone)))
        problem = next((error for part in gone_first if part.done() and (error := part.exception())), None)
        if isinstance(problem, SyncError):
            raise BroadcastFailed(problem.message, fix=problem.fix or PEER_FIX, lost=lost) from problem
        if problem is not None:
            raise problem
        if not all(part.done() for part in everything):
            who = " and ".join(_name(receiver) for receiver in self.receivers if receiver.engine in lost)
            raise BroadcastFailed(
                f"{who or self._names()} did not end POST {path} within {self._timeout_s:.0f} s",
                fix=PEER_FIX,
                lost=lost,
            )
        return [part.result() for part in asked], done.result()


def _name(receiver: Receiver) -> str:
    return f"the engine at {shown_url(receiver.engine.url)}"
