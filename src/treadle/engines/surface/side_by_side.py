"""Run several requests of one client concurrently: collect their answers, or merge their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from treadle.engines.port import Delta, Engine, Generation, Request


async def generate_all(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """The answers, in order; when a request fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """(which stream, what came); the error of any of them ends all."""
    came: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(place: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                came.put_nowait((place, delta))
        except Exception as error:
            came.put_nowait(error)
        else:
            came.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            part = await came.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                num_open -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
