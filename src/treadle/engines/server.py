"""The engine process: load, share, listen."""

from __future__ import annotations

import signal
import time

import uvicorn

from treadle.config import EngineConfig
from treadle.engines.app import build_app
from treadle.engines.models import resolve_model
from treadle.engines.scheduler import Scheduler
from treadle.engines.transformers_engine import TransformersEngine
from treadle.log import get_logger
from treadle.sync.shared_memory import remove_shared_file
from treadle.wire.ports import take_port

log = get_logger("engine")


def run_engine(config: EngineConfig) -> None:
    listener = take_port(config.host, config.port)  # before the slow part: a port in use is known at once
    try:
        started = time.monotonic()
        engine = TransformersEngine(config, resolve_model(config.model))
        log.info("loaded", model=str(engine.folder), device=str(engine.device), seconds=time.monotonic() - started)
        scheduler = Scheduler(engine, config.max_num_seqs)
        app = build_app(engine, scheduler, pause_timeout_s=config.pause_timeout_s)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        # uvicorn raises a signal again after it has shut down; this handler lets us clean up and end with code 0
        signal.signal(signal.SIGTERM, lambda *_: None)
        uvicorn.Server(settings).run(sockets=[listener])
        scheduler.close()
    finally:
        listener.close()
        if config.weights_file is not None:
            remove_shared_file(config.weights_file)
