"""Describe the hub's routes, read their requests and write their responses.

Routes, request counters and the OpenAPI page are made from the endpoints. Posted groups are validated and stored before
they are acknowledged. How slowly a body may arrive is the server's rule (net/connections.py).
"""

from __future__ import annotations

import asyncio
import gzip
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.config.schema import HubConfig
from treadle.errors import DiskFull
from treadle.faults import reach
from treadle.hub.group_validation import ValidationRequest, inflate
from treadle.hub.messages import (
    MAX_NAME_CHARS,
    Refused,
    check_values,
    checked_header,
    read,
    too_large,
    unprocessable,
    word,
)
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.net import access
from treadle.net.access import Access, AccessRules, why_refused
from treadle.net.access_tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, Role
from treadle.store import (
    BatchPruned,
    Format,
    HeldByAnother,
    KeyReused,
    NewGroup,
    Post,
    QueueFull,
    StaleToken,
    StorageFailed,
    StoreRefusal,
    groups,
    runs,
)
from treadle.wire.groups import ATROPOS_KEYS, BINARY_TYPE, unpack_group
from treadle.wire.hub import PostedGroups

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Request], Awaitable[Response]]
Watch = Callable[["Endpoint", int, str, float], None]  # (endpoint, status, reason of a refusal, seconds)
Kind = Literal["group", "groups", "binary"]

JSON = "application/json"
TEXT = "text/plain"
MIN_COMPRESSED_BYTES = 1000
COMPRESS_LEVEL = 1  # token ids shrink to a third already; higher levels cost ten times the time
COMPRESS_ELSEWHERE_BYTES = 64 * 1024  # from here on it would hold up other requests: done in a thread
RETRY_AFTER_S = "2"
MAX_MESSAGE_BYTES = 2**20  # registrations and the like; groups have their own limits
MAX_LENGTH_DIGITS = 18
CHECK_S = 5.0  # CPU time that the check of any body may take
SLOWEST_CHECKED_BYTES_PER_S = 4 * 2**20  # and more the larger it may be: several times what real groups take
log = get_logger("hub")

# ---- roles

# The roles that may use a route.
OBSERVER = access.EVERYBODY  # every token may read
ADMIN = access.ADMIN
ENVIRONMENT: frozenset[Role] = frozenset({"environment"})
TRAINER: frozenset[Role] = frozenset({"trainer"})
ENGINE: frozenset[Role] = frozenset({"engine"})
REPORTER = ENVIRONMENT | TRAINER | ENGINE


def access_of(config: HubConfig, env: Mapping[str, str]) -> Access:
    """`access_of(config, os.environ)`. Makes token files that are not there yet."""
    rules = AccessRules(
        process="hub",
        host=config.host,
        token_variable=HUB_TOKEN_VARIABLE,
        token_file=config.token_file,
        admin_token_variable=HUB_ADMIN_TOKEN_VARIABLE,
        admin_token_file=config.admin_token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/healthz")}),
    )
    return Access.of(rules, env)


# ---- responses


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return raw_json(msgspec.json.encode(value), status, headers)


def raw_json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, dict(headers or {}), media_type="application/json")


class SharedAnswer:
    """A JSON answer that many clients read: made, encoded and compressed once for all calls within `max_age_s`."""

    def __init__(self, make: Callable[[], Any], clock: Callable[[], float], max_age_s: float) -> None:
        self._make = make
        self._clock = clock
        self._max_age_s = max_age_s
        self._made_s = -math.inf
        self._plain = self._packed = b""

    def expire(self) -> None:
        self._made_s = -math.inf

    def response(self, request: Request) -> Response:
        now_s = self._clock()
        if now_s - self._made_s >= self._max_age_s:
            self._plain, self._packed, self._made_s = msgspec.json.encode(self._make()), b"", now_s
        if len(self._plain) < MIN_COMPRESSED_BYTES or not _takes_gzip(request.headers.get("accept-encoding", "")):
            return raw_json(self._plain)
        self._packed = self._packed or gzip.compress(self._plain, COMPRESS_LEVEL)
        return raw_json(self._packed, headers={"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


async def stored_json(format: Format, payload: bytes) -> bytes:
    """A group with Atropos' keys: stored JSON as it is, stored binary groups converted."""
    return payload if format == "json" else await asyncio.to_thread(_converted, payload)


def _converted(packed: bytes) -> bytes:
    group = unpack_group(packed)
    return msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS})


