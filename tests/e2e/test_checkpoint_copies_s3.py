"""Copies of checkpoints at a real S3 server: moto's, in .venv-s3 (scripts/setup-s3.sh)."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.e2e.processes import free_port
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.errors import ConfigError
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.checkpoint_copies import copied_checkpoints
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy

SERVER = Path(__file__).parents[2] / ".venv-s3" / "bin" / "moto_server"
READY_S = 60.0
LARGE_BYTES = 12 * 2**20  # sent in several parts
pytestmark = [
    pytest.mark.full,  # tests/unit/train/test_checkpoint_copies.py copies to a store of files
    pytest.mark.skipif(not SERVER.exists(), reason="scripts/setup-s3.sh installs an S3 server"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("s3") / "server.log"
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    with log.open("wb") as output:
        process = subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                assert httpx.put(f"{url}/bucket", timeout=10).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def config(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return TrainConfig(
        dtype="bfloat16", device="cpu", compile="off", lr=1e-3, keep_checkpoints=2,
        save_path=tmp_path / "here", checkpoint_url=f"s3://bucket/{tmp_path.name}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


def names_at(server: str, config: TrainConfig) -> set[str]:
    """Folder and name of each object."""
    prefix = config.checkpoint_url.removeprefix("s3://bucket/")
    listed = httpx.get(f"{server}/bucket", params={"list-type": "2", "prefix": prefix}, timeout=10).text
    return {part.partition("</Key>")[0].removeprefix(f"{prefix}/") for part in listed.split("<Key>")[1:]}


def test_another_machine_continues_from_the_copies_at_an_s3_server(server, config, model) -> None:
    policy = load_policy(model, config)
    optimizer = build_optimizer(policy, config)
    with copied_checkpoints(config) as copies:
        checkpoints = Checkpoints(config.save_path, model, config.keep_checkpoints, copies=copies)
        for step in (1, 2, 3):
            for gradient in optimizer.gradients.values():
                gradient.fill_(0.01)
            optimizer.step(step)
            checkpoints.save(step, policy, optimizer, Totals())
        checkpoints.save_final(policy)
    found = names_at(server, config)
    assert {name.partition("/")[0] for name in found} == {"step_2", "step_3", "final_model"}
    assert found >= {"step_2/trainer.json", "step_3/trainer.json", "step_3/model.safetensors"}
    assert found == {f"{path.parent.name}/{path.name}" for path in config.save_path.rglob("*") if path.is_file()}

    shutil.rmtree(config.save_path)
    again = load_policy(model, config)
    with copied_checkpoints(config):
        restored = Checkpoints(config.save_path, model, 2).restore(again, build_optimizer(again, config))
    assert restored.step == 3
    for name, weight in again.live.items():
        assert torch.equal(weight, policy.live[name]), name


def test_a_large_file_arrives_whole_at_an_s3_server(server, config, tmp_path) -> None:
    folder = tmp_path / "step_7"
    folder.mkdir()
    content = torch.randint(256, (LARGE_BYTES,), dtype=torch.uint8).numpy().tobytes()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "trainer.json").write_text("{}")  # without it the copy would not be complete, and be removed
    with copied_checkpoints(config) as copies:
        copies.add(folder)
    place = config.checkpoint_url.removeprefix("s3:/")
    assert httpx.get(f"{server}{place}/step_7/model.safetensors", timeout=60).content == content


def test_a_bucket_that_is_not_there_is_refused_at_the_start(config) -> None:
    missing = config.model_copy(update={"checkpoint_url": "s3://no-such-bucket/run"})
    with (
        pytest.raises(ConfigError, match=r"checkpoints cannot be copied to s3://no-such-bucket/run"),
        copied_checkpoints(missing),
    ):
        pass
