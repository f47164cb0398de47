"""Read request bodies within size limits; validate, store and then acknowledge posted groups.

How slowly a body may arrive is the server's rule (net/connections.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from treadle.errors import DiskFull
from treadle.hub.admission import ValidationRequest
from treadle.hub.endpoint import JSON, Parameter
from treadle.hub.messages import (
    MAX_NAME_CHARS,
    Refused,
    check_values,
    checked_header,
    inflate,
    read,
    too_large,
    unprocessable,
    word,
)
from treadle.hub.state import HubState
from treadle.store import NewGroup, Post, StoreRefusal
from treadle.wire.binary import CONTENT_TYPE
from treadle.wire.hub import PostedGroups

# ---- bodies

T = TypeVar("T", bound=msgspec.Struct)

MAX_MESSAGE_BYTES = 2**20  # registrations and the like; groups have their own limits
MAX_LENGTH_DIGITS = 18


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
        if content_type == CONTENT_TYPE:
            raise Refused(415, f"the body must be sent as Content-Type: {CONTENT_TYPE}", reason="content_type")
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

Kind = Literal["group", "groups", "binary"]
CHECK_S = 5.0  # CPU time that the check of any body may take
SLOWEST_CHECKED_BYTES_PER_S = 4 * 2**20  # and more the larger it may be: several times what real groups take
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


class Intake:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    async def receive(self, request: Request, kind: Kind, content_type: str) -> StoredPost:
        try:
            return await self._receive(request, kind, content_type)
        except Refused as refused:
            self._hub.metrics.refuse_post([refused.env_id], refused.reason)
            raise

    async def _receive(self, request: Request, kind: Kind, content_type: str) -> StoredPost:
        hub, config = self._hub, self._hub.config
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
        env_ids = {group.env_id for group in admitted.groups if group.env_id is not None}
        for env_id in env_ids:
            hub.presence.mark(env_id)
        try:
            appended = await asyncio.wrap_future(
                hub.store.append(Post(admitted.groups, key, admitted.body_hash), hub.limits)
            )
        except (StoreRefusal, DiskFull) as refusal:
            hub.metrics.refuse_post({group.env_id for group in admitted.groups} or {None}, word(refusal))
            raise
        hub.batch_signal.ring()
        return StoredPost(admitted.groups, appended.num_groups, appended.duplicate)

    def odd(self, groups: Sequence[NewGroup]) -> tuple[int, int]:
        """Groups with another size than their environment registered, and the sequences queued in such groups.

        Atropos buffers them apart and reports it. Here they are queued with the others; the answer has the same fields.
        """
        if all(group.env_id is None for group in groups):
            return 0, 0
        sizes: dict[int | None, int] = {env.env_id: env.group_size for env in self._hub.store.envs()}
        odd = [group for group in groups if group.env_id is not None and group.size != sizes.get(group.env_id)]
        if not odd:
            return 0, 0
        owner = odd[-1].env_id
        queued = self._hub.store.queued_sizes()
        waiting = [
            size * num for (env_id, size), num in queued.items() if env_id == owner and size != sizes.get(env_id)
        ]
        return len(odd), sum(waiting)
