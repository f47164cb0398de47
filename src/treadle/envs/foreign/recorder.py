"""Serve OpenAI's API to agents and record every token. Each session has its own URL, and a secret one for its score.

POST /SESSION/v1/chat/completions    sample from the policy; every reply is recorded token by token
POST /SESSION/v1/completions
GET  /SESSION/v1/models
POST /SECRET/score                   {"score": 1.0}, optionally "is_right" and "parts": ends the session
GET  /SESSION/nodes                  the recording so far, in the format of Atropos' proxy
DELETE /SESSION                      ends the session without a score
POST /sessions/create                assign the next item to an agent that was started elsewhere
GET  /sessions, /health
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.envs.base import Item, Score, is_enough
from treadle.envs.foreign.openai_api import (
    AgentChat,
    AgentCompletion,
    AgentRequest,
    ResponseOptions,
    Turn,
    error_body,
    parse_chat_request,
    parse_completion_request,
    response_body,
    response_events,
)
from treadle.envs.foreign.sessions import Session, SessionAbandoned, SessionClosed, SessionFull, Sessions
from treadle.errors import RequestError, TreadleError, UserError
from treadle.log import get_logger
from treadle.net.access import Access, AccessMiddleware, AccessRules
from treadle.net.address import take_port, url_to
from treadle.net.connections import Connections, HttpLimits
from treadle.net.server import SignalFreeServer, json_answer, read_json, server_settings, unless_gone
from treadle.wire.generate import Name

TOKEN_VARIABLE = "TREADLE_RECORDER_TOKEN"  # noqa: S105 - the name of a variable
MAX_CONNECTIONS = 4000  # an agent may have several
MAX_BODY_BYTES = 64 << 20  # conversations with large tool results, sent again with every call
MAX_PARTS = 200  # of a score: each becomes a metric of its group
TAKE_WITHIN_S = 30.0
CLIENT_CLOSED = 499
SHOWN_OF_KEY = 6  # characters of 22
CLIENT_HEADER = "X-Session-ID"  # client id, for callers that share a session or the URL SHARED
SHARED = "shared"  # in place of a session key in a URL: the header identifies the session
T = TypeVar("T")
log = get_logger("env")
_PartName = Annotated[str, msgspec.Meta(max_length=200)]


@contextlib.asynccontextmanager
async def serving(app: Any, host: str, port: int) -> AsyncIterator[str]:
    """Serve in this event loop until the block is left; yields the URL. Port 0 takes a free one."""
    access = Access.of(AccessRules(process="recorder", host=host, token_variable=TOKEN_VARIABLE), os.environ)
    listener = take_port(host, port)
    limits = HttpLimits(max_connections=MAX_CONNECTIONS)
    connections = Connections(limits)
    settings = server_settings(AccessMiddleware(app, access), connections, limits, lifespan="off")
    server = SignalFreeServer(settings)
    watch = asyncio.ensure_future(connections.watch())
    serve = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        url = url_to(host, listener.getsockname()[1])
        log.info("recorder", url=url)
        yield url
    finally:
        server.should_exit = True
        await asyncio.gather(serve, return_exceptions=True)
        watch.cancel()
        listener.close()


class UnknownSession(RequestError):
    pass


class NoItemAvailable(TreadleError):
    pass


class PostedScore(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    score: float
    is_right: bool | None = None
    parts: Annotated[dict[_PartName, float], msgspec.Meta(max_length=MAX_PARTS)] = {}


class CreateSession(msgspec.Struct, kw_only=True):
    """Body of Atropos' clients. Tool calls are always those between <tool_call> tags."""

    tool_parser: Name = "hermes"


