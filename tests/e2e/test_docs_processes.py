"""Engines, environments, trainers and matrices of README.md and docs/, started as the pages start them.

Addresses, the model and counts are ours; everything else is the page's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.doc_commands import treadle_words
from tests.doc_pages import Command
from tests.e2e.processes import end_of, environment, free_port
from tests.e2e.test_docs import BLOCKS, ONE_WORKER, SHORT_RUN, folder, register, started, treadle, write_model

pytestmark = pytest.mark.full  # tests/unit/docs gives every command to the real parsers
__all__ = ["folder"]
ENGINE = ("--model", "./my-model", "--engine", "transformers", "--dtype", "float32", "--threads", "1")
SHORT_ENV = (
    "--openai.model", "./my-model", "--env.group-size", "2", "--env.max-token-length", "24", "--env.num-eval", "0",
    "--env.ensure-scores-are-not-same", "false", *ONE_WORKER,
)  # fmt: skip
DEADLINE_S = 120.0


def commands(verb: str) -> list[Command]:
    """Those of the blocks, each line once."""
    found = {
        command.line: command
        for block in BLOCKS
        for command in block.commands
        if not command.reason and treadle_words(command.words) and treadle_words(command.words)[0] == verb
    }
    return list(found.values())


def is_served(command: Command) -> bool:
    """An environment without a verb serves."""
    return not {"process", "evaluate", "validate"} & set(command.words)


def where(command: Command) -> str:
    return command.where


def words_of(command: Command, folder: Path) -> list[str]:
    """After the verb; shared memory is a folder of the test's."""
    words = treadle_words(command.words) or []
    return [word.replace("/dev/shm/", f"{folder}/") for word in words[1:]]


@pytest.mark.parametrize("command", commands("engine"), ids=where)
def test_an_engine_of_the_pages_serves(command: Command, folder: Path) -> None:
    write_model(folder)
    (folder / "SAVED").mkdir()
    with started(["engine", *words_of(command, folder), *ENGINE], free_port(), folder, "/health"):
        pass


@pytest.mark.parametrize("command", [each for each in commands("env") if is_served(each)], ids=where)
def test_an_environment_of_the_pages_delivers_groups(command: Command, folder: Path) -> None:
    write_model(folder)
    words = words_of(command, folder)
    with ExitStack() as stack:
        hub = stack.enter_context(started(["hub"], free_port(), folder, "/healthz"))
        ports = dict.fromkeys(re.findall(r"127\.0\.0\.1:(9\d+)", command.line)) or {"9001": None}
        engines = {
            port: stack.enter_context(started(["engine", *ENGINE], free_port(), folder, "/health")) for port in ports
        }
        register(hub)
        for port, url in engines.items():
            words = [word.replace(f"http://127.0.0.1:{port}", url) for word in words]
        urls = () if "--openai.base-url" in words else engines.values()
        with serving_environment([*words, *at_hub_and_engine(hub, *urls)], folder) as process:
            wait_for_groups(hub, process, folder)


@pytest.mark.parametrize("command", commands("train"), ids=where)
def test_a_trainer_of_the_pages_takes_its_steps(command: Command, folder: Path) -> None:
    write_model(folder)
    words = words_of(command, folder)
    max_age = words[words.index("--max-age") + 1] if "--max-age" in words else "0"
    flags = ["--weights-file", str(folder / "weights"), "--adapter-root", str(folder)]
    with (
        started(["hub"], free_port(), folder, "/healthz") as hub,
        started(["engine", *flags, *ENGINE], free_port(), folder, "/health") as engine,
        serving_environment(["arithmetic", *at_hub_and_engine(hub, engine), "--env.max-age", max_age], folder),
    ):
        ours = ("--model", "./my-model", "--steps", "2", "--batch-size", "8", "--hub-url", hub, "--engine-url", engine)
        done = treadle("train", *words, *ours, folder=folder)
        assert done.returncode == 0, f"{command.where}\n{done.stdout}{done.stderr}"
        assert "step=2" in done.stderr


def test_matrices_of_the_pages_pass_and_go_on(folder: Path) -> None:
    write_model(folder)
    begun = [command for command in commands("matrix") if "--resume" not in command.words]
    for command in begun:
        words = words_of(command, folder)
        modes = () if "--modes" in words else ("--modes", "reload")
        done = treadle("matrix", *words, *modes, *SHORT_RUN, folder=folder)
        assert done.returncode == 0, f"{command.where}\n{done.stdout}{done.stderr}"
        assert "passed" in done.stdout
    (resumed,) = [command for command in commands("matrix") if "--resume" in command.words]
    newest = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    done = treadle("matrix", "--resume", str(newest), "--plain", folder=folder)
    assert done.returncode == 0, f"{resumed.where}\n{done.stdout}{done.stderr}"


def at_hub_and_engine(hub: str, *engines: str) -> tuple[str, ...]:
    base_urls = ("--openai.base-url", *engines) if engines else ()
    return (*SHORT_ENV, "--env.hub-url", hub, *base_urls)


@contextmanager
def serving_environment(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the commands that an environment starts
    with (folder / "env.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle", "env", *words],
            stdout=output, stderr=output, env=environment(PATH=path), cwd=folder,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def wait_for_groups(hub: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not httpx.get(f"{hub}/v1/status", timeout=30).json()["accepted_groups"]:
        assert process.poll() is None, end_of(folder / "env.log")
        assert time.monotonic() < deadline, end_of(folder / "env.log")
        time.sleep(0.2)
