"""How a batch goes to a trainer that cannot acknowledge it (Atropos' /batch): the hub does so in its place.

take --> answer --> has it left? --yes--> acknowledged
                         |
                         +--no, the trainer went away--> given back: it comes again, before any other
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from treadle.errors import TreadleError
from treadle.hub.answers import json_answer, raw_json
from treadle.hub.delivery import as_json
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import Batch, DamagedGroups
from treadle.wire.http_protocol import FLUSHED
from treadle.wire.hub import TakenBatch

log = get_logger("hub")


class Handover:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    async def give(self, request: Request) -> Response:
        batch = await self._take()
        self._hub.bell.asked(is_met=batch is not None)
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
            with contextlib.suppress(DamagedGroups):  # they are set aside: the next try has others
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
        except TreadleError as error:  # a full disk, or a trainer that registered anew: the batch comes again
            log.warning("batch_not_acknowledged", step=batch.step, problem=error.message)

    def _give_back(self, batch: Batch, reason: str) -> None:
        """Not waited for: if it fails, the lease runs out."""
        log.warning("batch_not_delivered", step=batch.step, reason=reason)
        limit = self._hub.config.max_deliveries
        self._hub.store.nack(batch.step, batch.token, reason=reason, max_deliveries=limit, counts=False)
        self._hub.bell.ring()
