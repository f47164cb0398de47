"""Start an environment process from its configuration, and end it on a signal."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import uvloop

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, load_environment, prepare_task
from treadle.envs.chat_format import ChatTokenizer, resolve_tokenizer_folder
from treadle.envs.engine_pool import InferenceClient, open_engine
from treadle.envs.evaluation import eval_temperature, evaluate_policy, format_result, save_for_atropos, save_result
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import EnvContext, show_progress
from treadle.envs.scoring import ScoreRules, reward_pool
from treadle.envs.serving.monitor import EnvMonitor
from treadle.envs.serving.runner import run
from treadle.errors import ConfigError, ProcessDied
from treadle.log import get_logger
from treadle.net.client import RetryPolicy
from treadle.watch.watchdog import Watchdog

log = get_logger("env")

_STOP_WITHIN_S = 1.5


async def serve_run(env: EnvConfig, server: ServerConfig) -> None:
    """`treadle env NAME serve`."""
    if env.processes > 1:
        raise ConfigError(
            f"env.processes is {env.processes}, for treadle run; this command is one process",
            fix=f"start each with its part of the items and a name: --env.processes 1 --env.items 1/{env.processes} "
            "--env.wandb-name NAME-1",
        )
    environment = await prepare_environment(env)
    monitor = EnvMonitor(env.name)
    watchdog = Watchdog(
        "env",
        f"env {env.wandb_name or env.own_name}",
        monitor.waits,
        env.hub_url,
        describe=lambda: monitor.report().as_about(),
        loop=asyncio.get_running_loop(),
    )
    hub = HubClient(env.hub_url, waits=monitor.waits)

    engine_or_pool = open_engine(
        server,
        oldest_allowed=lambda _: hub.oldest_version(environment.config.max_age),
        waits=monitor.waits,
        hub_url=env.hub_url,
    )
    async with hub, engine_or_pool as engine:
        with watchdog:
            tokenizer = await load_tokenizer(engine, server)
            async with open_context(environment, engine, tokenizer) as context:
                await run(context, hub, monitor)


async def evaluate_once(env: EnvConfig, server: ServerConfig) -> None:
    """`treadle env NAME evaluate`; needs an engine and no hub."""
    environment = await prepare_environment(env)
    config = environment.config
    if config.num_eval == 0:
        raise ConfigError("there is nothing to evaluate: num_eval is 0", fix="pass --env.num-eval 256")
    eval_temperature(config)  # raises for an invalid one before the engine is used
    # A person waits for this command, so give up early if no engine runs.
    async with open_engine(server, retry_policy=RetryPolicy(give_up_after_s=5.0), hub_url=env.hub_url) as engine:
        health = await engine.health()
        tokenizer = await load_tokenizer(engine, server)
        async with open_context(environment, engine, tokenizer) as context:
            num_prompts = min(config.num_eval, len(environment.eval_items()))
            if num_prompts == 0:
                raise ConfigError(f"the environment '{config.name}' has no held-out prompts", fix="give it eval_items")
            with show_progress("prompts", num_prompts) as report_progress:
                # A unique wave name: a run may be evaluating on the same engine.
                prefix = f"{context.name}-eval-{secrets.token_hex(4)}"
                result = await evaluate_policy(
                    context, health.policy_version, wave_prefix=prefix, report_progress=report_progress
                )
    print(format_result(result))
    if config.data_dir_to_save_evals is not None:
        print(f"written to {save_result(result, config.data_dir_to_save_evals)}")
        save_for_atropos(result, config.data_dir_to_save_evals, model_name=health.model)


async def prepare_environment(config: EnvConfig) -> Environment:
    """Load the task and its data, before an engine is needed, so that errors are reported early."""
    environment = load_environment(config)
    # In a thread, because it may download: the process must hear a signal meanwhile.
    await asyncio.to_thread(prepare_task, environment)
    return environment


@asynccontextmanager
async def open_context(
    environment: Environment, engine: InferenceClient, tokenizer: ChatTokenizer
) -> AsyncIterator[EnvContext]:
    """Open the environment and its reward workers."""
    async with reward_pool(environment.config) as pool:
        await environment.open()
        try:
            yield EnvContext(environment, engine, tokenizer, ScoreRules(environment, pool))
        finally:
            await environment.close()


def run_until_signal(work: Coroutine[None, None, int | None]) -> int:
    """Run `work` and return its exit code; SIGTERM and SIGINT cancel it, with exit code 0."""
    # asyncio waits for its threads at the end; a download that hangs must not delay the stop.
    last_resort = threading.Timer(_STOP_WITHIN_S, os._exit, (0,))
    last_resort.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_cancel_on_signal(work, last_resort)) or 0
    except asyncio.CancelledError:
        if not last_resort.is_alive() and not last_resort.finished.is_set():
            raise ProcessDied("the environment was cancelled from within", fix="its log says more") from None
        return 0
    finally:
        last_resort.cancel()


async def _cancel_on_signal(work: Coroutine[None, None, int | None], last_resort: threading.Timer) -> int | None:
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
        return await task
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def load_tokenizer(engine: InferenceClient, server: ServerConfig) -> ChatTokenizer:
    engine_model = (await engine.health()).model
    # In a thread, because it may download: the process must hear a signal meanwhile.
    folder = await asyncio.to_thread(resolve_tokenizer_folder, server.model, engine_model)
    log.info("tokenizer", folder=str(folder))
    if "model" in server.model_fields_set:
        served = await engine.served_models()
        if not any(model.is_called(server.model) for model in served):
            # Another model is used anyway: it is the trained one.
            log.warning(
                "another_model_is_served",
                asked=server.model,
                engine_serves=", ".join(model.id for model in served) or "nothing",
                tokenizer=str(folder),
                fix=f"leave out --openai.model, or let the engine serve it: treadle engine --model {server.model}",
            )
    return ChatTokenizer.load(folder)
