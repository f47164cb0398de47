"""The recorder: OpenAI's wire for agents, where every session has a URL of its own, and another for its score.

POST /SESSION/v1/chat/completions    the policy, and everything it says is kept token by token
POST /SESSION/v1/completions
GET  /SESSION/v1/models
POST /SECRET/score                   {"score": 1.0}, and if you like "is_right" and "parts": ends the session
GET  /SESSION/nodes                  what was recorded so far, as Atropos' proxy shows it
DELETE /SESSION                      ends the session without a score
POST /sessions/create                an agent that comes by itself gets the next item
GET  /sessions, /health
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.envs.base import Item, Score, is_enough
from treadle.envs.chat import Transcript
from treadle.envs.foreign.answers import Wishes, error_body, events, whole
from treadle.envs.foreign.lines import Turn
from treadle.envs.foreign.requests import AgentChat, AgentCompletion, Ask, chat_ask, completion_ask
from treadle.envs.foreign.sessions import Full, GivenUp, Over, Session, Sessions
from treadle.errors import RequestError, TreadleError, UserError
from treadle.log import get_logger
from treadle.net.bodies import json_answer, read_json, unless_gone
from treadle.wire.generate import Name

MAX_BODY_BYTES = 64 << 20  # conversations with large tool results, sent again with every call
MAX_PARTS = 200  # of a score: each becomes a metric of its group
TAKE_WITHIN_S = 30.0
CLIENT_LEFT = 499
SHOWN_OF_KEY = 6  # characters of 22
SPEAKER_HEADER = "X-Session-ID"  # who of those speaks that share a session, or the address SHARED
SHARED = "shared"  # instead of a session: whose call it is, the header says

T = TypeVar("T")
log = get_logger("env")


class NoSession(RequestError):
    pass


class NothingToDo(TreadleError):
    pass


_PartName = Annotated[str, msgspec.Meta(max_length=200)]


class PostedScore(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    score: float
    is_right: bool | None = None
    parts: Annotated[dict[_PartName, float], msgspec.Meta(max_length=MAX_PARTS)] = {}

    def as_score(self, right: float) -> Score:
        is_right = is_enough(self.score, right) if self.is_right is None else self.is_right
        return Score(reward=self.score, is_right=is_right, parts=self.parts)


class CreateSession(msgspec.Struct, kw_only=True):
    """What Atropos' clients send. The tool calls read are always those between <tool_call> tags."""

    tool_parser: Name = "hermes"


