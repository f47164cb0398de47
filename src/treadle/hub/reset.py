"""Forgetting everything, for who may."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from treadle.hub.guard import may_reset
from treadle.hub.refusals import Refused
from treadle.hub.state import HubState
from treadle.log import get_logger

log = get_logger("hub")


async def reset(hub: HubState, request: Request) -> None:
    if not may_reset(request.scope):
        raise Refused(403, "only this machine or the admin token may reset the hub", reason="not_admin")
    await asyncio.wrap_future(hub.store.reset())
    hub.presence.forget()
    hub.board.clear()
    hub.metrics.forget_envs()
    hub.bell.ring()
    log.warning("reset")
