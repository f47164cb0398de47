"""Run the engine process: choose an engine, load the model, serve HTTP, and watch the engine while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from pathlib import Path

from treadle.config import EngineConfig
from treadle.config.engine_choice import has_vllm
from treadle.engines.adapter_settings import base_of, read_adapter_settings
from treadle.engines.api.app import access_of, app_of
from treadle.engines.interface import Engine, EngineState
from treadle.engines.model_folder import is_adapter
from treadle.engines.models import resolve_model
from treadle.errors import EngineError, TreadleError, is_out_of_memory, require
from treadle.log import get_logger
from treadle.net.access import Access
from treadle.net.connections import HttpLimits
from treadle.net.listening import take_port
from treadle.net.server import serve_until_stopped
from treadle.sync.bridge_file import is_switched_on, place_to_write
from treadle.sync.weights_file import claimed
from treadle.watch.waits import Wait, Waits, Wanted
from treadle.watch.watchdog import About, Watchdog
from treadle.wire.hub import GENERATED_TOKENS, WorkReport

MAX_CONNECTIONS = 20_000  # a wave is generated when all of its requests are here, so they must all find room
LOOK_S = 2.0
RESTART_GRACE_S = 20.0
LONG_LOAD_S = 300.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files there are private to their owner
# A thread that reads or writes files waits this long for each turn beside a busy event loop. With Python's own 5 ms, an
# adapter of 120 tensors took seconds to look at.
THREADS_TURN_S = 0.0005
ADAPTER_VERSION = 1  # policy version of an adapter given by --model; 0: the model's own weights, where a run can begin
NO_ROOM_FIX = (
    "lower --max-num-seqs or --max-model-len, or stop what else uses the memory; `treadle plan` says what fits"
)
log = get_logger("engine")


class EngineEye:
    """`eye.see(await engine.state())`, every few seconds; the watchdog does the rest."""

    def __init__(self, waits: Waits, patience_s: float) -> None:
        self._waits = waits
        self._patience_s = patience_s
        self._state: EngineState | None = None
        self._loading: WorkReport | None = None  # how far it has come, where that is known
        self._hold: Wait | None = None
        self._generation: Wait | None = None

    def loads(self, what: str, done: int, total: int) -> None:
        """Called before the first state."""
        self._loading = WorkReport(what=what, done=done, total=total)

    def see(self, state: EngineState) -> None:
        before, self._state = self._state, state
        requests = f"{state.num_running} requests that run and {state.num_waiting} that wait"
        self._hold = self._follow(
            self._hold,
            Wanted(
                f"the trainer to let it go: it is held to change version {state.policy_version}",
                of="trainer",
                holding=requests,
                deadline_s=self._patience_s,
                fix="the trainer's log says what it does",
            )
            if state.is_held
            else None,
        )
        moved = before is not None and before.num_moves != state.num_moves
        if moved and self._generation is not None:
            self._waits.end(self._generation, was_met=True)
            self._generation = None
        generates = state.num_running > 0 and not state.is_held
        answer = Wanted(
            "the model to get on with a completion", of="engine", holding=requests, deadline_s=self._patience_s
        )
        self._generation = self._follow(self._generation, answer if generates else None)

    def about(self) -> About:
        state = self._state
        if state is None:
            return About(state="loading", work=self._loading)
        if state.is_held:
            told = "held"
        elif state.num_running:
            told = f"generating {state.num_running}, {state.num_waiting} waiting"
        else:
            told = "idle"
        counts = {"moves": float(state.num_moves), GENERATED_TOKENS: float(state.generated_tokens)}
        return About(state=told, policy_version=state.policy_version, problem=state.failure or "", counts=counts)

    def _follow(self, wait: Wait | None, wanted: Wanted | None) -> Wait | None:
        """Begin a wait when there is something to wait for, end it when there is not; one that lasts stays as it is."""
        if wanted is None and wait is not None:
            self._waits.end(wait, was_met=True)
            return None
        return self._waits.begin(wanted) if wanted is not None and wait is None else wait


def run_engine(config: EngineConfig) -> None:
    sys.setswitchinterval(THREADS_TURN_S)
    config = share_if_switched_on(config, os.environ)
    access = access_of(config, os.environ)
    listener = take_port(config.host, config.port)  # before the slow part: a port in use is known at once
    waits = Waits()
    eye = EngineEye(waits, config.patience_s)
    with (
        closing(listener),
        contextlib.nullcontext() if config.weights_file is None else claimed(config.weights_file),
        Watchdog("engine", "engine", waits, config.hub_url, eye.about) as watchdog,
    ):
        _serve(config, access, listener, waits, eye, watchdog)


def _serve(
    config: EngineConfig, access: Access, listener: socket.socket, waits: Waits, eye: EngineEye, watchdog: Watchdog
) -> None:
    started = time.monotonic()
    config, adapter = base_and_adapter(config)
    with waits.waiting(Wanted(f"{config.model} to load", of="engine", deadline_s=LONG_LOAD_S)):
        engine = start_engine(config, resolve_model(config.model), eye.loads)
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
    life = EngineLife(engine, eye, watchdog, adapter)
    file = config.weights_file
    bridge_file = None if file is None else bridge_file_path(file, os.environ, Path.cwd())
    app = app_of(engine, config, access, life=life, bridge_file=bridge_file)
    limits = HttpLimits(max_connections=MAX_CONNECTIONS)
    serve_until_stopped(app, listener, on_stop=life.end, limits=limits)
    if life.refusal is not None:
        raise life.refusal
    if life.failure is not None:
        fix = NO_ROOM_FIX if is_out_of_memory(life.failure) else "the traceback is above"
        raise EngineError(f"generation failed ({life.failure})", fix=fix)


def share_if_switched_on(config: EngineConfig, env: Mapping[str, str]) -> EngineConfig:
    """VLLM_ENABLE_SHARED_WEIGHTS=1 is --weights-file with a file of its own, in memory where it has files."""
    if config.weights_file is not None or not is_switched_on(env):
        return config
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return config.model_copy(update={"weights_file": folder / f"treadle-engine-{os.getpid()}.weights"})


def base_and_adapter(config: EngineConfig) -> tuple[EngineConfig, Path | None]:
    """The settings of the model to load, and the adapter to serve it with where --model names an adapter's folder."""
    folder = Path(os.path.expanduser(config.model))
    if not is_adapter(folder):
        return config, None
    settings = read_adapter_settings(folder)
    served = {
        "model": base_of(folder, settings),
        "served_model_name": config.served_model_name or config.model,
        "enable_lora": True,
        "max_lora_rank": max(config.max_lora_rank, settings.rank),
    }
    return config.model_copy(update=served), folder.resolve()