class Recorder:
    """`Recorder(sessions).app` is to be served (`foreign.server.serving`)."""

    def __init__(
        self, sessions: Sessions, *, model_name: str = "policy", hands_out: bool = False, right: float = 1.0
    ) -> None:
        """`right`: the least score that counts as right, where the agent does not say it."""
        self._sessions = sessions
        self._right = right
        self._model_name = model_name
        self._hands_out = hands_out  # whether agents come by themselves
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
        ask = chat_ask(body, session.model.sampling.temperature, http.headers.get(SPEAKER_HEADER, ""))
        return await self._answer(http, session, ask, self._wishes(body, is_chat=True), is_streamed=bool(body.stream))

    async def _completions(self, http: Request) -> Response:
        session = self._find(http)
        body = await _read(http, AgentCompletion)
        ask = completion_ask(body, session.model.sampling.temperature, http.headers.get(SPEAKER_HEADER, ""))
        return await self._answer(http, session, ask, self._wishes(body, is_chat=False), is_streamed=bool(body.stream))

    def _wishes(self, body: AgentChat | AgentCompletion, *, is_chat: bool) -> Wishes:
        return Wishes(
            model=body.model or self._model_name,
            is_chat=is_chat,
            logprobs=bool(body.logprobs) or (not is_chat and body.logprobs is not None),
            token_ids=body.return_token_ids,
            usage_in_stream=body.stream_options is not None and body.stream_options.include_usage,
        )

    async def _answer(
        self, http: Request, session: Session, ask: Ask, wishes: Wishes, *, is_streamed: bool
    ) -> Response:
        turns: list[Turn] | None = await unless_gone(http, session.answer(ask))
        if turns is None:
            return Response(status_code=CLIENT_LEFT)  # nobody reads it
        tokenizer = session.model.tokenizer
        if is_streamed:
            return StreamingResponse(events(turns, wishes, tokenizer), media_type="text/event-stream")
        return json_answer(whole(turns, wishes, tokenizer))

    async def _score(self, http: Request) -> Response:
        session = self._sessions.to_be_scored_at(http.path_params["secret"])
        if session is None:
            raise NoSession("nothing is scored here: the session has ended, or the URL is not its score_url")
        session.finish((await _read(http, PostedScore)).as_score(self._right))
        return json_answer({"status": "scored"})

    async def _delete(self, http: Request) -> Response:
        session = self._find(http)
        if not self._hands_out:  # or what the policy runs could spare itself a bad score
            raise Over("this environment ends its sessions itself", fix="post a score, or let the program end")
        session.fail(GivenUp("the agent ended its session without a score"))
        return json_answer({"status": "deleted", "uuid": session.key})

    async def _nodes(self, http: Request) -> Response:
        session = self._find(http)
        tokenizer = session.model.tokenizer
        return json_answer({"nodes": [_node(one, tokenizer.decode(one.tokens)) for one in session.model.transcripts]})

    async def _create(self, http: Request) -> Response:
        body = await _read(http, CreateSession)
        if not self._hands_out:
            raise Over("this environment starts its agents itself", fix="leave out its command to bring your own")
        try:
            async with asyncio.timeout(TAKE_WITHIN_S):
                session = await unless_gone(http, self._sessions.take())
        except TimeoutError:
            raise NothingToDo("there is nothing to do at the moment", fix="ask again") from None
        if session is None:
            return Response(status_code=CLIENT_LEFT)
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
        """For people: who knows a whole key may speak as its agent."""
        shown = [{"uuid": f"{one.key[:SHOWN_OF_KEY]}...", "created_at": one.created_at} for one in self._sessions]
        return json_answer({"sessions": shown})

    async def _models(self, http: Request) -> Response:
        if "session" in http.path_params:
            self._find(http)
        card = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "treadle"}
        return json_answer({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        return json_answer({"status": "ok", "sessions": len(list(self._sessions))})

    def _find(self, http: Request) -> Session:
        key = http.path_params["session"]
        speaker = http.headers.get(SPEAKER_HEADER, "")
        session = self._sessions.of_speaker(speaker) if key == SHARED else self._sessions.get(key)
        if session is None:
            raise NoSession("there is no such session: it has ended, or never was")
        return session


def item_json(item: Item) -> dict[str, Any]:
    """An item as agents get it."""
    return {"messages": list(item.messages), "answer": item.answer, "metadata": dict(item.metadata)}


def _node(transcript: Transcript, text: str) -> dict[str, Any]:
    return {
        "full_text": text,
        "tokens": transcript.tokens,
        "masked_tokens": transcript.masks,
        "logprobs": transcript.logprobs,
        "metadata": {"finish_reason": transcript.finish_reason},
    }


def _route(path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
    """A route whose errors become answers."""

    async def guarded(http: Request) -> Response:
        try:
            return await handler(http)
        except TreadleError as error:
            status = _status_of(error)
            return json_answer(error_body(error, status), status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)  # before all of its question was here
        except RecursionError:
            return json_answer(error_body(RequestError("the messages or tools are nested too deeply"), 400), 400)
        except Exception as error:  # a chat template is a program too, and an agent sends it what it likes
            log.error("call_failed", exc_info=True, path=path)
            return json_answer(error_body(TreadleError(f"{type(error).__name__}: {error}"), 500), 500)

    return Route(path, guarded, methods=[method])


def _status_of(error: TreadleError) -> int:
    match error:
        case NoSession():
            return 404
        case Over():
            return 410  # OpenAI's client would repeat a 409
        case Full():
            return 413
        case RequestError() | UserError():
            return 400
    return 503


async def _read(http: Request, kind: type[T]) -> T:
    return await read_json(http, kind, max_bytes=MAX_BODY_BYTES)
