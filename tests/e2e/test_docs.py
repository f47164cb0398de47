"""Commands and snippets of README.md and docs/, as they stand there, against a real hub and a real engine.

Addresses, the model and counts are ours; everything else is the page's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.doc_commands import how, places, treadle_words
from tests.doc_pages import Block, Command, read_pages
from tests.e2e.processes import end_of, environment, free_port, wait_until_healthy
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.full  # tests/unit/docs gives every command to the real parsers
PAGES = read_pages()
BLOCKS = [block for page in PAGES for block in page.blocks]
RUN = [command for block in BLOCKS for command in block.commands if how(command) == "run"]
RUN += [
    command
    for page in PAGES
    for command in page.commands_in_prose
    if command.words[0] == "curl" and "..." not in command.words
]
SHORT = {  # fewer of everything
    "process": ("--env.total-steps", "2", "--env.group-size", "2"),
    "evaluate": (
        "--env.num-eval", "2", "--env.eval-samples", "2", "--env.data", "gsm8k", "--env.max-token-length", "8",
    ),
    "validate": (),
}  # fmt: skip
ONE_WORKER = ("--env.reward-workers", "1")
NOT_HERE = {"--resume", "--on", "--engine.gpus", "--train.teacher-url"}  # other tests have a cluster or a teacher
WHOLE_RUNS = {  # one of each
    command.line: command
    for block in BLOCKS
    for command in block.commands
    if command.words[:2] == ["treadle", "run"] and not NOT_HERE & {*command.words} and not command.reason
}
SHORT_RUN = (
    "--model", "./my-model", "--steps", "2", "--output", "runs", "--plain", "--env.group-size", "4", *ONE_WORKER,
    "--env.num-eval", "4", "--env.max-token-length", "8", "--env.ensure-scores-are-not-same", "false",
    "--train.batch-size", "8", "--engine.dtype", "float32", "--engine.max-num-seqs", "16",
)  # fmt: skip
TRAINER = {
    "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 2048, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    places(tmp_path, monkeypatch)
    return tmp_path


def write_model(folder: Path, **size: int) -> Path:
    """With room for the prompts of gsm8k, a token a character."""
    model = write_tiny_model(folder / "my-model", **size)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return model


def write_adapter(folder: Path) -> Path:
    """Of the first layer's queries, as PEFT saves it."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    weights = {f"{name}_A.weight": torch.ones(4, 160), f"{name}_B.weight": torch.zeros(160, 4)}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def started(words: list[str], port: int, folder: Path, route: str) -> Iterator[str]:
    """Start a server with the words of a page; yields its URL."""
    log = folder / f"{words[0]}-{port}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle", *words, "--port", str(port)],
            stdout=output, stderr=output, env=environment(), cwd=folder,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(f"{url}{route}", process, log)
        yield url
    finally:
        process.terminate()
        assert process.wait(30) == 0, end_of(log)


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder, env=environment(PATH=path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_hubs_start_as_the_pages_start_them(folder: Path) -> None:
    done = set()
    (folder / "runs" / "20260102-030405-gsm8k").mkdir(parents=True)
    for command in RUN:
        words = treadle_words(command.words)
        if words and words[0] == "hub" and (command.words[0], *words) not in done:
            done.add((command.words[0], *words))
            with started(words, free_port(), folder, "/healthz"):
                pass
    assert len(done) > 4
    assert (folder / "hub.token").exists(), "made on first use"


def test_commands_are_answered_by_a_real_hub_and_a_real_engine(folder: Path) -> None:
    """Those that the pages give beside a hub and an engine, in the order of the pages."""
    write_model(folder)
    adapter = write_adapter(folder / "step_4")
    engine_line = next(c.words for c in RUN if c.words[:2] == ["treadle", "engine"] and "./my-model" in c.words)
    token = (folder / "engine.token").read_text()
    (folder / "hub.token").write_text(token)
    (folder / "hub.token").chmod(0o600)
    with (
        started(["hub"], free_port(), folder, "/healthz") as hub,
        started(treadle_words(engine_line) or [], free_port(), folder, "/health") as engine,
    ):
        register(hub)

        def ours(line: str) -> str:
            line = re.sub(r"(http://)?(localhost|127\.0\.0\.1|gpu7):8000|\bHUB\b", hub, line)
            line = re.sub(r"(http://)?(localhost|127\.0\.0\.1|gpu7):9001|\bENGINE\b", engine, line)
            return line.replace("/runs/a/step_4", str(adapter)).replace("smollm2-135m-instruct", "./my-model")

        failed = []
        for command in RUN:
            done = run_one(command, ours, folder)
            if done is not None and done.returncode:
                failed.append(f"{command.where}: {command.line}\n{done.stdout}{done.stderr}")
        assert not failed, "\n".join(failed)
        snippet = next(block for block in BLOCKS if block.language == "python" and "from openai" in block.text)
        printed = python(ours(snippet.text), folder)
        assert re.search(r" \d+$", printed), "the policy version"
        check_agents(hub, engine, folder)


def run_one(command: Command, ours: Callable[[str], str], folder: Path) -> subprocess.CompletedProcess[str] | None:
    """None for what another test runs, here or in test_docs_processes.py."""
    words, line = command.words, ours(command.line)
    if words[0] == "curl":
        return shell(line.replace("curl ", "curl -sS --fail-with-body --max-time 30 ", 1), folder)
    if words[0] == "export" or words[:2] == ["treadle", "token"]:
        return shell(line, folder)
    if words[:2] == ["treadle", "env"] and words[3:4] and words[3] in SHORT:
        model = ("--openai.model", "./my-model", "--openai.base-url", ours("http://127.0.0.1:9001"))
        return treadle(*(treadle_words(words) or []), *SHORT[words[3]], *ONE_WORKER, *model, folder=folder)
    if words[:3] == ["treadle", "doctor", "--hub"]:
        return treadle(*map(ours, words[1:]), folder=folder)
    return None


def treadle(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def register(hub: str) -> None:
    """A trainer and an environment, so that there is something to tell."""
    httpx.post(f"{hub}/register", json=TRAINER).raise_for_status()
    httpx.get(f"{hub}/batch").raise_for_status()
    env = {"max_token_length": 64, "desired_name": "mine", "weight": 1.0, "group_size": 8}
    httpx.post(f"{hub}/register-env", json=env).raise_for_status()


def check_agents(hub: str, engine: str, folder: Path) -> None:
    """The snippet of an agent that comes by itself, beside the environment that gives it work."""
    port = free_port()
    snippet = next(block for block in BLOCKS if block.language == "python" and "/sessions/create" in block.text)
    words = [
        "env", "agent", "serve", "--env.data", "rows.jsonl", "--env.args", json.dumps({"port": port}),
        "--env.num-eval", "0",
        "--openai.base-url", engine, "--openai.model", "./my-model", "--env.hub-url", hub,
        "--env.max-token-length", "8", "--env.group-size", "2",
    ]  # fmt: skip
    log = folder / "agent.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle", *words], stdout=output, stderr=output, env=environment(), cwd=folder
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        python(snippet.text.replace(":9100", f":{port}"), folder)
    finally:
        process.terminate()
        process.wait(30)


def python(source: str, folder: Path) -> str:
    file = folder / "program.py"
    file.write_text(source)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# What a snippet needs around it: methods belong to a task.
TASK = """
from treadle.envs import Environment, Item, Model, environment

def look_up(text):
    return "nothing"

@environment("snippet")
class Snippet(Environment):
    rewards = ({"type": "regex", "params": {"pattern": "<answer>(.*?)</answer>", "compare_answer": True}},)

    def train_items(self):
        return [Item.ask(f"What is {a} + 1?", answer=f"{a + 1}") for a in range(12)]

    def eval_items(self):
        return [Item.ask("What is 30 + 1?", answer="31")]

"""


def snippet_id(block: Block) -> str:
    return block.where


@pytest.mark.parametrize(
    "block",
    [
        block
        for block in BLOCKS
        if block.language == "python" and "openai" not in block.text and block.page != "docs/python.md"
    ],
    ids=snippet_id,
)
def test_snippets_of_python_work(block: Block, folder: Path) -> None:
    """A task is fit to be trained on, a reward can be made by its name, anything else runs to its end."""
    source = block.text
    if "(self" in source and "class " not in source:
        source = TASK + "".join(f"    {line}\n" for line in source.splitlines())
    (folder / "snippet.py").write_text(source)
    if "class NearReward" in source:
        line = (
            'import snippet; from treadle.envs.rewards import registry; print(registry.create("near", tolerance=0.1))'
        )
        assert "tolerance=0.1" in python(line, folder)
    elif "@environment" in source:
        data = ("--env.data", "rows.jsonl") if "DataEnvironment" in source else ()
        done = treadle("env", "snippet.py", "validate", *ONE_WORKER, *data, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert python(source, folder)


@pytest.mark.full
@pytest.mark.parametrize("line", WHOLE_RUNS)
def test_a_run_of_the_pages_takes_its_steps(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    has_layers = "layer-indices" in line  # 20 to 29
    write_model(folder, hidden_size=64, num_layers=30 if has_layers else 2)
    done = treadle(*(treadle_words(WHOLE_RUNS[line].words) or []), *SHORT_RUN, folder=folder)
    assert done.returncode == 0, f"{WHOLE_RUNS[line].where}\n{done.stdout}{done.stderr}"
    (run,) = (folder / "runs").iterdir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.full
def test_a_finished_run_can_be_looked_at_talked_to_and_resumed(folder: Path) -> None:
    """`treadle chat`, `report`, `top`, `doctor RUN`, `run --resume RUN`."""
    write_model(folder)
    assert treadle("run", *SHORT_RUN, folder=folder).returncode == 0
    (run,) = (folder / "runs").iterdir()
    for words in (
        ("chat", "--message", "hi", "--max-tokens", "4"), ("report", str(run)), ("top", "--once", "--plain"),
        ("doctor", str(run)), ("run", "--resume", str(run), "--steps", "3", "--plain"),
    ):  # fmt: skip
        done = treadle(*words, folder=folder)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


# Makes every run of the page short. Those without rewards end where their processes would start.
SHORT_TRAIN = """
from treadle import api
from treadle.launch.job import RunSession

FEWER = {
    "model": "./my-model", "batch_size": 8, "group_size": 4, "num_eval": 4, "reward_workers": 1, "max_token_length": 8,
    "engine": {"dtype": "float32", "max_num_seqs": 16}, "train": {}, "plain": True, "steps": 1,
}
train, resume, run_session, runs = api.train, api.Run.resume, RunSession.run, []

def train_shortly(*_, **given):
    RunSession.run = run_session if "rewards" in given else lambda session, **_: setattr(session, "_is_complete", True)
    run = train(**{**given, **FEWER})
    runs.extend([run] if "rewards" in given else [])
    return runs[-1]

def resume_shortly(run, **_):
    RunSession.run = run_session
    return resume(run, steps=2)

api.train, api.Run.resume = train_shortly, resume_shortly
"""


def test_the_snippets_of_the_python_page_are_one_program(folder: Path) -> None:
    write_model(folder, hidden_size=64, num_layers=2)
    snippets = [block.text for block in BLOCKS if block.page == "docs/python.md" and block.language == "python"]
    (folder / "program.py").write_text("\n".join([SHORT_TRAIN, *snippets]))
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "reward.png").is_file()
    assert (folder / "report.html").is_file()
