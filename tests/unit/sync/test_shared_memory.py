"""Weights in shared memory, and vllm_bridge_config.json: where it is written and found, and which file is accepted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import SmallEngine, serving
from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.sync.gate import ProcessIdentity, this_process
from treadle.sync.layout import Layout, Placement
from treadle.sync.modes import choose_sync
from treadle.sync.shared_memory import (
    FILE_NAME,
    bind_parameters,
    bridge_file_path,
    claimed,
    find_bridge_file,
    map_weights,
    read_bridge_file,
    remove_bridge_file,
    remove_shared_file,
    share_parameters,
    write_bridge_file,
)
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import share_policy
from treadle.train.ranks import Ranks


@pytest.fixture
def shared(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layout = share_parameters(model, tmp_path / "weights", str(folder))
    return model, layout, before


def test_sharing_keeps_every_value_and_the_file_is_private(shared):
    model, layout, before = shared
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert os.stat(layout.path).st_mode & 0o777 == 0o600
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_trainers_model_stands_on_the_same_bytes(shared):
    model, layout, _ = shared
    config = TrainConfig(device="cpu")
    policy = share_policy(layout, config)
    masters = build_optimizer(policy, config).masters
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for master in masters.values():
            master.add_(0.01)
        before = model(ids).logits
        policy.write_live_weights()
        after = model(ids).logits
    assert not torch.allclose(before, after)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), masters[name].detach(), atol=0, rtol=0)


def test_adapters_are_trained_on_the_engines_own_base(shared):
    """The base is the engine's bytes; the trainer reads them and writes none."""
    model, layout, before = shared
    config = TrainConfig(
        device="cpu", weight_bridge_mode="lora_only", single_copy=True, epochs=2, lr=1e-2, warmup_steps=0
    )
    policy = share_policy(layout, config)
    optimizer = build_optimizer(policy, config)
    ids = [5, 6, 7, 8]
    base = policy.score_tokens(ids).logprobs_T
    with torch.no_grad():
        torch.testing.assert_close(base, own_logprobs(model, ids))
    for step in (1, 2):  # B begins as zero, so the first step moves B alone
        take_step(policy, optimizer, step)
    assert not torch.allclose(policy.score_tokens(ids).logprobs_T, base)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())

    first = next(iter(policy.weights))
    with torch.no_grad():
        model.get_parameter(first).add_(1.0)
    assert torch.equal(policy.weights[first].detach(), before[first] + 1.0)


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only"])
def test_one_copy_is_for_one_trainer_process(shared, mode):
    """torchrun says how many there are, not the settings."""
    _, layout, _ = shared
    config = TrainConfig(device="cpu", weight_bridge_mode=mode, single_copy=True)
    with pytest.raises(ConfigError, match="one copy of the weights is for one trainer process, and there are 2"):
        share_policy(layout, config, Ranks(size=2))


def own_logprobs(model, ids):
    logits_TV = model(torch.tensor([ids])).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_a_model_that_does_not_fit_is_refused(shared):
    model, layout, _ = shared
    renamed = tuple(Placement(name=p.name + "x", shape=p.shape, offset=p.offset) for p in layout.parameters)
    other = Layout(
        path=layout.path, model=layout.model, dtype=layout.dtype, num_bytes=layout.num_bytes, parameters=renamed
    )
    with pytest.raises(SyncError, match="do not fit"):
        bind_parameters(model, other)


def take_step(policy, optimizer, step):
    for gradient in optimizer.gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step)))
    optimizer.step(step)
    policy.write_live_weights()


@pytest.mark.parametrize(
    ("settings", "is_trained"),
    [
        ({}, lambda name: True),
        ({"epochs": 2}, lambda name: True),
        ({"optimizer": "adamw_8bit", "dtype": "bfloat16"}, lambda name: True),
        ({"train_layer_indices": "1"}, lambda name: ".layers.1." in name),
        ({"train_layer_indices": "1", "epochs": 2}, lambda name: ".layers.1." in name),
        ({"lora": True}, lambda name: "q_proj" in name or "v_proj" in name),
    ],
)
def test_a_checkpoint_repairs_a_publish_that_was_cut_short(tmp_path, settings, is_trained):
    """It writes every weight that is trained, and no other ever changes."""
    dtype = getattr(torch, settings.get("dtype", "float32"))
    folder = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    layout = share_parameters(model, tmp_path / "weights", str(folder))
    served = map_weights(layout)
    config = TrainConfig(device="cpu", lr=1e-2, warmup_steps=0, compile="off", **settings)
    checkpoints = Checkpoints(tmp_path / "saved", folder, keep=1)

    policy = share_policy(layout, config)
    optimizer = build_optimizer(policy, config)
    take_step(policy, optimizer, 1)
    checkpoints.save(1, policy, optimizer, Totals())
    saved = {name: weight.clone() for name, weight in served.items()}
    take_step(policy, optimizer, 2)
    for number, (name, weight) in enumerate(served.items()):  # of step 2 one weight in three arrived, and half of one
        arrived = (weight.numel(), 0, weight.numel() // 2)[number % 3]
        weight.view(-1)[arrived:] = saved[name].view(-1)[arrived:]
    assert any(not torch.equal(weight, saved[name]) for name, weight in served.items())

    again = share_policy(layout, config)
    assert checkpoints.restore(again, build_optimizer(again, config)).step == 1
    again.write_live_weights()
    assert [name for name, weight in served.items() if not torch.equal(weight, saved[name])] == []
    changed = {name for name, weight in served.items() if not torch.equal(weight, original[name])}
    assert changed == {name for name in served if is_trained(name)}


def test_a_file_is_one_engines_and_goes_with_it(shared, tmp_path):
    file = tmp_path / "weights"
    (tmp_path / "weights.claim").touch()  # of an engine that was killed
    with claimed(file):
        with pytest.raises(SyncError, match=f"another engine shares its weights through {file}"), claimed(file):
            pass
        assert file.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    with claimed(file):
        pass


def test_removal_leaves_nothing(shared, tmp_path):
    remove_shared_file(tmp_path / "weights")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


HERE = Path("/here")
WEIGHTS = Path("/dev/shm/w")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture
def engine(folder, tmp_path):
    return SmallEngine(folder, weights_file=tmp_path / "shared.weights")


@pytest.fixture
def no_variables(monkeypatch, tmp_path):
    for name in ("VLLM_BRIDGE_CONFIG_PATH", "LOGDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def attach(folder, tmp_path, url, path):
    config = TrainConfig(model=str(folder), save_path=tmp_path / "saved", engine_url=url, vllm_config_path=path)
    return choose_sync(config).attach()


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, "/dev/shm/w.json"),
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "1"}, "/here/vllm_bridge_config.json"),
        ({"VLLM_ENABLE_SHARED_WEIGHTS": "1", "LOGDIR": "/logs"}, "/logs/vllm_bridge_config.json"),
        ({"VLLM_BRIDGE_CONFIG_PATH": "/b.json", "LOGDIR": "/logs"}, "/b.json"),
    ],
)
def test_bridge_file_is_written_by_environment_or_beside_weights(env, place):
    assert bridge_file_path(WEIGHTS, env, HERE) == Path(place)


