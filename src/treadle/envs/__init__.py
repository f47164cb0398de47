"""The environment process: asks the engine, scores the answers, delivers groups to the hub.

treadle env arithmetic serve        deliver every wave of a run
treadle env arithmetic evaluate     one evaluation of the policy as it is now
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.config.schema import EnvConfig, ServerConfig


def serve(env: EnvConfig, server: ServerConfig) -> None:
    """Deliver every wave of the run, evaluate before and after; ends by itself or on SIGTERM or SIGINT."""
    from treadle.envs.process import run_until_signal, serve_run

    run_until_signal(serve_run(env, server))


def evaluate(env: EnvConfig, server: ServerConfig) -> None:
    """Evaluate the engine's policy once and print the result in words."""
    from treadle.envs.process import evaluate_once, run_until_signal

    run_until_signal(evaluate_once(env, server))
