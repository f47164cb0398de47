"""Complete and check the settings of a run before its folder is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.config import DEFAULT_MODEL
from treadle.config.env import EnvConfig, folder_of, labels_of
from treadle.config.keys import value_of, with_values
from treadle.config.load import with_absolute_paths
from treadle.config.schema import RunConfig
from treadle.envs.base import prepare_task
from treadle.envs.catalogue import load_environment
from treadle.envs.serving.pace import choose_pace
from treadle.errors import ConfigError, Problems
from treadle.launch.plan import RunTokens
from treadle.net.tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, read_secret
from treadle.net.urls import shown_url
from treadle.store.file import real_path
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN_VARIABLE

LONGEST_LABEL = 80  # characters of a folder's name


def settle_environment(config: EnvConfig) -> EnvConfig:
    """Refuse an environment, task or data that does not exist; choose the pace, which the run keeps."""
    environment = load_environment(config)
    if environment.waits_for_agents:
        raise ConfigError(
            f"the environment '{config.own_name}' has no command, so nothing in this run would start its agents",
            fix="""--env.args '{"command": "python examples/agent.py"}'; for agents that are started """
            "elsewhere, start the processes one by one: treadle hub, treadle engine, treadle train, and "
            f"treadle env {config.own_name} serve",
        )
    prepare_task(environment)
    return environment.config.model_copy(update={"pace": choose_pace(environment.config, environment)})


def with_environments(config: RunConfig, environments: Sequence[EnvConfig]) -> RunConfig:
    """A copy with these environments, of which there are as many as before."""
    changed = {"envs": tuple(environments)} if config.envs else {"env": environments[0]}
    return config.model_copy(update=changed)


def settle_environments(config: RunConfig, problems: Problems) -> RunConfig:
    """Settle each environment, and add its error to `problems`. Several share batches, which is a stream's."""
    settled = list(config.environments)
    for place, env in enumerate(settled):
        with problems.collected():
            settled[place] = settle_environment(env.model_copy(update={"pace": "stream"}) if config.envs else env)
    return with_environments(config, settled)


def settle_paths(config: RunConfig) -> RunConfig:
    """Make the paths of files and folders absolute: a run can be resumed from another folder."""
    real_path(config.hub.database)  # refuses names such as :memory:
    config = with_absolute_paths(config)
    names = {key: value_of(config, key) for name in ("data", "eval_data") for key in config.keys_of_envs(name)}
    names |= {key: name for key in config.keys_of_envs("name") if ".py" in (name := value_of(config, key))}
    if "/" in config.engine.vllm_python:
        names["engine.vllm_python"] = config.engine.vllm_python
    if config.model != DEFAULT_MODEL:
        names["model"] = config.model
    rewards = {key: tuple(map(_absolute_reward, value_of(config, key))) for key in config.keys_of_envs("rewards")}
    return with_values(config, {key: _absolute(name) for key, name in names.items()} | rewards)


def _absolute_reward(reward: str | dict[str, Any]) -> str | dict[str, Any]:
    """With the absolute path of its file: "my.py:f", or {"type": "my.py:f"}."""
    if isinstance(reward, str):
        return _absolute(reward)
    return {**reward, "type": _absolute(reward["type"])} if isinstance(reward.get("type"), str) else reward


def _absolute(value: str) -> str:
    """The absolute path of a file or folder, also of "my_env.py:name"; any other name unchanged."""
    path, colon, name = value.partition(".py:")
    file = Path(path + ".py" if colon else value).expanduser()
    if not value or not file.exists():
        return value
    return str(file.absolute()) + (f":{name}" if colon else "")


def check_one_trainer(config: RunConfig) -> None:
    if config.train.world_size > 1:
        raise ConfigError(
            f"treadle run starts one trainer process, and train.world_size is {config.train.world_size}",
            fix="leave --train.world-size out; treadle plan --train-gpus N prints the commands that start several",
        )


def check_one_model(config: RunConfig, explicit: frozenset[str]) -> None:
    """A run trains the model that it samples from; the sections cannot name different ones."""
    named = {
        "engine.model": config.engine.model,
        "train.model": config.train.model,
        "openai.model_name": config.openai.model_name,
    }
    for key, model in named.items():
        if key in explicit and model != config.model:
            raise ConfigError(f"{key} is '{model}', but the run's model is '{config.model}'", fix=f"--model {model}")


def run_label(config: RunConfig) -> str:
    """ "arithmetic-addition", "gsm8k", "my_env", "gsm8k+my_env": the last part of a run folder's name."""
    if config.envs:
        joined = "+".join(map(folder_of, labels_of(config.envs)))
        return joined if len(joined) <= LONGEST_LABEL else f"{len(config.envs)}-environments"
    return "-".join(part for part in (config.env.own_name, config.env.task) if part).replace("/", "-")


def read_tokens(config: RunConfig) -> RunTokens:
    """The tokens of hub and engine, for the processes that call them. Files that do not exist yet are made here."""
    hub, engine, env = config.hub, config.engine, os.environ
    for kind, url in config.attached_urls.items():
        file = {"hub": hub.token_file, "engine": engine.token_file}[kind]
        if file is not None and not file.exists():
            raise ConfigError(
                f"there is no token file {file}, and the {kind} at {shown_url(url)} runs already",
                fix=f"name the file that it was started with: --{kind}.token-file FILE",
            )
    return RunTokens(
        hub=read_secret("hub", hub.token_file, "--hub.token-file", env, HUB_TOKEN_VARIABLE),
        hub_admin=read_secret("hub", hub.admin_token_file, "--hub.admin-token-file", env, HUB_ADMIN_TOKEN_VARIABLE),
        engine=read_secret("engine", engine.token_file, "--engine.token-file", env, ENGINE_TOKEN_VARIABLE),
    )
