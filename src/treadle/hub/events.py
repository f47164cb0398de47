"""What happens, told as it happens: server-sent events with the store's own ids, so that a reader can go on exactly.

A reader that was cut off gives the last id it saw. It gets every event after that one, once, also from a hub that was
killed and started again. Where that is no longer possible, because the events are no longer kept or the queue is
another one, it is told so first, by an event `gap`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from treadle.hub.state import Bell
from treadle.store import Event, Store

PAGE = 500  # events that are in memory at once, of each reader
HEARTBEAT_S = 15.0  # shorter than the patience of any proxy
RETRY_MS = 1000
CONTENT_TYPE = "text/event-stream"


class Newsroom:
    """Wakes the readers after each commit, whatever it changed. Calls that wait for a batch are left alone."""

    def __init__(self, store: Store, stopping: Bell) -> None:
        self._store = store
        self._stopping = stopping
        self._bell = Bell()
        self._is_ringing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_readers = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._store.commit_watchers.append(self._committed)
        closing = self._loop.create_task(self._close_with_the_hub())
        try:
            yield
        finally:
            self._store.commit_watchers.remove(self._committed)
            closing.cancel()
            self._bell.close()

    def _committed(self, _num_jobs: int, _seconds: float) -> None:
        """On the writer's thread. Commits that come before the loop has its turn are told of together."""
        if self.num_readers and not self._is_ringing and self._loop is not None:
            self._is_ringing = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._is_ringing = False  # first: whoever commits from here on rings again
        self._bell.ring()

    async def _close_with_the_hub(self) -> None:
        while True:
            rung = self._stopping.listen()
            if self._stopping.closing:
                break
            await rung.wait()
        self._bell.close()

    async def stream(self, last_id: int | None, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[bytes]:
        """Everything after `last_id`; None: what is new from now on. Ends when the hub stops."""
        self.num_readers += 1
        try:
            oldest, newest = self._store.event_ends()
            seen = newest if last_id is None else last_id
            yield b"retry: %d\n\n" % RETRY_MS
            if seen > newest:  # from another queue, whose ids went further
                yield _gap(oldest)
                seen = oldest - 1
            while True:
                rung = self._bell.listen()
                page = self._store.events_after(seen, PAGE)
                if page:
                    if page[0].id > seen + 1:  # ids have no holes: those between are no longer kept
                        yield _gap(page[0].id)
                    yield _told(page)
                    seen = page[-1].id
                elif self._bell.closing:
                    return
                elif not await _rings_within(rung, heartbeat_s):
                    yield b": nothing new\n\n"
        finally:
            self.num_readers -= 1


async def _rings_within(rung: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await rung.wait()
    except TimeoutError:
        return False
    return True


def _gap(oldest: int) -> bytes:
    """Without an id of its own: a reader that is cut off right after it is told again."""
    return b"event: gap\ndata: %s\n\n" % msgspec.json.encode({"oldest": oldest})


def _told(page: Sequence[Event]) -> bytes:
    return b"".join(
        b'id: %d\nevent: %s\ndata: {"id":%d,"at":%s,"kind":"%s","data":%s}\n\n'
        % (event.id, kind, event.id, msgspec.json.encode(event.at), kind, event.data.encode())
        for event in page
        for kind in (event.kind.encode(),)
    )
