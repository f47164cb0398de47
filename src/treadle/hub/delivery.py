"""Send batches to trainers: stored payloads as JSON or binary leases, and Atropos' /batch without acknowledgement.

A trainer that calls /batch cannot acknowledge, so the hub does so when the response has left:

take --> answer --> has it left? --yes--> acknowledged
                         |
                         +--no, the trainer went away--> given back: it comes again, before any other
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from treadle.errors import TreadleError
from treadle.hub.batching import freshness
from treadle.hub.endpoint import json_answer, raw_json
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.net.http_protocol import FLUSHED
from treadle.store import Batch, DamagedGroups, Format, StoredGroup
from treadle.wire import binary
from treadle.wire.groups import ATROPOS_KEYS
from treadle.wire.hub import TakenBatch

# ---- leases


async def as_json(format: Format, payload: bytes) -> bytes:
    """A group with Atropos' keys: stored JSON as it is, stored binary groups converted."""
    return payload if format == "json" else await asyncio.to_thread(_converted, payload)


def _converted(packed: bytes) -> bytes:
    group = binary.unpack_group(packed)
    return msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS})


async def lease_json(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    """A LeaseAnswer written around the stored bytes.

    Decoding and encoding a large batch would block every other request meanwhile.
    """
    head = b'{"batch":{"step":%d,"token":"%s","lease_s":%s,"groups":[' % (
        batch.step,
        batch.token.encode(),
        msgspec.json.encode(lease_s),
    )
    groups = [await _group_json(group, _weight(group, batch.step, max_age)) for group in batch.groups]
    return head + b",".join(groups) + b']},"reason":""}'


async def _group_json(group: StoredGroup, weight: float) -> bytes:
    ours = (
        msgspec.json.encode(group.policy_version),
        msgspec.json.encode(group.item),
        group.metrics or b"null",
        msgspec.json.encode(weight),
    )
    payload = await as_json(group.format, group.payload)
    return payload[:-1] + b',"policy_version":%s,"item":%s,"metrics":%s,"weight":%s}' % ours


def lease_binary(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    stored = [
        binary.StoredForm(
            json=group.payload if group.format == "json" else None,
            binary=group.payload if group.format == "binary" else None,
            policy_version=group.policy_version,
            item=group.item,
            metrics=group.metrics,
            weight=_weight(group, batch.step, max_age),
        )
        for group in batch.groups
    ]
    packed = binary.BinaryBatch(step=batch.step, token=batch.token, lease_s=lease_s, groups=stored)
    return binary.pack_answer(binary.BinaryAnswer(batch=packed))


def _weight(group: StoredGroup, step: int, max_age: int | None) -> float:
    """The trainer of step s is at version s - 1."""
    age = None if group.policy_version is None else step - 1 - group.policy_version
    return freshness(age, max_age)


# ---- Atropos' /batch

log = get_logger("hub")


class AtroposDelivery:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    async def give(self, request: Request) -> Response:
        batch = await self._take()
        self._hub.batch_signal.asked(is_met=batch is not None)
        if batch is None:
            return json_answer(TakenBatch(batch=None))
        try:
            groups = [await as_json(group.format, group.payload) for group in batch.groups]
            response = raw_json(b"".join((b'{"batch":[', b",".join(groups), b"]}")))
        except BaseException:
            self._give_back(batch, "the answer could not be made")
            raise
        response.background = BackgroundTask(self._after_answer, batch, request.scope.get(FLUSHED))
        return response

    async def _take(self) -> Batch | None:
        store = self._hub.store
        while (lease := await asyncio.wrap_future(store.take(self._hub.terms))) is not None:
            with contextlib.suppress(DamagedGroups):  # they are set aside: the next attempt takes others
                return await asyncio.to_thread(store.batch_of, lease)
        return None

    async def _after_answer(self, batch: Batch, flushed: Callable[[], Awaitable[bool]] | None) -> None:
        try:
            has_left = flushed is None or await flushed()
        except asyncio.CancelledError:  # the hub stops
            has_left = False
        if not has_left:
            self._give_back(batch, "the trainer went away before it had the whole batch")
            return
        log.info("batch_taken", step=batch.step, groups=len(batch.groups))
        self._hub.metrics.deliver(batch)
        done = asyncio.ensure_future(self._acknowledge(batch))
        self._hub.settling.add(done)
        done.add_done_callback(self._hub.settling.discard)
        await done

    async def _acknowledge(self, batch: Batch) -> None:
        keep = self._hub.config.keep_trained_bytes
        try:
            await asyncio.wrap_future(self._hub.store.ack(batch.step, batch.token, keep_trained_bytes=keep))
        except TreadleError as error:  # a full disk, or a trainer that registered again: the batch is delivered again
            log.warning("batch_not_acknowledged", step=batch.step, problem=error.message)

    def _give_back(self, batch: Batch, reason: str) -> None:
        """Not awaited: if it fails, the lease expires."""
        log.warning("batch_not_delivered", step=batch.step, reason=reason)
        limit = self._hub.config.max_deliveries
        self._hub.store.nack(batch.step, batch.token, reason=reason, max_deliveries=limit, counts=False)
        self._hub.batch_signal.ring()
