"""Scored groups -> disk -> hub, in the background: whoever scores does not wait for the hub."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from treadle.envs.hub_client import HubClient
from treadle.envs.serving.spool import Spool
from treadle.errors import HubError
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup

log = get_logger("env")

MAX_REFUSED = 3  # in a row


class Delivery:
    """`async with Delivery(hub, spool) as delivery: await delivery.accept(key, group)`.

    A hub that is away is waited for. One that refuses several groups in a row ends the delivery: `failed` holds the
    error.
    """

    def __init__(self, hub: HubClient, spool: Spool) -> None:
        self._hub = hub
        self._spool = spool
        self._line = asyncio.Queue[None]()
        self._posting: asyncio.Task[None] | None = None
        self._refused_in_a_row = 0
        self.num_waiting = len(spool.waiting())

    async def __aenter__(self) -> Self:
        if self.num_waiting:
            log.info("groups_left_from_before", groups=self.num_waiting)
        self._line.put_nowait(None)
        self._posting = asyncio.create_task(self._post_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._posting is not None:
            self._posting.cancel()
            await asyncio.wait([self._posting])

    @property
    def failed(self) -> asyncio.Task[None]:
        """Ends when the hub has refused a group, and raises why."""
        if self._posting is None:
            raise RuntimeError("a delivery is used inside its async with")
        return self._posting

    async def accept(self, key: str, group: ScoredGroup) -> None:
        """The group is safe when this returns."""
        self.num_waiting += 1
        await asyncio.to_thread(self._spool.put, key, group)
        self._line.put_nowait(None)

    async def _post_for_ever(self) -> None:
        while True:
            await self._line.get()
            for path in await asyncio.to_thread(self._spool.waiting):
                packed = await asyncio.to_thread(path.read_bytes)
                try:
                    await self._hub.post_packed([packed], self._spool.key_of(path))
                except HubError as error:
                    self._refuse(path, error)
                else:
                    self._refused_in_a_row = 0
                    await asyncio.to_thread(path.unlink)
                self.num_waiting -= 1

    def _refuse(self, path: Path, error: HubError) -> None:
        """One odd group is kept to be looked at, and the others go on; when all are refused, that is said."""
        kept = self._spool.refuse(path)
        log.error("group_refused", kept=str(kept), problem=error.message)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED:
            raise HubError(f"{error.message}; the group is kept in {kept}", fix=error.fix) from error
