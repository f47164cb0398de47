"""Serve an ASGI app until SIGTERM (uvicorn with limits); read JSON bodies and write JSON responses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import Response

from treadle.errors import RequestError
from treadle.net.connections import Connections, HttpLimits
from treadle.net.http_protocol import protocol_of
from treadle.wire.body_limits import TooMany, check_json

DEFAULT_LIMITS = HttpLimits()


def serve_until_stopped(
    app: Any,
    listener: socket.socket,
    on_stop: Callable[[], None],
    limits: HttpLimits = DEFAULT_LIMITS,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_stop` must end what waits, so that every client still gets an answer."""
    connections = Connections(limits)
    settings = server_settings(app, connections, limits)
    # What there is by now stays. With torch and transformers it is 400,000 objects, and every request waited 0.2 s
    # each time that they were looked through for garbage.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(SignalFreeServer(settings), listener, on_stop, connections))


def server_settings(app: Any, connections: Connections, limits: HttpLimits, **more: Any) -> uvicorn.Config:
    """uvicorn, as each of our servers wants it."""
    return uvicorn.Config(
        app,
        http=protocol_of(connections),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # a header must not be able to say that its sender is on this machine
        timeout_keep_alive=math.ceil(limits.idle_s),
        timeout_graceful_shutdown=1,  # for clients that do not read their answer
        **more,
    )


class SignalFreeServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again after its shutdown, and not end with 0."""
        yield


async def _serve(
    server: SignalFreeServer, listener: socket.socket, on_stop: Callable[[], None], connections: Connections
) -> None:
    def stop() -> None:
        on_stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watch = loop.create_task(connections.watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()


# ---- bodies

T = TypeVar("T")


def json_answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read_json(http: Request, kind: type[T], *, max_bytes: int) -> T:
    """The body as a `kind`; none at all reads as an empty object. What cannot be read is the sender's mistake."""
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise RequestError(f"the body is larger than {max_bytes >> 20} MiB")
    try:
        check_json(raw)
        return msgspec.json.decode(raw or b"{}", type=kind)
    except TooMany as error:
        raise RequestError(f"the body has too many values: {error}") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise RequestError(str(error)) from None


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; it is cancelled when the client leaves before. None: nobody reads the answer."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(http.receive())  # after the body, the next message is the end of the connection
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
