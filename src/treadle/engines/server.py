"""Run the engine process: choose an engine, load the model, serve HTTP, and watch the engine while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path

from treadle.config import EngineConfig
from treadle.config.schema import has_vllm
from treadle.engines.api import create_app, engine_access
from treadle.engines.interface import InferenceEngine, ServingStatus
from treadle.engines.joining import served_engine, with_settings_of_run
from treadle.engines.model_folder import base_model_name, is_adapter, read_adapter_settings
from treadle.engines.models import resolve_model
from treadle.errors import EngineError, TreadleError, is_out_of_memory, require
from treadle.log import get_logger
from treadle.net.access import Access
from treadle.net.address import take_port
from treadle.net.connections import HttpLimits
from treadle.net.server import serve_until_stopped
from treadle.sync.shared_memory import bridge_file_path, claimed, is_switched_on
from treadle.watch.waits import Wait, Waits, WaitSpec
from treadle.watch.watchdog import ProcessFacts, Watchdog
from treadle.wire.engines import ServedEngine
from treadle.wire.hub import GENERATED_TOKENS, WorkReport

MAX_CONNECTIONS = 20_000  # a wave starts when all of its requests have arrived, so all must get a connection
POLL_S = 2.0
RESTART_GRACE_S = 20.0
MAX_LOAD_S = 300.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files there are private to their owner
# GIL switch interval: how long a thread waits each time for a busy event loop. With Python's default of 5 ms, reading
# an adapter of 120 tensors took seconds.
SWITCH_INTERVAL_S = 0.0005
NO_PROGRESS_S = 900.0  # running requests without a token, or a hold, that the watchdog reports
ADAPTER_VERSION = 1  # policy version of an adapter given by --model; 0, where a run begins, is the base model
OUT_OF_MEMORY_FIX = (
    "lower --max-num-seqs or --max-model-len, or stop what else uses the memory; `treadle plan` says what fits"
)
log = get_logger("engine")


class EngineWatcher:
    """Turns a regularly polled ServingStatus into waits that the watchdog reports: a stalled or a held engine."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._state: ServingStatus | None = None
        self.serves: ServedEngine | None = None  # set when it has loaded, of an engine that joins a run
        self._loading: WorkReport | None = None  # progress of loading, if known
        self._hold: Wait | None = None
        self._generation: Wait | None = None

    def on_load_progress(self, what: str, done: int, total: int) -> None:
        """Report progress of loading, before the first `update`."""
        self._loading = WorkReport(what=what, done=done, total=total)

    def update(self, state: ServingStatus) -> None:
        before, self._state = self._state, state
        requests = f"{state.num_running} running and {state.num_waiting} waiting requests"
        self._hold = self._track(
            self._hold,
            WaitSpec(
                f"the trainer to release it: it is held to replace version {state.policy_version}",
                of="trainer",
                holding=requests,
                deadline_s=NO_PROGRESS_S,
                fix="the trainer's log says what it does",
            )
            if state.is_held
            else None,
        )
        moved = before is not None and before.progress_count != state.progress_count
        if moved and self._generation is not None:
            self._waits.end(self._generation, was_met=True)
            self._generation = None
        generates = state.num_running + state.num_waiting > 0 and not state.is_held
        answer = WaitSpec(
            "the model to get on with a completion", of="engine", holding=requests, deadline_s=NO_PROGRESS_S
        )
        self._generation = self._track(self._generation, answer if generates else None)

    def about(self) -> ProcessFacts:
        state = self._state
        if state is None:
            return ProcessFacts(state="loading", work=self._loading)
        if state.is_held:
            description = "held"
        elif state.num_running or state.num_waiting:
            description = f"generating {state.num_running}, {state.num_waiting} waiting"
        else:
            description = "idle"
        counts = {"moves": float(state.progress_count), GENERATED_TOKENS: float(state.generated_tokens)}
        return ProcessFacts(
            state=description,
            policy_version=state.policy_version,
            problem=state.failure or "",
            counts=counts,
            serves=None if state.failure else self.serves,
        )

    def _track(self, wait: Wait | None, wanted: WaitSpec | None) -> Wait | None:
        """Begin a wait when something is wanted, end it when nothing is; a wait that continues is kept."""
        if wanted is None and wait is not None:
            self._waits.end(wait, was_met=True)
            return None
        return self._waits.begin(wanted) if wanted is not None and wait is None else wait


def run_engine(config: EngineConfig) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = apply_shared_weights_switch(with_settings_of_run(config), os.environ)
    access = engine_access(config, os.environ)
    listener = take_port(config.host, config.port)  # before loading: a port in use is reported at once
    waits = Waits()
    watcher = EngineWatcher(waits)
    with (
        closing(listener),
        contextlib.nullcontext() if config.weights_file is None else claimed(config.weights_file),
        Watchdog("engine", config.name, waits, config.hub_url, watcher.about) as watchdog,
    ):
        _serve(config, access, listener, waits, watcher, watchdog)


