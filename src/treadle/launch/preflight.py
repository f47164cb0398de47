"""Run every check that a run can fail on before its first process starts and before its folder is made.

Checks are independent where they can be: all problems are reported at once, each with its remedy. What needs
a download or a running server (the model's files, an attached hub or engine) is checked afterwards, by launch/job.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treadle.config import DEFAULT_MODEL
from treadle.config.engine_choice import has_vllm
from treadle.config.keys import choose_steps, with_fitting_groups
from treadle.config.schema import RunConfig
from treadle.engines.model_folder import check_model_folder
from treadle.engines.vllm.installation import find_vllm
from treadle.envs.base import prepare_task
from treadle.envs.catalogue import load_environment
from treadle.errors import Problems
from treadle.launch.attachment import one_address
from treadle.launch.folder import check_disk_space
from treadle.launch.plan import wished_addresses
from treadle.launch.ports import Listeners, held_ports
from treadle.launch.settings import (
    check_one_model,
    check_one_trainer,
    settle_environments,
    settle_paths,
    with_environments,
)
from treadle.store.file import refuse_locked
from treadle.sync.model_folders import find_model
from treadle.train.requirements import check_trainer

Say = Callable[[str], None]


@contextmanager
def checked_start(config: RunConfig, explicit: frozenset[str], say: Say) -> Iterator[tuple[RunConfig, Listeners]]:
    """The settings of a new run, completed, and its addresses, which are held until the block ends."""
    problems = Problems()
    with problems.collected():
        config.check_mix()
    config = settle_environments(config, problems)
    has_environment = problems.is_empty
    with problems.collected():
        config = one_address(config, explicit)
    if has_environment:  # else these would compare defaults that are not its own
        with problems.collected():
            config = with_fitting_groups(config, explicit)
            config.check_together()
    with problems.collected():
        check_one_trainer(config)
    with problems.collected():
        check_one_model(config, explicit)
    with problems.collected():
        choose_steps(config, explicit)
    with problems.collected():
        config = settle_paths(config)
    with problems.collected():
        _check_engine(config)
    with problems.collected():
        check_trainer(config.train, os.environ, _sound_model(config, problems))
    with problems.collected():
        warning = check_disk_space(config.output)
        if warning:
            say(f"warning: {warning}")
    with ExitStack() as held:
        listeners: Listeners = {}
        with problems.collected():  # a busy port is cheap to notice, and must not cost the user a download first
            listeners = held.enter_context(held_ports(wished_addresses(config), explicit))
        problems.raise_all()
        yield config, listeners


def checked_resume(config: RunConfig) -> RunConfig:
    """The settings of a run that goes on, with its environment's own."""
    problems = Problems()
    environments = list(config.environments)
    for place, env in enumerate(environments):
        with problems.collected():
            environment = load_environment(env)
            prepare_task(environment)
            environments[place] = environment.config
    config = with_environments(config, environments)
    with problems.collected():
        _check_engine(config)
    with problems.collected():
        if not config.hub_url:
            refuse_locked(config.hub.database)
    with problems.collected():
        prepared = Path(config.engine.model)
        check_trainer(config.train, os.environ, prepared if prepared.is_dir() else None)
    problems.raise_all()
    return config


def _sound_model(config: RunConfig, problems: Problems) -> Path | None:
    """The model's folder, where it is on this machine already and can be used."""
    folder = None
    if not config.engine_url and config.model != DEFAULT_MODEL:  # the engine names it; it is made on the first run
        with problems.collected():
            found = find_model(config.model)
            if found is not None and found == Path(config.model).expanduser():  # one in the cache may not be whole yet
                check_model_folder(found)
            folder = found
    return folder


def _check_engine(config: RunConfig) -> None:
    """Refuse a missing vLLM if the user asked for it; `auto` chooses it only if it was found."""
    engine = config.engine
    is_asked_for = engine.engine == "vllm" or bool(engine.vllm_python and has_vllm(engine))
    if is_asked_for and not config.engine_url:
        find_vllm(engine.vllm_python)
