"""What the tests of foreign environments share: where verifiers is, and whether what was recorded is exact."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import end_of, environment, free_port, running, wait_until_healthy

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-verifiers" / "bin" / "python"

# It keeps what was said when a conversation is rendered again, and ends every turn of the model with one token.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<turn>{{ m['content'] }}<end>"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)
TURN, END = 2, 1  # their ids in the tiny models

PLAIN_HTTP = httpx.Client(timeout=60)  # one for all: to make one reads the certificates, which takes longer than a call


def need_verifiers() -> None:
    """Without it there is nothing to test; a build that lost it must not pass for that."""
    if not PYTHON.is_file():
        remedy = "the real verifiers is not installed here: run scripts/setup-verifiers.sh"
        if os.environ.get("CI"):
            pytest.fail(remedy)
        pytest.skip(remedy)


def verifiers_command(name: str, verb: str, *flags: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """`treadle env verifiers:NAME VERB`, beside the real verifiers; with the variables of its process."""
    need_verifiers()
    path = os.pathsep.join((str(HERE), str(HERE.parents[2] / "src")))
    first = os.pathsep.join((str(PYTHON.parent), os.environ["PATH"]))  # verifiers calls `uv` by its name
    command = [str(PYTHON), "-m", "treadle", "env", f"verifiers:{name}", verb, *flags]
    # The harness has uv fetch what its script wants; by default uv trusts only its own certificates.
    return command, environment(PYTHONPATH=path, PATH=first, UV_SYSTEM_CERTS="1", **variables)


@contextmanager
def serving_verifiers(
    name: str, hub_url: str, *flags: str, log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    command, env = verifiers_command(name, "serve", *flags, "--env.hub-url", hub_url, **variables)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(15)


def next_batch(hub_url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, end_of(log)
        batch: list[Any] | None = httpx.get(f"{hub_url}/batch").json()["batch"]
        if batch is not None:
            return batch
        time.sleep(0.1)
    raise AssertionError(f"no batch within {timeout_s} s:\n{end_of(log)}")


@contextmanager
def engine(model: Path, log: Path) -> Iterator[str]:
    """The real engine, in fp32 on a CPU; yields its URL."""
    port = free_port()
    flags = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1"]
    with running("engine", *flags, "--engine", "transformers", "--device", "cpu", log=log) as process:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"


def check_exact(engine_url: str, tokens: list[int], masks: list[int], logprobs: list[float]) -> int:
    """What the engine itself says of these ids is what was recorded; how many sampled tokens were looked at."""
    body = {"prompt": {"prompt_token_ids": tokens}, "max_tokens": 1, "prompt_logprobs": 0}
    answer = PLAIN_HTTP.post(f"{engine_url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    scored = answer.json()["prompt_logprobs"]
    sampled = [place for place, mask in enumerate(masks) if mask != -100]
    others = sorted(set(range(len(tokens))) - set(sampled))
    assert [masks[place] for place in sampled] == [tokens[place] for place in sampled]
    assert all(logprobs[place] == 1.0 for place in others)
    recorded = [logprobs[place] for place in sampled]
    assert recorded == pytest.approx([scored[place][str(tokens[place])] for place in sampled], abs=1e-3)
    return len(sampled)


def check_turns(tokens: list[int], masks: list[int], num_turns: int) -> None:
    """Each turn of the model begins behind one <turn>, and is ended by one <end>: its own, or the template's."""
    starts = [place for place, token in enumerate(tokens) if token == TURN and masks[place] == -100]
    assert len(starts) == num_turns
    for turn, start in enumerate(starts):
        stop = starts[turn + 1] if turn + 1 < num_turns else len(tokens)
        ends = tokens[start:stop].count(END)
        assert ends == 1 or (turn + 1 == num_turns and ends == 0)  # the last may have been cut off
        trained = [masks[place] != -100 for place in range(start + 1, stop)]
        assert trained == sorted(trained, reverse=True)  # from the turn's first token on, and without a gap
        assert trained[0]
