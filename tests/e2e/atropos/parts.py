"""Starting the parts: our hub and engine, and the programs of this folder under the real atroposlib."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import end_of, environment, free_port, wait_until_healthy

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-atropos" / "bin" / "python"
OFFLINE = {"WANDB_MODE": "disabled", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1"}

# Unlike the tiny model's own template this one keeps what was said when it renders a conversation again, so that a
# second turn extends the tokens of the first.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<turn>{{ m['content'] }}<end>"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)


def need_atroposlib() -> None:
    """Without its environment there is nothing to test; a build that lost it must not pass for that."""
    if not PYTHON.is_file():
        remedy = "the real atroposlib is not installed here: run scripts/setup-atropos.sh"
        if os.environ.get("CI"):
            pytest.fail(remedy)
        pytest.skip(remedy)


@contextmanager
def atropos(script: str, *flags: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of this folder's programs under the real atroposlib."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(PYTHON), str(HERE / script), *flags],
            stdout=output,
            stderr=output,
            env=environment(**OFFLINE),
            preexec_fn=_hear_ctrl_c,  # noqa: PLW1509
        )
    try:
        yield process
    finally:
        process.kill()  # it has nothing to save
        process.wait()


def _hear_ctrl_c() -> None:
    """Tests that run in the background of a shell ignore it, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def engine(model: Path, log: Path, port: int | None = None) -> Iterator[str]:
    """Our engine; yields its URL as an Atropos client writes it."""
    port = port or free_port()
    command = [sys.executable, "-m", "treadle", "engine", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--threads", "1"]
    with log.open("ab") as output, ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, env=environment()))
        stack.callback(process.terminate)
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"


class Env:
    """A real environment that serves; started again when it gave up, as whoever runs it would do."""

    script = "digits_env.py"
    record_flag = "--env.record"

    def __init__(self, name: str, folder: Path, hub_url: str, engine_url: str, model: Path, *flags: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.restarts = 0
        self._record = folder / f"{name}.jsonl"
        self._flags = [
            "serve", "--env.rollout_server_url", hub_url, "--env.tokenizer_name", str(model),
            "--env.wandb_name", name, self.record_flag, str(self._record),
            "--openai.base_url", engine_url, "--openai.model_name", str(model), *flags,
        ]  # fmt: skip
        self._stack = ExitStack()

    def __enter__(self) -> Env:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.process = self._stack.enter_context(atropos(self.script, *self._flags, log=self.log))

    def stop(self) -> None:
        self._stack.close()

    def start_again_if_it_gave_up(self) -> None:
        if self.process.poll() is not None:
            assert "RetryError" in self.log.read_text(), end_of(self.log)
            self.restarts += 1
            self._start()

    def groups(self) -> list[dict[str, Any]]:
        """The groups that it sent, in order; the client keeps back those whose scores are all the same."""
        return [group for group in json_lines(self._record) if len(set(group["scores"])) > 1]


class MathEnv(Env):
    """One whose record is what atroposlib itself writes: whole only once the process has ended."""

    script = "gsm8k_env.py"
    record_flag = "--env.data_path_to_save_groups"

    def end(self) -> None:
        """As Ctrl-C does it."""
        self.process.send_signal(signal.SIGINT)
        wait_until(lambda: self.process.poll() is not None, "its end", self.log, timeout_s=20)


class RetryEnv(MathEnv):
    script = "gsm8k_retry_env.py"


class Trainer:
    """The real trainer's client, which reads batches until it is stopped."""

    def __init__(self, folder: Path, hub_url: str, batch_size: int) -> None:
        self.log = folder / "trainer.log"
        self._out = folder / "batches.jsonl"
        self._flags = ("--url", hub_url, "--batch-size", str(batch_size), "--out", str(self._out))
        self._stack = ExitStack()

    def __enter__(self) -> Trainer:
        self._process = self._stack.enter_context(atropos("read_batches.py", *self._flags, log=self.log))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batches(self) -> list[dict[str, Any]]:
        assert self._process.poll() in (None, 0), end_of(self.log)
        return json_lines(self._out)

    def finish(self) -> None:
        """Let it read what is left, and end."""
        self._out.with_name(self._out.name + ".enough").touch()
        wait_until(lambda: self._process.poll() is not None, "the trainer's end", self.log)
        assert self._process.poll() == 0, end_of(self.log)


def json_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written to."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_until(done: Callable[[], bool], what: str, *logs: Path, timeout_s: float = 120) -> float:
    """Seconds it took; fails with the end of the log in which an error stands."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"after {timeout_s} s not yet: {what}\n{end_of(*logs)}")
        time.sleep(0.05)
    return time.monotonic() - began
