"""The engine process: load, share, serve."""

from __future__ import annotations

import os
import signal
import time

from treadle.config import EngineConfig
from treadle.engines.app import build_app
from treadle.engines.models import resolve_model
from treadle.engines.scheduler import Scheduler
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.sync.weights_file import remove_shared_file
from treadle.wire.http_limits import HttpLimits
from treadle.wire.serving import serve_until_stopped, take_port

MAX_CONNECTIONS = 20_000  # a wave is generated when all of its requests are here, so they must all find room
log = get_logger("engine")


def run_engine(config: EngineConfig) -> None:
    listener = take_port(config.host, config.port)  # before the slow part: a port in use is known at once
    try:
        started = time.monotonic()
        engine = TransformersEngine(config, resolve_model(config.model))
        log.info("loaded", model=str(engine.folder), device=str(engine.device), seconds=time.monotonic() - started)
        log.info("listening", host=config.host, port=config.port)
        scheduler = Scheduler(engine, config.max_num_seqs, on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM))
        app = build_app(engine, scheduler, pause_timeout_s=config.pause_timeout_s)
        limits = HttpLimits(max_connections=MAX_CONNECTIONS)
        serve_until_stopped(app, listener, on_stop=scheduler.stop, limits=limits)
        scheduler.join()
        if scheduler.failure is not None:
            raise EngineError(f"generation failed ({scheduler.failure})", fix="the traceback is above")
    finally:
        listener.close()
        if config.weights_file is not None:
            remove_shared_file(config.weights_file)
