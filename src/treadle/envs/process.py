"""From configuration to a running environment process, and its end by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Coroutine

from treadle.config.schema import EnvConfig, ServerConfig
from treadle.envs.base import load_environment
from treadle.envs.engine_client import EngineClient
from treadle.envs.evaluation import evaluate_policy, in_words, save_result
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk
from treadle.envs.runner import run
from treadle.envs.tokens import ChatTokenizer, resolve_tokenizer_folder
from treadle.envs.transport import Patience
from treadle.errors import ConfigError
from treadle.log import get_logger

log = get_logger("env")

_STOP_WITHIN_S = 1.5


async def serve_run(env: EnvConfig, server: ServerConfig) -> None:
    """The whole life of `treadle env NAME serve`."""
    environment = load_environment(env)  # first: a misspelt task must not wait for an engine to be told
    async with EngineClient(server) as engine, HubClient(env.rollout_server_url) as hub:
        tokenizer = await _load_tokenizer(engine, server.model_name)
        await run(Desk(env, environment, engine, tokenizer), hub)


async def evaluate_once(env: EnvConfig, server: ServerConfig) -> None:
    """The whole life of `treadle env NAME evaluate`; needs an engine and no hub."""
    if env.num_eval == 0:
        raise ConfigError("there is nothing to evaluate: num_eval is 0", fix="pass --env.num-eval 256")
    environment = load_environment(env)
    # A person waits for this one, so an engine that does not run is told soon.
    async with EngineClient(server, patience=Patience(give_up_after_s=5.0)) as engine:
        version = (await engine.health()).policy_version
        desk = Desk(env, environment, engine, await _load_tokenizer(engine, server.model_name))
        # A wave name of its own: a run may be evaluating on the same engine at this moment.
        result = await evaluate_policy(desk, version, wave_prefix=f"{desk.name}-eval-{secrets.token_hex(4)}")
    print(in_words(result))
    if env.data_dir_to_save_evals is not None:
        print(f"written to {save_result(result, env.data_dir_to_save_evals)}")


def run_until_signal(work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end; SIGTERM and SIGINT cancel it, and that is a good end too."""
    # asyncio waits for its threads before it ends; a download that hangs must not hold up who stops us.
    last_resort = threading.Timer(_STOP_WITHIN_S, os._exit, (0,))
    last_resort.daemon = True
    try:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_cancel_on_signal(work, last_resort))
    finally:
        last_resort.cancel()


async def _cancel_on_signal(work: Coroutine[None, None, None], last_resort: threading.Timer) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def stop(name: str) -> None:
        log.info("stopping", reason=name)
        if not last_resort.is_alive() and not last_resort.finished.is_set():
            last_resort.start()
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await task
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _load_tokenizer(engine: EngineClient, model_name: str) -> ChatTokenizer:
    engine_model = (await engine.health()).model
    # In a thread, because it may download: the process must hear a signal meanwhile.
    folder = await asyncio.to_thread(resolve_tokenizer_folder, model_name, engine_model)
    log.info("tokenizer", folder=str(folder))
    return ChatTokenizer.load(folder)
