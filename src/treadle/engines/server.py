"""The engine process: choose, load, serve."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from treadle.config import EngineConfig
from treadle.config.engine_choice import has_vllm
from treadle.engines.models import resolve_model
from treadle.engines.port import Engine
from treadle.engines.surface.app import access_of, app_of
from treadle.errors import EngineError, require
from treadle.log import get_logger
from treadle.sync.weights_file import remove_shared_file
from treadle.wire.http_limits import HttpLimits
from treadle.wire.serving import serve_until_stopped, take_port

MAX_CONNECTIONS = 20_000  # a wave is generated when all of its requests are here, so they must all find room
log = get_logger("engine")


def run_engine(config: EngineConfig) -> None:
    access = access_of(config, os.environ)
    listener = take_port(config.host, config.port)  # before the slow part: a port in use is known at once
    try:
        started = time.monotonic()
        engine = start_engine(config, resolve_model(config.model))
        facts = engine.facts
        log.info(
            "loaded",
            engine=facts.kind,
            version=facts.version,
            model=str(facts.folder),
            device=facts.device,
            seconds=time.monotonic() - started,
        )
        log.info("listening", host=config.host, port=config.port)
        ending = _Ending(engine)
        app = app_of(engine, config, access, at_end=ending.finish)
        limits = HttpLimits(max_connections=MAX_CONNECTIONS)
        serve_until_stopped(app, listener, on_stop=ending.begin, limits=limits)
        if ending.failure is not None:
            raise EngineError(f"generation failed ({ending.failure})", fix="the traceback is above")
    finally:
        listener.close()
        if config.weights_file is not None:
            remove_shared_file(config.weights_file)


def start_engine(config: EngineConfig, folder: Path) -> Engine:
    """The engine that the settings name; `auto` takes vLLM where it is installed."""
    if has_vllm(config):
        from treadle.engines.vllm.start import start_vllm

        return start_vllm(config, folder)
    require("train", "torch", "transformers")
    from treadle.engines.transformers_server import TransformersServer

    return TransformersServer(config, folder, on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM))


class _Ending:
    """Closes an engine once, however often it is told to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self.failure: str | None = None

    def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._close())

    async def finish(self) -> None:
        self.begin()
        if self._task is not None:
            await self._task

    async def _close(self) -> None:
        self.failure = (await self._engine.state()).failure
        await self._engine.close()
