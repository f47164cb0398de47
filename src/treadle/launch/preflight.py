"""Complete and check the settings of a run before its folder is made and its first process starts.

Checks are independent where possible: all problems are reported at once, each with its fix. What needs a download or a
running server (model files, an attached hub or engine) is checked afterwards, in job.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from treadle.config import DEFAULT_MODEL
from treadle.config.env import EnvConfig, folder_of, labels_of, parse_sources
from treadle.config.load import with_absolute_paths
from treadle.config.schema import RunConfig, has_vllm, may_use_gpu, requires_vllm
from treadle.config.values import choose_steps, value_of, with_fitting_groups, with_values
from treadle.engines.model_folder import check_model_folder
from treadle.engines.vllm.command import find_vllm
from treadle.envs.base import load_environment, prepare_task
from treadle.envs.serving.assignment import choose_pace
from treadle.errors import ConfigError, ModelError, Problems, require
from treadle.launch.attachment import merge_addresses
from treadle.launch.folder import check_disk_space, is_run, result_of
from treadle.launch.machine import Listeners, MachineFacts, held_ports, of_this_machine
from treadle.launch.process_plan import server_addresses
from treadle.launch.process_spec import AccessTokens
from treadle.launch.ranks import choose_layout
from treadle.net.access_tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, read_secret
from treadle.net.address import shown_url
from treadle.store.choice import check_store
from treadle.store.file import real_path
from treadle.sync.model_folders import find_model
from treadle.train.requirements import check_trainer
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN_VARIABLE

LONGEST_LABEL = 80  # characters of a folder's name
Say = Callable[[str], None]


@contextmanager
def checked_start(
    config: RunConfig, explicit: frozenset[str], say: Say, facts: MachineFacts
) -> Iterator[tuple[RunConfig, Listeners]]:
    """The completed settings of a new run, and its ports, which are reserved until the block ends."""
    problems = Problems()
    with problems.collected():
        config.check_mix()
    config = settle_environments(config, problems)
    has_environment = problems.is_empty
    with problems.collected():
        config = merge_addresses(config, explicit)
    placed = config
    with problems.collected():  # before a model is downloaded; its shape decides only what nobody chose
        layout = choose_layout(config, facts, explicit)
        placed = with_values(config, layout.settings)
    if has_environment:  # else the defaults of the environment are unknown
        with problems.collected():
            config = with_fitting_groups(config, explicit)
            with_fitting_groups(placed, explicit).check_together()
    with problems.collected():
        check_one_model(config, explicit)
    with problems.collected():
        choose_steps(config, explicit)
    with problems.collected():
        config = resolve_paths(config)
    with problems.collected():
        _check_servers(config)
    with problems.collected():
        check_trainer(config.train, os.environ, _local_model(config, problems))
    with problems.collected():
        if config.hub.store and not config.hub_url:
            check_store(config.hub)
    with problems.collected():
        warning = check_disk_space(config.output)
        if warning:
            say(f"warning: {warning}")
    with ExitStack() as held:
        listeners: Listeners = {}
        with problems.collected():  # before a model is downloaded
            listeners = held.enter_context(held_ports(of_this_machine(server_addresses(config)), explicit))
        problems.raise_all()
        yield config, listeners


def checked_resume(config: RunConfig) -> RunConfig:
    """The settings of a resumed run, with the defaults of its environment."""
    problems = Problems()
    environments = list(config.environments)
    for place, env in enumerate(environments):
        with problems.collected():
            environment = load_environment(env)
            prepare_task(environment)
            environments[place] = environment.config
    config = with_environments(config, environments)
    with problems.collected():
        _check_servers(config)
    with problems.collected():
        if not config.hub_url:
            check_store(config.hub)
    with problems.collected():
        prepared = Path(config.engine.model)
        check_trainer(config.train, os.environ, prepared if prepared.is_dir() else None)
    problems.raise_all()
    return config


def _local_model(config: RunConfig, problems: Problems) -> Path | None:
    """The folder of the model, if it is on this machine already and usable."""
    folder = None
    if (
        not config.engine_url and config.model != DEFAULT_MODEL
    ):  # an attached engine decides; the built-in one is made on the first run
        with problems.collected():
            found = find_model(config.model)
            if found is not None and found == Path(config.model).expanduser():  # one in the cache may be incomplete
                check_model_folder(found)
            folder = found
    return folder


def _check_servers(config: RunConfig) -> None:
    """Refuse a missing vLLM or router if the user chose it."""
    if config.has_router:
        require("fleet", "smg")
    if requires_vllm(config.engine) and not config.engine_url:
        find_vllm(config.engine.vllm_python)


def resolve_environment(config: EnvConfig) -> EnvConfig:
    """Refuse an environment, task or data that does not exist; choose the pace of the run."""
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
    """A copy with these environments; their number does not change."""
    changed = {"envs": tuple(environments)} if config.envs else {"env": environments[0]}
    return config.model_copy(update=changed)


def settle_environments(config: RunConfig, problems: Problems) -> RunConfig:
    """Settle each environment; errors are added to `problems`.

    Several environments share batches, so they stream. So does one on a GPU that samples ahead: with waves a version is
    published only when nothing older is in flight, and the engine runs half as many sequences.
    """
    samples_ahead = config.max_age != 0 and has_vllm(config.engine) and may_use_gpu(config.engine.device)
    settled = list(config.environments)
    for place, env in enumerate(settled):
        streams = config.envs or (samples_ahead and env.pace == "auto" and env.max_age > 0)
        with problems.collected():
            settled[place] = resolve_environment(env.model_copy(update={"pace": "stream"}) if streams else env)
    return with_environments(config, settled)


def resolve_paths(config: RunConfig) -> RunConfig:
    """Make the paths of files and folders absolute: a run can be resumed from another folder."""
    real_path(config.hub.database)  # refuses names such as :memory:
    config = with_absolute_paths(config)
    data = {key: value_of(config, key) for name in ("data", "eval_data") for key in config.keys_of_envs(name)}
    names = {key: name for key in config.keys_of_envs("name") if ".py" in (name := value_of(config, key))}
    if "/" in config.engine.vllm_python:
        names["engine.vllm_python"] = config.engine.vllm_python
    if config.model != DEFAULT_MODEL:
        names["model"] = model_of(config.model)
    rewards = {key: tuple(map(_absolute_reward, value_of(config, key))) for key in config.keys_of_envs("rewards")}
    found = {key: absolute(name) for key, name in names.items()} | {
        key: _absolute_data(one) for key, one in data.items()
    }
    return with_values(config, found | rewards)


def model_of(name: str) -> str:
    """The folder of the trained model if `name` is the folder of a run, else `name`."""
    folder = Path(name).expanduser()
    return str(result_of(folder)) if is_run(folder) else name


def _absolute_reward(reward: str | dict[str, Any]) -> str | dict[str, Any]:
    """With the absolute path of its file: "my.py:f", or {"type": "my.py:f"}."""
    if isinstance(reward, str):
        return absolute(reward)
    return {**reward, "type": absolute(reward["type"])} if isinstance(reward.get("type"), str) else reward


def _absolute_data(value: str) -> str:
    """With the absolute paths of all sources: "/data/a.jsonl:3,openai/gsm8k:main:1"."""
    sources = parse_sources(value)
    if len(sources) == 1:
        return absolute(value)
    return ",".join(f"{absolute(source.name)}:{source.weight}" for source in sources)


def absolute(value: str) -> str:
    """The absolute path of a file or folder, also of "my_env.py:name"; any other name unchanged."""
    path, colon, name = value.partition(".py:")
    file = Path(path + ".py" if colon else value).expanduser()
    if not value or not file.exists():
        return value
    return str(file.absolute()) + (f":{name}" if colon else "")


def check_one_model(config: RunConfig, explicit: frozenset[str]) -> None:
    """All sections must name the same model: a run trains the model that it samples from."""
    named = {
        "engine.model": config.engine.model,
        "train.model": config.train.model,
        "openai.model": config.openai.model,
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


def read_tokens(config: RunConfig) -> AccessTokens:
    """The tokens of hub and engine for the processes that call them. Missing token files are created."""
    hub, engine, env = config.hub, config.engine, os.environ
    for kind, urls in config.attached_urls.items():
        file = {"hub": hub.token_file, "engine": engine.token_file}[kind]
        if file is not None and not file.exists():
            raise ConfigError(
                f"there is no token file {file}, and the {kind} at {' '.join(map(shown_url, urls))} runs already",
                fix=f"name the file that it was started with: --{kind}.token-file FILE",
            )
    return AccessTokens(
        hub=read_secret("hub", hub.token_file, "--hub.token-file", env, HUB_TOKEN_VARIABLE),
        hub_admin=read_secret("hub", hub.admin_token_file, "--hub.admin-token-file", env, HUB_ADMIN_TOKEN_VARIABLE),
        engine=read_secret("engine", engine.token_file, "--engine.token-file", env, ENGINE_TOKEN_VARIABLE),
    )


# ---- the model


def prepare_model(model: str, verb: str = "run") -> str:
    """The folder of a model, fetched and converted if needed. Progress goes to the terminal, and errors with the flags
    of `verb`.

    This runs in a process of its own, because it needs torch and the launcher must stay small. If it fails it has
    printed the reason, so the launcher ends with the same exit code.
    """
    typed = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    with ending_on_sigterm():
        done = subprocess.run(
            [sys.executable, "-m", "treadle.engines.models", model, verb, *typed],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(done.returncode if done.returncode > 0 else 1)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise ModelError(f"the folder of the model '{model}' could not be found out", fix="check --model")
    return lines[-1].strip()


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the process that the launcher waits for is ended too."""

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def end(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