async def answer(endpoint: Endpoint, request: Request) -> tuple[Response, str]:
    """The response and, when it is a refusal, the word it is counted under.

    The one place where an error becomes an answer. The text that a client reads is always our own.
    """
    reason = ""
    try:
        why = why_refused(request.scope, endpoint.roles)
        if why is not None:
            raise Refused(403, why, reason="not_allowed")
        response = await endpoint.handler(request)
    except Refused as refused:
        reason = refused.reason
        log.debug("refused", path=request.url.path, status=refused.status, detail=refused.detail)
        response = json_answer({"detail": refused.detail}, refused.status, refused.headers)
    except (StaleToken, HeldByAnother, KeyReused, BatchPruned) as refusal:
        reason = word(refusal)
        response = json_answer({"detail": str(refusal)}, 409)
    except (QueueFull, StorageFailed) as refusal:
        reason = word(refusal)
        response = json_answer({"detail": refusal.message}, 503, {"Retry-After": RETRY_AFTER_S})
    except DiskFull as refusal:
        reason = word(refusal)
        response = json_answer({"detail": refusal.message}, 507)
    except ClientDisconnect:
        return Response(status_code=400), "disconnected"  # nobody is there to read it
    except Exception:
        incident = uuid4().hex[:12]  # ties the answer to the trace in the log, and tells nothing else
        reason = "internal_error"
        log.error("internal_error", exc_info=True, path=request.url.path, incident=incident)
        response = json_answer({"detail": "internal error", "incident": incident}, 500)
    reach("hub:before_reply")
    return await _compressed(request, response), reason


async def _compressed(request: Request, response: Response) -> Response:
    if isinstance(response, StreamingResponse) or len(response.body) < MIN_COMPRESSED_BYTES:
        return response
    if "content-encoding" in response.headers:  # of a SharedAnswer
        return response
    response.headers["vary"] = "Accept-Encoding"
    if not _takes_gzip(request.headers.get("accept-encoding", "")):
        return response
    body = bytes(response.body)
    if len(body) >= COMPRESS_ELSEWHERE_BYTES:
        packed = await asyncio.to_thread(gzip.compress, body, COMPRESS_LEVEL)
    else:
        packed = gzip.compress(body, COMPRESS_LEVEL)
    response.body = packed
    response.headers["content-length"] = str(len(packed))
    response.headers["content-encoding"] = "gzip"
    return response


def _takes_gzip(accepted: str) -> bool:
    """`gzip`, also in a list and with a weight, but not with the weight 0: that means "anything but"."""
    offers = (offer.replace(" ", "").lower().split(";q=") for offer in accepted.split(","))
    return any("gzip" in offer[0] and offer[-1].strip("0.") != "" for offer in offers)


# ---- routes


