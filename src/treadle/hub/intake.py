"""How posted groups come in: the body is read, a porter checks it, the store keeps it; only then is it answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from treadle.errors import DiskFull
from treadle.hub.body import read_body
from treadle.hub.door import Order
from treadle.hub.messages import MAX_NAME_CHARS, checked_header
from treadle.hub.refusals import Refused, word
from treadle.hub.routing import Parameter
from treadle.hub.state import HubState
from treadle.store import NewGroup, Post, StoreRefusal
from treadle.wire.hub import PostedGroups

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
class Received:
    groups: Sequence[NewGroup]
    num_groups: int  # that were stored; of a duplicate, the first time
    duplicate: bool

    def told(self) -> PostedGroups:
        return PostedGroups(status="duplicate" if self.duplicate else "received", groups_processed=self.num_groups)


class Intake:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    async def receive(self, request: Request, kind: Kind, content_type: str) -> Received:
        try:
            return await self._receive(request, kind, content_type)
        except Refused as refused:
            self._hub.metrics.refuse_post([refused.env_id], refused.reason)
            raise

    async def _receive(self, request: Request, kind: Kind, content_type: str) -> Received:
        hub, config = self._hub, self._hub.config
        key = checked_header(request.headers.get("idempotency-key"), "Idempotency-Key")
        body = await read_body(
            request, content_type, max_packed=config.max_packed_bytes, max_plain=config.max_body_bytes
        )
        order = Order(
            kind=kind,
            rules=hub.rules(),
            is_gzip=body.is_gzip,
            with_hash=key is not None,
            max_bytes=config.max_body_bytes,
            max_cpu_s=CHECK_S + config.max_body_bytes / SLOWEST_CHECKED_BYTES_PER_S,
        )
        admitted = await hub.porters.admit(body.content, order)
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
        hub.bell.ring()
        return Received(admitted.groups, appended.num_groups, appended.duplicate)

    def odd(self, groups: Sequence[NewGroup]) -> tuple[int, int]:
        """How many of these have another size than their environment registered, and how much waits in such groups.

        Atropos keeps them apart and says so. Ours wait with the others; the words stay the same.
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
