"""The lines of other guides that docs/migrating.md says work, run for real with a small model on a CPU.

Addresses, models, counts and what needs several GPUs or machines are ours; every other flag is the line's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.processes import free_port
from tests.e2e.test_docs import SHORT, SHORT_RUN, folder, register, started, treadle, write_model
from tests.e2e.test_docs_processes import ENGINE, at_hub_and_engine, serving_environment, wait_for_groups
from tests.unit.docs.test_migrating import ROWS, swap

pytestmark = pytest.mark.full  # tests/unit/docs/test_migrating.py gives every line to the real parsers
__all__ = ["folder"]
LINES = {" ".join(swap(line)): swap(line) for line, here in ROWS if here.startswith("works")}
ONE_GPU = ("--tensor-parallel-size", "1", "--max-model-len", "2048")
# A folder that all machines see, and other ranks, are not here.
ONE_TRAINER = ("--world-size", "1", "--trainer-rank", "0", "--vllm-config-path", "auto")


def lines(verb: str) -> list[object]:
    found = [words[1:] for words in LINES.values() if words[0] == verb and "--help" not in words]
    assert found
    return [pytest.param(words, id=" ".join(words)[:90]) for words in found]


@pytest.mark.parametrize("words", lines("hub"))
def test_a_hub_of_the_guides_serves(words: list[str], folder: Path) -> None:
    with started(["hub", *words], free_port(), folder, "/healthz"):
        pass


@pytest.mark.parametrize("words", [each for each in lines("engine") if "--pipeline" not in str(each)])
def test_an_engine_of_the_guides_serves(words: list[str], folder: Path) -> None:
    """But for a flag of vLLM's own."""
    write_model(folder)
    with started(["engine", *words, *ENGINE, *ONE_GPU], free_port(), folder, "/health"):
        pass


@pytest.mark.parametrize("words", lines("env"))
def test_an_environment_of_the_guides_works(words: list[str], folder: Path) -> None:
    write_model(folder)
    data = ("--env.data", "gsm8k", "--env.max-token-length", "24")  # it drops completions of fewer than 10
    with (
        started(["hub"], free_port(), folder, "/healthz") as hub,
        started(["engine", *ENGINE], free_port(), folder, "/health") as engine,
    ):
        ours = (*at_hub_and_engine(hub, engine), *data, "--openai.server-type", "vllm")
        actions = [word for word in words if word in SHORT]
        if actions:
            done = treadle("env", *words, *ours, *SHORT[actions[0]], folder=folder)
            assert done.returncode == 0, done.stdout + done.stderr
            return
        register(hub)
        with serving_environment([*words, *ours], folder) as process:
            wait_for_groups(hub, process, folder)


@pytest.mark.parametrize("words", lines("train"))
def test_a_trainer_of_the_guides_takes_its_steps(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_model(folder, num_layers=32, hidden_size=32)  # the lines name layers of an 8B model
    flags = ["--weights-file", str(folder / "weights"), "--adapter-root", str(folder), "--enable-lora"]
    with (
        started(["hub"], free_port(), folder, "/healthz") as hub,
        started(["engine", *flags, *ENGINE], free_port(), folder, "/health") as engine,
        serving_environment(["arithmetic", *at_hub_and_engine(hub, engine), "--env.max-age", "0"], folder),
    ):
        ours = ("--model", "./my-model", "--steps", "2", "--batch-size", "8", "--gradient-accumulation-steps", "1")
        port = engine.rpartition(":")[2]
        places = ("--hub-url", hub, "--vllm-port", port, "--device", "cpu", "--save-path", str(folder / "saved"))
        done = treadle("train", *words, *ours, *places, *ONE_TRAINER, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step=2" in done.stderr


@pytest.mark.parametrize("words", lines("run"))
def test_a_run_of_the_guides_uses_the_hub_that_it_names(words: list[str], folder: Path) -> None:
    write_model(folder)
    with started(["hub"], free_port(), folder, "/healthz") as hub:
        done = treadle("run", *words, *SHORT_RUN, "--hub-url", hub, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
