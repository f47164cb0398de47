"""Routes for observers: metrics, the event stream, and the state of each process.

The event stream sends server-sent events with the store's own ids. A reader that was disconnected sends the last id it
saw and gets every later event once, also from a hub that was killed and restarted. When that is not possible, because
the events were pruned or the queue is another one, the first event is `gap`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from treadle.hub.endpoint import (
    ADMIN,
    ENGINE,
    ENVIRONMENT,
    OBSERVER,
    REPORTER,
    RETRY_AFTER_S,
    TEXT,
    TRAINER,
    Endpoint,
    Parameter,
    SharedAnswer,
    json_answer,
    read_message,
)
from treadle.hub.messages import MAX_DIGITS, Refused, whole_number
from treadle.hub.other_hubs import SPREAD_S
from treadle.hub.state import BatchSignal, HubState
from treadle.net import prometheus_text
from treadle.net.access import why_refused
from treadle.store import Event, Store, runs
from treadle.watch.stacks import write_stacks
from treadle.watch.watchdog import ProcessFacts, report_of
from treadle.wire.engines import EngineHistory, Engines, EngineVerdicts
from treadle.wire.hub import LastReport, Processes, ProcessReport, ReportTaken

# ---- event stream

PAGE = 500  # events that are in memory at once, of each reader
HEARTBEAT_S = 15.0  # shorter than the patience of any proxy
RETRY_MS = 1000
EVENT_STREAM_TYPE = "text/event-stream"


class EventStream:
    """Sends stored events to readers; wakes them after each commit."""

    def __init__(self, store: Store, stopping: BatchSignal) -> None:
        self._store = store
        self._stopping = stopping
        self._signal = BatchSignal()
        self._is_notifying = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_readers = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._store.commit_watchers.append(self._committed)
        self._store.change_watchers.append(self._changed)
        closing = self._loop.create_task(self._close_with_hub())
        try:
            yield
        finally:
            self._store.commit_watchers.remove(self._committed)
            self._store.change_watchers.remove(self._changed)
            closing.cancel()
            self._signal.close()

    def _committed(self, _num_jobs: int, _seconds: float) -> None:
        self._changed()

    def _changed(self) -> None:
        """Runs on a thread of the store. Commits before the next turn of the loop cause one notification."""
        if self.num_readers and not self._is_notifying and self._loop is not None:
            self._is_notifying = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        self._is_notifying = False  # first, so that a later commit notifies again
        self._signal.ring()

    async def _close_with_hub(self) -> None:
        while True:
            rung = self._stopping.event
            if self._stopping.closing:
                break
            await rung.wait()
        self._signal.close()

    async def stream(self, last_id: int | None, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[bytes]:
        """Everything after `last_id`; None: what is new from now on. Ends when the hub stops."""
        self.num_readers += 1
        try:
            oldest, newest = self._store.read(runs.event_ends)
            seen = newest if last_id is None else last_id
            yield b"retry: %d\n\n" % RETRY_MS
            if seen > newest:  # from another queue, whose ids went further
                yield _gap(oldest)
                seen = oldest - 1
            while True:
                rung = self._signal.event
                page = self._store.read(runs.events_after, seen, PAGE)
                if page:
                    if page[0].id > seen + 1:  # ids have no holes: those between are no longer kept
                        yield _gap(page[0].id)
                    yield _encode(page)
                    seen = page[-1].id
                elif self._signal.closing:
                    return
                else:
                    try:
                        async with asyncio.timeout(heartbeat_s):
                            await rung.wait()
                    except TimeoutError:
                        yield b": nothing new\n\n"
        finally:
            self.num_readers -= 1


def _gap(oldest: int) -> bytes:
    """Without an id: a reader that is disconnected right after it gets it again."""
    return b"event: gap\ndata: %s\n\n" % msgspec.json.encode({"oldest": oldest})


def _encode(page: Sequence[Event]) -> bytes:
    return b"".join(
        b'id: %d\nevent: %s\ndata: {"id":%d,"at":%s,"kind":"%s","data":%s}\n\n'
        % (event.id, kind, event.id, msgspec.json.encode(event.at), kind, event.data.encode())
        for event in page
        for kind in (event.kind.encode(),)
    )


# ---- routes

REPORT = msgspec.json.Decoder(ProcessReport, strict=False)
VERDICTS = msgspec.json.Decoder(EngineVerdicts)
# Nobody reports in the name of another process: the hub reports about itself.
TABLE_AGE_S = 0.1  # every environment reads the table of engines: calls within this time get the same one
ROLES_OF_KIND = {"env": ENVIRONMENT, "trainer": TRAINER, "engine": ENGINE, "hub": ADMIN}
MAX_READERS = 100  # each holds a connection: leave some for other requests
_EVENT_ID = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1}
AFTER = Parameter("after", "query", "begin after this event; 0: all that are kept; absent: the next one", _EVENT_ID)
LAST_EVENT_ID = Parameter("Last-Event-ID", "header", "the same, as readers send it that come back", _EVENT_ID)


class ObserverRoutes:
    def __init__(self, hub: HubState, event_stream: EventStream) -> None:
        self._hub = hub
        self._event_stream = event_stream
        self._scraping = asyncio.Lock()
        self._table = SharedAnswer(self._read_table, hub.clock, TABLE_AGE_S)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "GET", "/metrics", self.metrics, "figures in Prometheus' text format",
                roles=OBSERVER, media_type=TEXT,
            ),
            Endpoint(
                "GET", "/v1/events", self.events, "server-sent events: what happens, as it happens", roles=OBSERVER,
                parameters=(AFTER, LAST_EVENT_ID), media_type=EVENT_STREAM_TYPE, refusals=(422,),
            ),
            Endpoint(
                "GET", "/v1/processes", self.processes, "the processes that report here, and what they wait for",
                roles=OBSERVER, answer=Processes,
            ),
            Endpoint(
                "POST", "/v1/reports", self.report, "how a process stands: every two seconds, from each",
                roles=REPORTER, body=ProcessReport, answer=ReportTaken,
            ),
            Endpoint(
                "GET", "/v1/engines", self.engines, "the engines of the run, and which weights are verified in each",
                roles=OBSERVER, answer=Engines,
            ),
            Endpoint(
                "GET", "/v1/engines/history", self.engine_history, "the states of the engines over time",
                roles=OBSERVER, answer=EngineHistory,
            ),
            Endpoint(
                "POST", "/v1/engines/verdicts", self.judge_engines, "which engines serve: the trainer's verdicts",
                roles=TRAINER, body=EngineVerdicts, answer=Engines,
            ),
        ]  # fmt: skip

    async def metrics(self, _: Request) -> Response:
        hub = self._hub
        async with self._scraping:  # one after the other: no page is made from older figures than the one before
            figures = await asyncio.to_thread(hub.store.figures, hub.metrics.after_event)
            page = hub.metrics.page(figures, hub.presence.idle_s, self._event_stream.num_readers)
        return Response(page, media_type=prometheus_text.CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        last_id = _number(request.headers.get("last-event-id"), "header", "Last-Event-ID")
        if last_id is None:
            last_id = _number(request.query_params.get("after"), "query", "after")
        if self._event_stream.num_readers >= MAX_READERS:
            detail = f"{MAX_READERS} readers of events are connected: try again later"
            raise Refused(503, detail, {"Retry-After": RETRY_AFTER_S}, reason="too_many_readers")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._event_stream.stream(last_id), headers=headers, media_type=EVENT_STREAM_TYPE)

    async def processes(self, _: Request) -> Response:
        own = LastReport(report=report_of("hub", "hub", ProcessFacts(), self._hub.store.waits), heard_s=0.0)
        return json_answer(Processes(processes=[own, *self._hub.process_reports.standings()]))

    async def engines(self, request: Request) -> Response:
        return self._table.response(request)

    def _read_table(self) -> Engines:
        hub = self._hub
        return hub.engine_table.rows(
            hub.process_reports.engines_of_fleet(),
            num_present=hub.presence.num_present,
            spread_s=SPREAD_S if hub.store.is_shared else 0.0,
        )

    async def engine_history(self, request: Request) -> Response:
        await self.engines(request)  # an engine that has fallen silent shows now
        return json_answer(self._hub.engine_table.history())

    async def judge_engines(self, request: Request) -> Response:
        self._hub.engine_table.judge(await read_message(request, VERDICTS))
        self._table.expire()
        return await self.engines(request)

    async def report(self, request: Request) -> Response:
        report = await read_message(request, REPORT)
        hub = self._hub
        why = why_refused(request.scope, ROLES_OF_KIND[report.kind])
        if why is not None:
            raise Refused(403, f"a report of the kind {report.kind!r}: {why}", reason="not_allowed")
        if report.serves is not None and report.kind != "engine":
            raise Refused(403, f"a report of the kind {report.kind!r} cannot name an engine", reason="not_allowed")
        env_id = report.env_id if report.kind == "env" else None
        if env_id is not None and hub.presence.others_with(env_id) is not None:
            hub.presence.mark(env_id)  # busy, and not gone
        taken = hub.process_reports.take(report)
        if hub.process_reports.hub_is_blamed:
            why, hub.process_reports.hub_is_blamed = hub.process_reports.hub_is_blamed, ""
            await asyncio.to_thread(write_stacks, why)
        return json_answer(taken)


def _number(text: str | None, place: str, name: str) -> int | None:
    if not text:  # a reader that has seen nothing yet may send an empty id
        return None
    number = whole_number(text)
    if number is None or number < 0:
        found = {"type": "int_parsing", "loc": [place, name], "msg": "expected the id of an event", "input": text[:100]}
        raise Refused(422, [found], reason="int_parsing")
    return number