@dataclass(frozen=True, slots=True)
class Parameter:
    """`schema` is JSON Schema of the value as it is written: a step in a path is an integer."""

    name: str
    place: Literal["path", "query", "header"]
    summary: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """How an answer leads to the next call: `parameters` and `body` are OpenAPI's runtime expressions."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`body` and `answer` are types of JSON; None: the bytes are described by their media type alone.

    `refusals` are the statuses beside those that every route, or every route with a body, can answer. `roles` are those
    whose token opens the route.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    roles: Set[Role] = field(kw_only=True)
    body: Any = None
    body_type: str = JSON
    body_required: bool = True
    example: Any = None  # a body, as JSON
    parameters: Sequence[Parameter] = ()
    answer: Any = None
    media_type: str = JSON
    further_types: Sequence[str] = ()  # what else the 200 may be, when the client asks for it
    refusals: Sequence[int] = ()
    links: Mapping[str, Link] = field(default_factory=dict)

    @property
    def takes_body(self) -> bool:
        return self.body is not None or self.body_type != JSON

    def route(self, watch: Watch) -> Route:
        """GET only means GET: HEAD, which comes with it elsewhere, would take a batch and throw it away."""

        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            response, reason = await answer(self, request)
            watch(self, response.status_code, reason, time.perf_counter() - began)
            return response

        route = Route(self.path, handle, methods=[self.method])
        route.methods = {self.method}
        return route


# ---- bodies


class Body(NamedTuple):
    content: bytes | bytearray
    is_gzip: bool


async def read_message(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """A small JSON body as a typed message; 4xx with the field named when it is none."""
    body = await read_body(request, JSON, max_packed=MAX_MESSAGE_BYTES, max_plain=MAX_MESSAGE_BYTES)
    content = inflate(body.content, MAX_MESSAGE_BYTES) if body.is_gzip else body.content
    message = read(content, decoder)
    check_values(message)
    return message


async def read_body(request: Request, content_type: str, *, max_packed: int, max_plain: int) -> Body:
    """The bytes as they were sent, maybe compressed. 413 when they are too many."""
    sent_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    is_json = sent_type.startswith("application/") and sent_type.endswith("+json")
    if sent_type != content_type and not (is_json and content_type == JSON):
        if content_type == BINARY_TYPE:
            raise Refused(415, f"the body must be sent as Content-Type: {BINARY_TYPE}", reason="content_type")
        raise unprocessable("model_attributes_type", (), "the body must be sent as Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    is_gzip = "gzip" in encoding
    if not is_gzip and encoding not in ("", "identity"):
        detail = "There was an error parsing the body: send it plain or with Content-Encoding: gzip"
        raise Refused(400, detail, reason="content_encoding")
    limit = max_packed if is_gzip else max_plain
    announced = request.headers.get("content-length", "0")
    if len(announced) > MAX_LENGTH_DIGITS or (announced.isdecimal() and int(announced) > limit):
        raise too_large(limit)
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > limit:
            raise too_large(limit)
    return Body(received, is_gzip)


# ---- posted groups

IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key",
    "header",
    "the same key with the same body is stored once; with another body it is refused",
    {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
)


@dataclass(frozen=True, slots=True)
class StoredPost:
    groups: Sequence[NewGroup]
    num_groups: int  # that were stored; of a duplicate, the first time
    duplicate: bool

    def message(self) -> PostedGroups:
        return PostedGroups(status="duplicate" if self.duplicate else "received", groups_processed=self.num_groups)


async def receive_groups(hub: HubState, request: Request, kind: Kind, content_type: str) -> StoredPost:
    config = hub.config
    env_ids: set[int | None] = set()
    try:
        key = checked_header(request.headers.get("idempotency-key"), "Idempotency-Key")
        body = await read_body(
            request, content_type, max_packed=config.max_packed_bytes, max_plain=config.max_body_bytes
        )
        validation = ValidationRequest(
            kind=kind,
            rules=hub.rules(),
            is_gzip=body.is_gzip,
            with_hash=key is not None,
            max_bytes=config.max_body_bytes,
            max_cpu_s=CHECK_S + config.max_body_bytes / SLOWEST_CHECKED_BYTES_PER_S,
        )
        admitted = await hub.validators.admit(body.content, validation)
        env_ids = {group.env_id for group in admitted.groups}
        for env_id in env_ids:
            if env_id is not None:
                hub.presence.mark(env_id)
        post = Post(admitted.groups, key, admitted.body_hash)
        appended = await asyncio.wrap_future(hub.store.append(post, hub.limits))
    except Refused as refused:
        hub.metrics.refuse_post([refused.env_id], refused.reason)
        raise
    except (StoreRefusal, DiskFull) as refusal:
        hub.metrics.refuse_post(env_ids or {None}, word(refusal))
        raise
    hub.batch_signal.ring()
    return StoredPost(admitted.groups, appended.num_groups, appended.duplicate)


def count_odd_groups(hub: HubState, posted: Sequence[NewGroup]) -> tuple[int, int]:
    """Groups with another size than their environment registered, and the sequences queued in such groups.

    Atropos buffers them apart and reports it. Here they are queued with the others; the answer has the same fields.
    """
    owners = {group.env_id for group in posted if group.env_id is not None}
    if not owners:
        return 0, 0
    envs = [hub.store.read(runs.read_env, env_id) for env_id in owners]
    sizes: dict[int | None, int] = {env.env_id: env.group_size for env in envs if env is not None}
    odd = [group for group in posted if group.env_id is not None and group.size != sizes.get(group.env_id)]
    if not odd:
        return 0, 0
    owner = odd[-1].env_id
    queued = hub.store.read(groups.queued_sizes)
    waiting = [size * num for (env_id, size), num in queued.items() if env_id == owner and size != sizes.get(env_id)]
    return len(odd), sum(waiting)