def start_engine(config: EngineConfig, folder: Path, tell: Callable[[str, int, int], None]) -> Engine:
    """The engine that the settings name; `auto` takes vLLM where it is installed.

    `tell` hears how far it has come, where that is known: what it does, how many are done, of how many.
    """
    if has_vllm(config):
        from treadle.engines.vllm.start import start_vllm

        return start_vllm(config, folder, tell)
    require("train", "torch", "transformers")
    from treadle.engines.transformers_engine import TransformersServer
    from treadle.sync.loading import telling_of_weights

    with report_loading(tell):
        return TransformersServer(config, folder, on_failure=_end_process)


def _end_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class EngineLife:
    """From the first request to the last: watches the engine, and closes it once, however often it is told to.

    An engine that stays dead ends the process. Whoever started it sees that at once; a surface that goes on answering
    503 is noticed by nobody. The time until then is for POST /bridge/restart.
    """

    def __init__(
        self,
        engine: Engine,
        eye: EngineEye,
        watchdog: Watchdog,
        adapter: Path | None = None,
        *,
        grace_s: float = RESTART_GRACE_S,
        on_death: Callable[[], None] = _end_process,
    ) -> None:
        self._engine = engine
        self._eye = eye
        self._watchdog = watchdog
        self._adapter = adapter  # to serve with from the first request on
        self._grace_s = grace_s
        self._on_death = on_death
        self._closing: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.refusal: TreadleError | None = None  # of the adapter

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        self._watchdog.watch_loop(asyncio.get_running_loop())
        watching = asyncio.ensure_future(self._watch())
        try:
            if self._adapter is not None:
                await self._engine.load_adapter(self._adapter.name, self._adapter, ADAPTER_VERSION)
            yield
        except TreadleError as error:
            self.refusal = error
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
            await asyncio.sleep(LOOK_S)
            state = await self._engine.state()
            self._eye.see(state)
            failed_since = (failed_since or time.monotonic()) if state.failure is not None else None
        self._on_death()

    async def _close(self) -> None:
        self.failure = (await self._engine.state()).failure
        await self._engine.close()
