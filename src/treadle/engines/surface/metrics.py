"""GET /metrics: how the engine does, for Prometheus."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.port import EngineState
from treadle.engines.surface.http import route
from treadle.engines.surface.served import Ledger, Served
from treadle.net.exposition import CONTENT_TYPE, Page


def metrics_route(served: Served) -> Route:
    async def metrics(_: HttpRequest) -> Response:
        page = Page()
        _add_state(page, await served.engine.state(), len(served.engine.adapters()))
        _add_requests(page, served.ledger)
        return Response(page.text(), media_type=CONTENT_TYPE)

    return route("/metrics", metrics, served.ledger)


def _add_state(page: Page, state: EngineState, num_adapters: int) -> None:
    page.family("engine_up", "gauge", "1 while it can generate").add(int(state.failure is None))
    page.family("engine_held", "gauge", "1 while no token is sampled because weights change").add(int(state.is_held))
    page.family("engine_policy_version", "gauge", "the policy version that is served").add(state.policy_version)
    page.family("engine_requests_running", "gauge", "requests that are being generated").add(state.num_running)
    page.family("engine_requests_waiting", "gauge", "requests that wait for room").add(state.num_waiting)
    page.family("engine_adapters", "gauge", "LoRA adapters that are loaded").add(num_adapters)
    page.family("engine_generated_tokens_total", "counter", "tokens that were sampled").add(state.generated_tokens)
    page.family("engine_generating_seconds_total", "counter", "time spent generating").add(state.generating_s)


def _add_requests(page: Page, ledger: Ledger) -> None:
    answered = page.family("engine_http_requests_total", "counter", "calls that were answered, by route and status")
    for (path, status), count in sorted(ledger.requests.items()):
        answered.add(count, {"route": path, "status": str(status)})
    seconds = page.family("engine_http_request_seconds", "histogram", "time until a call was answered, by route")
    for path, histogram in sorted(ledger.seconds.items()):
        seconds.add_histogram(histogram, {"route": path})