class Recorder:
    """The web application: `async with serving(Recorder(sessions).app, host, port) as url`."""

    def __init__(
        self, sessions: Sessions, *, model_name: str = "policy", assigns_items: bool = False, right: float = 1.0
    ) -> None:
        """`right`: the lowest score that counts as right, unless the agent posts `is_right`."""
        self._sessions = sessions
        self._right = right
        self._model_name = model_name
        self._assigns_items = assigns_items  # to agents that are started elsewhere
        self.app = Starlette(
            routes=[
                _route("/health", self._health),
                _route("/v1/models", self._models),
                _route("/sessions", self._list),
                _route("/sessions/create", self._create, "POST"),
                _route("/{session}/v1/chat/completions", self._chat, "POST"),
                _route("/{session}/v1/completions", self._completions, "POST"),
                _route("/{session}/v1/models", self._models),
                _route("/{secret}/score", self._score, "POST"),
                _route("/{session}/nodes", self._nodes),
                _route("/{session}", self._delete, "DELETE"),
            ]
        )

    async def _chat(self, http: Request) -> Response:
        session = self._find(http)
        body = await _read(http, AgentChat)
        request = parse_chat_request(body, session.model.sampling.temperature, http.headers.get(CLIENT_HEADER, ""))
        return await self._answer(http, session, body, request)

    async def _completions(self, http: Request) -> Response:
        session = self._find(http)
        body = await _read(http, AgentCompletion)
        request = parse_completion_request(
            body, session.model.sampling.temperature, http.headers.get(CLIENT_HEADER, "")
        )
        return await self._answer(http, session, body, request)

    async def _answer(
        self, http: Request, session: Session, body: AgentChat | AgentCompletion, request: AgentRequest
    ) -> Response:
        is_chat = isinstance(body, AgentChat)
        options = ResponseOptions(
            model=body.model or self._model_name,
            is_chat=is_chat,
            logprobs=bool(body.logprobs) or (not is_chat and body.logprobs is not None),
            token_ids=body.return_token_ids,
            usage_in_stream=body.stream_options is not None and body.stream_options.include_usage,
        )
        turns: list[Turn] | None = await unless_gone(http, session.answer(request))
        if turns is None:
            return Response(status_code=CLIENT_CLOSED)
        tokenizer = session.model.tokenizer
        if body.stream:
            return StreamingResponse(response_events(turns, options, tokenizer), media_type="text/event-stream")
        return json_answer(response_body(turns, options, tokenizer))

    async def _score(self, http: Request) -> Response:
        session = self._sessions.by_score_key.get(http.path_params["secret"])
        if session is None:
            raise UnknownSession("nothing is scored here: the session has ended, or the URL is not its score_url")
        posted = await _read(http, PostedScore)
        is_right = is_enough(posted.score, self._right) if posted.is_right is None else posted.is_right
        session.finish(Score(reward=posted.score, is_right=is_right, parts=posted.parts))
        return json_answer({"status": "scored"})

    async def _delete(self, http: Request) -> Response:
        session = self._find(http)
        if not self._assigns_items:  # otherwise the policy's program could avoid a bad score
            raise SessionClosed("this environment ends its sessions itself", fix="post a score, or let the program end")
        session.fail(SessionAbandoned("the agent ended its session without a score"))
        return json_answer({"status": "deleted", "uuid": session.key})

    async def _nodes(self, http: Request) -> Response:
        model = self._find(http).model
        nodes = [
            {
                "full_text": model.tokenizer.decode(one.tokens),
                "tokens": one.tokens,
                "masked_tokens": one.masks,
                "logprobs": one.logprobs,
                "metadata": {"finish_reason": one.finish_reason},
            }
            for one in model.transcripts
        ]
        return json_answer({"nodes": nodes})

    async def _create(self, http: Request) -> Response:
        body = await _read(http, CreateSession)
        if not self._assigns_items:
            raise SessionClosed(
                "this environment starts its agents itself", fix="leave out its command to bring your own"
            )
        try:
            async with asyncio.timeout(TAKE_WITHIN_S):
                session = await unless_gone(http, self._sessions.take())
        except TimeoutError:
            raise NoItemAvailable("there is nothing to do at the moment", fix="ask again") from None
        if session is None:
            return Response(status_code=CLIENT_CLOSED)
        here = str(http.base_url).rstrip("/")
        return json_answer(
            {
                "uuid": session.key,
                "model_name": self._model_name,
                "tool_parser": body.tool_parser,
                "base_url": f"{here}/{session.key}/v1",
                "score_url": f"{here}/{session.score_key}/score",
                "created_at": session.created_at,
                "item": item_json(session.item),
            }
        )

    async def _list(self, _: Request) -> Response:
        """Keys are shortened: a whole key grants calls as its agent."""
        sessions = self._sessions.by_key.values()
        shown = [{"uuid": f"{one.key[:SHOWN_OF_KEY]}...", "created_at": one.created_at} for one in sessions]
        return json_answer({"sessions": shown})

    async def _models(self, http: Request) -> Response:
        if "session" in http.path_params:
            self._find(http)
        card = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "treadle"}
        return json_answer({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        return json_answer({"status": "ok", "sessions": len(self._sessions.by_key)})

    def _find(self, http: Request) -> Session:
        key = http.path_params["session"]
        client_id = http.headers.get(CLIENT_HEADER, "")
        session = self._sessions.by_client.get(client_id) if key == SHARED else self._sessions.by_key.get(key)
        if session is None:
            raise UnknownSession("there is no such session: it has ended, or never was")
        return session


def item_json(item: Item) -> dict[str, Any]:
    """An item as JSON for agents."""
    return {"messages": list(item.messages), "answer": item.answer, "metadata": dict(item.metadata)}


def _route(path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
    """A route that converts errors to responses."""

    async def guarded(http: Request) -> Response:
        try:
            return await handler(http)
        except TreadleError as error:
            status = _status_of(error)
            return json_answer(error_body(error, status), status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)  # before the whole body arrived
        except RecursionError:
            return json_answer(error_body(RequestError("the messages or tools are nested too deeply"), 400), 400)
        except Exception as error:  # chat templates are programs, and get arbitrary input from agents
            log.error("call_failed", exc_info=True, path=path)
            return json_answer(error_body(TreadleError(f"{type(error).__name__}: {error}"), 500), 500)

    return Route(path, guarded, methods=[method])


def _status_of(error: TreadleError) -> int:
    match error:
        case UnknownSession():
            return 404
        case SessionClosed():
            return 410  # OpenAI's client retries a 409
        case SessionFull():
            return 413
        case RequestError() | UserError():
            return 400
    return 503


async def _read(http: Request, kind: type[T]) -> T:
    return await read_json(http, kind, max_bytes=MAX_BODY_BYTES)