def test_auto_finds_it_where_an_engine_of_that_environment_writes_it(tmp_path):
    logs, here = tmp_path / "logs", tmp_path / "here"
    env = {"VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "b.json"), "LOGDIR": str(logs)}
    assert find_bridge_file(env, here) is None
    for place in (here / FILE_NAME, logs / FILE_NAME, tmp_path / "b.json"):  # each goes before the last
        place.parent.mkdir(exist_ok=True)
        place.write_text("{}")
        assert find_bridge_file(env, here) == place
    assert find_bridge_file({}, here) == here / FILE_NAME


def test_it_says_model_dtype_shapes_strides_and_process_and_is_private(engine, tmp_path):
    file = tmp_path / "folder" / FILE_NAME
    write_bridge_file(file, engine.layout)
    written = json.loads(file.read_text())
    assert (written["model"], written["dtype"]) == (str(engine.folder), "float32")
    assert (written["owner"]["pid"], written["owner"]["started"]) == (os.getpid(), this_process().started)
    expected = {name: (list(p.shape), list(p.stride())) for name, p in engine.base.named_parameters()}
    assert {p["name"]: (p["shape"], written["strides"][p["name"]]) for p in written["parameters"]} == expected
    assert file.stat().st_mode & 0o777 == 0o600
    assert [f.name for f in file.parent.iterdir()] == [FILE_NAME]
    assert read_bridge_file(file) == engine.layout


def test_a_file_that_was_changed_is_refused(engine, tmp_path):
    file = tmp_path / FILE_NAME
    write_bridge_file(file, engine.layout)
    file.write_text(file.read_text().replace('"offset":64', '"offset":128', 1).replace('"num_bytes":', '"num_bytes":1'))
    with pytest.raises(ConfigError, match="its checksum is another"):
        read_bridge_file(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="does not say where weights lie"):
        read_bridge_file(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_bridge_file(tmp_path / "none.json")


def test_an_engine_removes_its_own_file_and_no_other(engine, tmp_path):
    file = tmp_path / FILE_NAME
    other = msgspec.structs.replace(engine.layout, owner=ProcessIdentity(pid=1, started=1))
    write_bridge_file(file, other)
    remove_bridge_file(file, engine.layout)
    assert file.exists()
    write_bridge_file(file, engine.layout)
    remove_bridge_file(file, engine.layout)
    assert not file.exists()


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return ProcessIdentity(pid=process.pid, started=1)


@pytest.mark.parametrize("named", [True, False])
def test_a_file_of_an_earlier_process_is_refused_by_name(engine, folder, tmp_path, no_variables, named):
    file = Path.cwd() / FILE_NAME
    numbers_again = ProcessIdentity(pid=os.getpid(), started=this_process().started - 1)  # given to another process
    with serving(engine) as url:
        for owner in (ended_process(), numbers_again):
            write_bridge_file(file, msgspec.structs.replace(engine.layout, owner=owner))
            with pytest.raises(
                SyncError, match=f"{FILE_NAME} was left by process {owner.pid}, which has ended"
            ) as error:
                attach(folder, tmp_path, url, file if named else Path("auto"))
            assert "delete the file" in error.value.fix


def test_bridge_file_must_agree_with_the_engine(engine, folder, tmp_path, no_variables):
    file = Path.cwd() / FILE_NAME
    write_bridge_file(file, engine.layout)
    engine.version, engine.is_paused = 4, True
    with serving(engine) as url:
        for path in (file, Path("auto"), None):
            attached = attach(folder, tmp_path, url, path)
            assert (attached.layout.policy_version, attached.layout.is_held) == (4, True)
        other = SmallEngine(folder, weights_file=tmp_path / "other.weights")
        write_bridge_file(file, other.layout)
        with pytest.raises(SyncError, match=r"names other weights than the engine at .* serves"):
            attach(folder, tmp_path, url, file)


def test_auto_asks_the_engine_where_there_is_no_file(engine, folder, tmp_path, no_variables):
    with serving(engine) as url:
        attached = attach(folder, tmp_path, url, Path("auto"))
    assert attached.layout == msgspec.structs.replace(engine.layout, policy_version=0)
    assert torch.float32.itemsize * math.prod(attached.layout.parameters[0].shape) <= attached.layout.num_bytes
