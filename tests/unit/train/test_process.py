"""The trainer process: restores, refusals, out-of-memory errors, batches that are given back, and progress."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from contextlib import contextmanager
from multiprocessing import get_context

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig, TrainConfig
from treadle.engines.api import create_app, engine_access
from treadle.engines.transformers_engine import TransformersEngine
from treadle.errors import ConfigError, DiskFull, HubError, ModelError, OutOfMemory, SyncError
from treadle.hub.state import MAX_DELIVERIES
from treadle.loading import report_loading
from treadle.sync.modes import OfflineSync
from treadle.sync.shared_vllm import SingleCopySync
from treadle.train import model_files
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.feed import HubFeed
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import share_policy
from treadle.train.process import TrainerProgress, WatchedSync, _registration, out_of_memory_error, run_trainer
from treadle.watch.waits import Waits


@pytest.fixture(autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_reported_with_settings_that_take_less(error):
    found = out_of_memory_error(error, TrainConfig(micro_tokens=4096))
    assert isinstance(found, OutOfMemory)
    assert "--micro-tokens 2048, --gradient-checkpointing true, --gradient-dtype bfloat16" in found.fix
    assert "treadle plan" in found.fix
    leaner = TrainConfig(micro_tokens=4096, gradient_checkpointing=True, gradient_dtype="bfloat16")
    assert out_of_memory_error(error, leaner).fix.startswith("--micro-tokens 2048, --optimizer adafactor")
    assert out_of_memory_error(RuntimeError("shapes do not fit"), leaner) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@contextmanager
def serving(app):
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), f"port {port} is in use"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def engine_url(folder, tmp_path):
    config = EngineConfig(dtype="float32", threads=1, device="cpu", weights_file=tmp_path / "shared.weights")
    engine = TransformersEngine(config, folder)
    with serving(create_app(engine, config, engine_access(config, {}))) as url:
        yield url
    asyncio.run(engine.close())


def settings(folder, tmp_path, **changes):
    plain = {
        "model": str(folder), "save_path": tmp_path / "saved", "device": "cpu", "threads": 1,
        "steps": 1, "batch_size": 4, "hub_url": "http://127.0.0.1:9", "engine_url": "http://127.0.0.1:9",
    }  # fmt: skip
    return TrainConfig(**(plain | changes))


def publish_steps(config, first, last):
    """What a trainer does to the engine's weights, without a hub: random gradients instead of batches."""
    sync = SingleCopySync(config)
    policy = share_policy(sync.fetch_layout(), config)
    optimizer = build_optimizer(policy, config)
    for step in range(first, last + 1):
        for gradient in optimizer.gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step)))
        optimizer.step(step)
        sync.publish(policy, version=step)
    return policy, optimizer


def test_the_engine_says_which_version_its_weights_are(engine_url, folder, tmp_path):
    sync = SingleCopySync(settings(folder, tmp_path, engine_url=engine_url))
    assert (sync.fetch_layout().policy_version, sync.fetch_layout().is_held) == (0, False)
    publish_steps(settings(folder, tmp_path, engine_url=engine_url), 1, 4)
    assert (sync.fetch_layout().policy_version, sync.fetch_layout().is_held) == (4, False)
    httpx.post(f"{engine_url}/bridge/pause")
    assert (sync.fetch_layout().policy_version, sync.fetch_layout().is_held) == (4, True)


def test_a_new_run_refuses_an_engine_with_weights_of_another_run(engine_url, folder, tmp_path):
    """One of the same run, which was killed before its first checkpoint: tests/e2e/test_trainer_restarts.py."""
    trainer = get_context("spawn").Process(
        target=publish_steps, args=(settings(folder, tmp_path, engine_url=engine_url), 1, 4)
    )
    trainer.start()
    trainer.join()
    other = settings(folder, tmp_path, engine_url=engine_url, save_path=tmp_path / "other")
    with pytest.raises(SyncError, match="this engine serves versions of"):
        run_trainer(other)
    assert SingleCopySync(other).fetch_layout().policy_version == 4
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_a_trainer_does_not_start_from_half_published_weights(engine_url, folder, tmp_path):
    httpx.post(f"{engine_url}/bridge/pause")  # and then the trainer was killed: still version 0
    with pytest.raises(SyncError, match="its weights may be half written, and there is no checkpoint"):
        run_trainer(settings(folder, tmp_path, engine_url=engine_url))


