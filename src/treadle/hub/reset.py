"""Wipe the queue (loopback or admin token only)."""

from __future__ import annotations

import asyncio

from treadle.hub.state import HubState
from treadle.log import get_logger

log = get_logger("hub")


async def reset(hub: HubState) -> None:
    await asyncio.wrap_future(hub.store.reset())
    hub.presence.forget()
    hub.board.clear()
    hub.metrics.forget_envs()
    hub.bell.ring()
    log.warning("reset")
