"""For who watches: the metrics, the stream of events, and how each process of the run stands."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from treadle.hub import events
from treadle.hub.answers import RETRY_AFTER_S, json_answer
from treadle.hub.body import read_message
from treadle.hub.events import Newsroom
from treadle.hub.guard import ADMIN, ENGINE, ENVIRONMENT, OBSERVER, REPORTER, TRAINER
from treadle.hub.messages import MAX_DIGITS, whole_number
from treadle.hub.refusals import Refused
from treadle.hub.routing import TEXT, Endpoint, Parameter
from treadle.hub.state import HubState
from treadle.watch.stacks import write_stacks
from treadle.watch.watchdog import About, report_of
from treadle.wire import exposition
from treadle.wire.guard import why_refused
from treadle.wire.hub import Processes, ProcessReport, ProcessStanding, ReportTaken

REPORT = msgspec.json.Decoder(ProcessReport, strict=False)
# Nobody reports in the name of another process: the hub reports about itself.
ROLES_OF_KIND = {"env": ENVIRONMENT, "trainer": TRAINER, "engine": ENGINE, "hub": ADMIN}
MAX_READERS = 100  # each has a connection for as long as it likes: they must not take them all
_EVENT_ID = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1}
AFTER = Parameter("after", "query", "begin after this event; 0: all that are kept; absent: the next one", _EVENT_ID)
LAST_EVENT_ID = Parameter("Last-Event-ID", "header", "the same, as readers send it that come back", _EVENT_ID)


class ObserverRoutes:
    def __init__(self, hub: HubState, newsroom: Newsroom) -> None:
        self._hub = hub
        self._newsroom = newsroom
        self._scraping = asyncio.Lock()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "GET", "/metrics", self.metrics, "figures in Prometheus' text format",
                roles=OBSERVER, media_type=TEXT,
            ),
            Endpoint(
                "GET", "/v1/events", self.events, "server-sent events: what happens, as it happens", roles=OBSERVER,
                parameters=(AFTER, LAST_EVENT_ID), media_type=events.CONTENT_TYPE, refusals=(422,),
            ),
            Endpoint(
                "GET", "/v1/processes", self.processes, "the processes that report here, and what they wait for",
                roles=OBSERVER, answer=Processes,
            ),
            Endpoint(
                "POST", "/v1/reports", self.report, "how a process stands: every two seconds, from each",
                roles=REPORTER, body=ProcessReport, answer=ReportTaken,
            ),
        ]  # fmt: skip

    async def metrics(self, _: Request) -> Response:
        hub = self._hub
        async with self._scraping:  # one after the other: no page is made from older figures than the one before
            figures = await asyncio.to_thread(hub.store.figures, hub.metrics.after_event)
            page = hub.metrics.page(figures, hub.presence.idle_s, self._newsroom.num_readers)
        return Response(page, media_type=exposition.CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        last_id = _number(request.headers.get("last-event-id"), "header", "Last-Event-ID")
        if last_id is None:
            last_id = _number(request.query_params.get("after"), "query", "after")
        if self._newsroom.num_readers >= MAX_READERS:
            detail = f"{MAX_READERS} readers of events are connected: try again later"
            raise Refused(503, detail, {"Retry-After": RETRY_AFTER_S}, reason="too_many_readers")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._newsroom.stream(last_id), headers=headers, media_type=events.CONTENT_TYPE)

    async def processes(self, _: Request) -> Response:
        own = ProcessStanding(report=report_of("hub", "hub", About(), self._hub.store.waits), heard_s=0.0)
        return json_answer(Processes(processes=[own, *self._hub.board.standings()]))

    async def report(self, request: Request) -> Response:
        report = await read_message(request, REPORT)
        hub = self._hub
        why = why_refused(request.scope, ROLES_OF_KIND[report.kind])
        if why is not None:
            raise Refused(403, f"a report of the kind {report.kind!r}: {why}", reason="not_allowed")
        env_id = report.env_id if report.kind == "env" else None
        if env_id is not None and any(env.env_id == env_id for env in hub.store.envs()):
            hub.presence.mark(env_id)  # busy, and not gone
        taken = hub.board.take(report)
        if hub.board.hub_is_blamed:
            why, hub.board.hub_is_blamed = hub.board.hub_is_blamed, ""
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
