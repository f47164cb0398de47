"""The environment process: samples from the engine, scores the answers, delivers groups to the hub.

treadle env arithmetic serve        deliver groups until the trainer has taken its last step
treadle env arithmetic process      write groups to a file, with an HTML page; needs no hub
treadle env arithmetic evaluate     evaluate the current policy once
treadle env arithmetic validate     check the task itself; needs no model

To write an environment of your own:

    from treadle.envs import Environment, Item, environment
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from treadle.config.env import EnvConfig, ServerConfig
    from treadle.envs.base import Environment, Item, Message, Score, environment
    from treadle.envs.chat import Chat, Model, Reply
    from treadle.envs.data import DataEnvironment
    from treadle.envs.rows import Row, RowError

Action = Literal["serve", "process", "evaluate", "validate"]

# For authors of environments. Imported lazily: reward workers do not need them.
_FOR_AUTHORS = {
    **dict.fromkeys(("Environment", "Item", "Message", "Score", "environment"), "treadle.envs.base"),
    **dict.fromkeys(("Chat", "Model", "Reply"), "treadle.envs.chat"),
    "DataEnvironment": "treadle.envs.data",
    **dict.fromkeys(("Row", "RowError"), "treadle.envs.rows"),
}

__all__ = [
    "Chat",
    "DataEnvironment",
    "Environment",
    "Item",
    "Message",
    "Model",
    "Reply",
    "Row",
    "RowError",
    "Score",
    "environment",
    "run_action",
]


def __getattr__(name: str) -> Any:
    if name in _FOR_AUTHORS:
        return getattr(importlib.import_module(_FOR_AUTHORS[name]), name)
    raise AttributeError(f"module 'treadle.envs' has no attribute '{name}'")


def run_action(action: Action, env: EnvConfig, server: ServerConfig, *, verbose: bool = False) -> int:
    """Run `treadle env NAME ACTION` and return the exit code. SIGTERM and SIGINT end it."""
    from treadle.envs import main

    if action == "validate":
        from treadle.envs.validation import validate_task

        return main.run_until_signal(validate_task(env, verbose=verbose))
    if action == "process":
        from treadle.envs.group_writer import write_groups

        return main.run_until_signal(write_groups(env, server))
    if action == "evaluate":
        return main.run_until_signal(main.evaluate_once(env, server))
    return main.run_until_signal(main.serve_run(env, server))