def test_with_a_checkpoint_an_engine_may_be_ahead_and_held(engine_url, folder, tmp_path):
    config = settings(folder, tmp_path, engine_url=engine_url, steps=2)
    policy, optimizer = publish_steps(config, 1, 2)
    Checkpoints(config.save_path, folder, keep=1).save(2, policy, optimizer, Totals())
    saved = {name: p.detach().clone() for name, p in policy.live.items()}
    publish_steps(config, 3, 4)
    httpx.post(f"{engine_url}/bridge/pause")
    with HubProcess(tmp_path) as hub:
        run_trainer(config.model_copy(update={"hub_url": hub.url}))  # all its steps are taken: it only publishes
        environment = {"max_token_length": 4, "desired_name": "last evaluation", "weight": 1.0, "group_size": 4}
        registered = httpx.post(f"{hub.url}/register-env", json=environment).json()
        assert (registered["status"], registered["starting_step"]) == ("success", 2)  # it need not wait for a trainer
    assert (config.save_path / "final_model" / "model.safetensors").is_file()
    layout = SingleCopySync(config).fetch_layout()
    assert (layout.policy_version, layout.is_held) == (2, False)
    served = share_policy(layout, config).live
    assert [name for name in saved if not torch.equal(served[name], saved[name])] == []


def failing(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


NO_ROOM = model_files.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
AROUND_IT = [
    ("save_file", NO_ROOM, DiskFull),
    (
        "save_file",
        model_files.SafetensorError("I/O error: Input/output error (os error 5)"),
        model_files.SafetensorError,
    ),
    ("fsync", OSError(errno.EIO, "Input/output error"), OSError),
    ("backward", SyncError("the engine did not answer"), SyncError),
    ("backward", HubError("the hub does not serve /v1/lease"), HubError),
    ("backward", ConfigError("a setting that is wrong"), ConfigError),
    ("backward", ModelError("a model that is wrong"), ModelError),
    ("backward", KeyboardInterrupt(), KeyboardInterrupt),
]
PLACES = {"save_file": (model_files, "save_file"), "fsync": (os, "fsync"), "backward": (torch.Tensor, "backward")}


def test_the_hub_learns_the_project_and_group_at_wandb(folder, tmp_path):
    def registered(**changes):
        found = _registration(settings(folder, tmp_path, **changes), 0, vocab_size=80)
        assert found.trackers.sinks == tuple(changes.get("track", "").split())
        return found.wandb_project, found.wandb_group, found.trackers.project, found.trackers.group

    assert registered() == ("", "", "treadle", "")
    assert registered(track="wandb") == ("treadle", "saved", "treadle", "saved"), "the folder names the group"
    assert registered(track="wandb", wandb_project="mine", wandb_group="night") == ("mine", "night") * 2
    assert registered(track="trackio", wandb_project="mine", wandb_run_name="r") == ("", "", "mine", "r")


def test_the_hub_learns_how_often_weights_are_published(folder, tmp_path):
    def interval(**changes):
        return _registration(settings(folder, tmp_path, **changes), 0, vocab_size=80).publish_interval

    assert (interval(), interval(weight_bridge_mode="lora_restart")) == (1, 3)


def test_a_batch_is_set_aside_only_for_what_it_can_have_caused(folder, tmp_path, monkeypatch):
    def fail_once(place, error, raised):
        with monkeypatch.context() as broken:
            broken.setattr(*PLACES[place], failing(error))
            with pytest.raises(raised):
                run_trainer(config)
        return httpx.get(f"{hub.url}/v1/status").json()["dead_groups"]

    group = {"tokens": [[5, 6, 7]] * 2, "masks": [[-100, 6, 7]] * 2, "scores": [0.0, 1.0]}
    with HubProcess(tmp_path) as hub:
        config = settings(folder, tmp_path, weight_bridge_mode="offline", hub_url=hub.url)
        HubFeed(hub.url, lambda: None, Waits()).register(_registration(config, 0, vocab_size=80))
        for _ in range(2):
            assert httpx.post(f"{hub.url}/scored_data", json=group).status_code == 200
        for case in AROUND_IT:
            assert fail_once(*case) == 0, case
        guilty = ("backward", RuntimeError("out of memory"), OutOfMemory)
        assert [fail_once(*guilty) for _ in range(MAX_DELIVERIES)] == [0] * (MAX_DELIVERIES - 1) + [2]


def test_the_weights_of_a_load_are_counted_until_the_first_version_is_out(tmp_path):
    config = TrainConfig(weight_bridge_mode="offline", save_path=tmp_path)
    mode = WatchedSync(OfflineSync(config), Waits(), config)
    progress = TrainerProgress(mode, lambda: None)
    assert progress.about().work is None
    with report_loading(progress.loads):
        model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"))
    about = progress.about()
    assert about.state == "loading"
    assert about.work is not None
    assert about.work.done == about.work.total == len(list(model.named_parameters()))
    mode.version = 3
    assert (progress.about().state, progress.about().work) == ("training step 4", None)
