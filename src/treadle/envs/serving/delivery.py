"""Deliver scored groups to the hub through a spool on disk, in the background.

Neither a failed post nor a killed process loses a group:

STATE/spool/000130-gsm8k-0-item-126.groups      waits to be posted, oldest first
STATE/refused/...                               refused by the hub; kept for inspection
STATE/of-run-4f1c.../...                        left over from an earlier run; never delivered
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, unquote

from treadle.envs.hub_client import HubClient
from treadle.errors import HubError
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup, pack_group

log = get_logger("env")

SUFFIX = ".groups"
UNFINISHED = ".partial"
MAX_REFUSED = 3  # in a row


class Spool:
    """Files of packed groups that wait for delivery."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "spool"
        self._refused = folder / "refused"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}"):  # killed during a write: the item is sampled again
            path.unlink()
        self._count = max((int(path.name.partition("-")[0]) for path in self.waiting()), default=-1) + 1

    def put(self, key: str, group: ScoredGroup) -> Path:
        """Write and fsync a group. `key` is the idempotency key of its delivery."""
        path = self._folder / f"{self._count:06d}-{quote(key, safe='')}{SUFFIX}"
        self._count += 1
        unfinished = path.with_suffix(UNFINISHED)
        with unfinished.open("wb") as file:
            file.write(pack_group(group))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        return path

    def waiting(self) -> list[Path]:
        """Files to deliver, oldest first; the caller deletes each after its delivery."""
        return sorted(self._folder.glob(f"*{SUFFIX}"))

    @staticmethod
    def key(path: Path) -> str:
        return unquote(path.name.removesuffix(SUFFIX).partition("-")[2])

    def refuse(self, path: Path) -> Path:
        self._refused.mkdir(exist_ok=True)
        return path.replace(self._refused / path.name)

    def put_aside(self, name: str) -> Path | None:
        """Move all files of an earlier run to the folder `name` and return it; None if there were none."""
        left = [*self.waiting(), *sorted(self._refused.glob(f"*{SUFFIX}"))]
        if not left:
            return None
        aside = self._folder.parent / name
        for path in left:
            (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
            path.replace(aside / path.parent.name / path.name)
        return aside


class Delivery:
    """`async with Delivery(hub, spool) as delivery: await delivery.accept(key, group)`.

    Waits for a hub that is unreachable. Several refusals in a row end the delivery: `failed` holds the error.
    """

    def __init__(self, hub: HubClient, spool: Spool) -> None:
        self._hub = hub
        self._spool = spool
        self._new_groups = asyncio.Queue[None]()
        self._posting: asyncio.Task[None] | None = None
        self._refused_in_a_row = 0
        self.num_waiting = len(spool.waiting())

    async def __aenter__(self) -> Self:
        if self.num_waiting:
            log.info("groups_left_from_before", groups=self.num_waiting)
        self._new_groups.put_nowait(None)
        self._posting = asyncio.create_task(self._post_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._posting is not None:
            self._posting.cancel()
            await asyncio.wait([self._posting])

    @property
    def failed(self) -> asyncio.Task[None]:
        """Finishes, with the hub's error, only after repeated refusals."""
        if self._posting is None:
            raise RuntimeError("a delivery is used inside its async with")
        return self._posting

    async def accept(self, key: str, group: ScoredGroup) -> None:
        """Queue a group for delivery; it is on disk when this returns."""
        self.num_waiting += 1
        await asyncio.to_thread(self._spool.put, key, group)
        self._new_groups.put_nowait(None)

    async def _post_forever(self) -> None:
        while True:
            await self._new_groups.get()
            for path in await asyncio.to_thread(self._spool.waiting):
                packed = await asyncio.to_thread(path.read_bytes)
                try:
                    await self._hub.post_packed([packed], self._spool.key(path))
                except HubError as error:
                    self._refuse(path, error)
                else:
                    self._refused_in_a_row = 0
                    await asyncio.to_thread(path.unlink)
                self.num_waiting -= 1

    def _refuse(self, path: Path, error: HubError) -> None:
        """Set a refused group aside and continue; raise after MAX_REFUSED refusals in a row."""
        kept = self._spool.refuse(path)
        log.error("group_refused", kept=str(kept), problem=error.message)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED:
            raise HubError(f"{error.message}; the group is kept in {kept}", fix=error.fix) from error