def _serve(
    config: EngineConfig,
    access: Access,
    listener: socket.socket,
    waits: Waits,
    watcher: EngineWatcher,
    watchdog: Watchdog,
) -> None:
    started = time.monotonic()
    config, adapter = split_adapter(config)
    with waits.waiting(WaitSpec(f"{config.model} to load", of="engine", deadline_s=MAX_LOAD_S)):
        engine = start_engine(config, resolve_model(config.model), watcher.on_load_progress)
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
    lifespan = EngineLifespan(engine, watcher, watchdog, adapter)
    file = config.weights_file
    bridge_file = None if file is None else bridge_file_path(file, os.environ, Path.cwd())
    engine_id = secrets.token_hex(8)
    app = create_app(engine, config, access, lifespan=lifespan, bridge_file=bridge_file, engine_id=engine_id)
    if config.join:
        watcher.serves = served_engine(engine_id, config, facts)
    limits = HttpLimits(max_connections=MAX_CONNECTIONS)
    serve_until_stopped(app, listener, on_stop=lifespan.end, limits=limits)
    if lifespan.adapter_error is not None:
        raise lifespan.adapter_error
    if lifespan.failure is not None:
        fix = OUT_OF_MEMORY_FIX if is_out_of_memory(lifespan.failure) else "the traceback is above"
        raise EngineError(f"generation failed ({lifespan.failure})", fix=fix)


def apply_shared_weights_switch(config: EngineConfig, env: Mapping[str, str]) -> EngineConfig:
    """VLLM_ENABLE_SHARED_WEIGHTS=1 means --weights-file with a generated path, in /dev/shm if it exists."""
    if config.weights_file is not None or not is_switched_on(env):
        return config
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return config.model_copy(update={"weights_file": folder / f"treadle-engine-{os.getpid()}.weights"})


def split_adapter(config: EngineConfig) -> tuple[EngineConfig, Path | None]:
    """If --model is an adapter's folder: settings with its base model, and the adapter; else the settings and None."""
    folder = Path(os.path.expanduser(config.model))
    if not is_adapter(folder):
        return config, None
    settings = read_adapter_settings(folder)
    served = {
        "model": base_model_name(folder, settings),
        "served_model_name": config.served_model_name or config.model,
        "enable_lora": True,
        "max_lora_rank": max(config.max_lora_rank, settings.rank),
    }
    return config.model_copy(update=served), folder.resolve()


def start_engine(config: EngineConfig, folder: Path, on_progress: Callable[[str, int, int], None]) -> InferenceEngine:
    """Start the configured engine; `auto` is vLLM if it is installed.

    `on_progress(what, done, total)` reports progress of loading, where it is known.
    """
    if has_vllm(config):
        from treadle.engines.vllm import start_vllm

        return start_vllm(config, folder, on_progress)
    require("train", "torch", "transformers")
    from treadle.engines.transformers_engine import TransformersEngine
    from treadle.loading import report_loading

    with report_loading(on_progress):
        return TransformersEngine(config, folder, on_failure=_terminate_self)


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class EngineLifespan:
    """ASGI lifespan: polls the engine while the application serves, and closes it once.

    If the engine has failed and does not recover within `grace_s`, the process ends: its parent notices that at once,
    while an API that answers 503 may go unnoticed. The grace period is for POST /bridge/restart.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        watcher: EngineWatcher,
        watchdog: Watchdog,
        adapter: Path | None = None,
        *,
        grace_s: float = RESTART_GRACE_S,
        on_death: Callable[[], None] = _terminate_self,
    ) -> None:
        self._engine = engine
        self._watcher = watcher
        self._watchdog = watchdog
        self._adapter = adapter  # loaded before the first request
        self._grace_s = grace_s
        self._on_death = on_death
        self._closing: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.adapter_error: TreadleError | None = None

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        self._watchdog.watch_loop(asyncio.get_running_loop())
        watching = asyncio.ensure_future(self._watch())
        try:
            if self._adapter is not None:
                await self._engine.load_adapter(self._adapter.name, self._adapter, ADAPTER_VERSION)
            yield
        except TreadleError as error:
            self.adapter_error = error
            raise
        finally:
            watching.cancel()
            self.end()
            if self._closing is not None:
                await self._closing

    def end(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _watch(self) -> None:
        failed_since: float | None = None
        while failed_since is None or time.monotonic() - failed_since < self._grace_s:
            await asyncio.sleep(POLL_S)
            state = await self._engine.status()
            self._watcher.update(state)
            failed_since = (failed_since or time.monotonic()) if state.failure is not None else None
        self._on_death()

    async def _close(self) -> None:
        self.failure = (await self._engine.status()).failure
        await self._engine.close()
