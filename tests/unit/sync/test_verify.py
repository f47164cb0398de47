"""Engines that fail at a publish: each failure is detected, and the error names it and its cause."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import Faults, SmallEngine, serving
from tests.unit.sync.test_modes import Trainer
from treadle.errors import SyncError
from treadle.sync.protocol import EngineLink
from treadle.sync.verify import check_saved_weights, explain
from treadle.wire.bridge import BridgeInfo

GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
RELOAD = {"weight_bridge_mode": "reload"}
LORA = {"weight_bridge_mode": "lora_only"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.mark.parametrize(
    ("faults", "settings", "words"),
    [
        (Faults(skips="layers.1.self_attn.o_proj.weight"), RELOAD,
         r"1 of 20 weights differ, model\.layers\.1\.self_attn\.o_proj\.weight: skipped or half written"),
        (Faults(halves="model.norm.weight"), RELOAD, r"1 of 20 weights differ, model\.norm\.weight: skipped or half"),
        (Faults(swaps=(GATE, UP)), RELOAD,
         r"layers\.1\.mlp\.gate_proj\.weight and .*up_proj\.weight have changed places"),
        (Faults(skips="weight"), RELOAD, r"of 20 weights differ, .*: the engine has other weights than were published"),
        (Faults(recasts=torch.bfloat16), RELOAD, r"the engine's weights are bfloat16, the trainer's float32"),
        (Faults(version_error=1), RELOAD, r"says that it serves version 2 after a publish of 1"),
        (Faults(version_error=1), {}, r"says that it serves version 2 after a publish of 1"),
        (Faults(fails_in="/reload_weights"), RELOAD, r"failed in POST /reload_weights \(500\): the card is gone"),
        (Faults(version_error=-1), LORA, r"serves version 0 after a publish of 1"),
        (Faults(ignores_adapters=True), LORA,
         r"weights differ, model\.layers\.0\.self_attn\.q_proj\.lora_.*: the engine has other weights than were"),
        (Faults(skips="layers.1.self_attn.q_proj.lora_B"), LORA,
         r"the engine has no model\.layers\.1\.self_attn\.q_proj\.lora_B"),
    ],
    ids=["skipped", "half written", "swapped halves", "not loaded", "dtype", "version", "version, one copy", "fails",
         "adapter not served", "adapter before", "half an adapter"],
)  # fmt: skip
def test_a_publish_that_went_wrong_is_caught_and_named(folder, tmp_path, faults, settings, words):
    engine = SmallEngine(folder, weights_file=None if settings else tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, **settings)
        trainer.publish(0)
        engine.faults = faults
        with pytest.raises(SyncError, match=words) as error:
            trainer.run(first=1, last=2)  # what the engine's weights are is known before the second is written
        assert engine.version < 2 + max(0, faults.version_error)
    print(error.value)
    assert error.value.fix


def publish_with_canaries(trainer, engine, faults):
    trainer.publish(0)
    engine.faults = faults
    trainer.run(first=1, last=4)


@pytest.mark.parametrize(
    "settings", [RELOAD, {}, {"weight_bridge_mode": "lora_only"}], ids=["reload", "one copy", "lora"]
)
def test_an_engine_that_answers_from_a_stale_cache_is_caught_by_the_canary(folder, tmp_path, settings):
    engine = SmallEngine(folder, weights_file=None if settings else tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, verify_publish="always", **settings)
        with pytest.raises(SyncError, match="from what it cached under earlier weights") as error:
            publish_with_canaries(trainer, engine, Faults(keeps_cache=True))
    print(error.value)
    assert "after the publish of version" in str(error.value)


def test_an_adapter_that_does_not_answer_is_caught_by_the_canary(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, verify_publish="always", weight_bridge_mode="lora_only")
        with pytest.raises(SyncError, match="the engine did not load this adapter") as error:
            publish_with_canaries(trainer, engine, Faults(leaves_adapters=True))
    print(error.value)


def test_canaries_keep_to_their_share_and_the_last_publish_has_one(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("treadle.sync.verify.CANARY_SHARE", 1e-4)

    def canaries(verify_publish):
        with serving(SmallEngine(folder)) as url:
            trainer = Trainer(folder, tmp_path, url, **RELOAD, verify_publish=verify_publish)
            trainer.run()
        return [receipt.verified.canary_mean is not None for receipt in trainer.receipts]

    assert canaries("auto") == [True, False, False, False, False, False, True]
    assert all(canaries("always"))


def test_a_tolerance_can_be_set_and_verification_switched_off(folder, tmp_path):
    for settings in ({"canary_tolerance": 100.0, "verify_publish": "always"}, {"verify_publish": "off"}):
        engine = SmallEngine(folder)
        with serving(engine) as url:
            trainer = Trainer(folder, tmp_path, url, weight_bridge_mode="lora_only", **settings)
            publish_with_canaries(trainer, engine, Faults(keeps_cache=True))
            assert ("/generate" in engine.calls) == ("canary_tolerance" in settings)


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("/bridge/adopt", {}), ("/bridge/fingerprints", {}), ("/reload_weights", RELOAD),
        ("/lora/load", {"weight_bridge_mode": "lora_only"}), ("/generate", RELOAD),
    ],
)  # fmt: skip
def test_an_engine_that_hangs_ends_in_an_error_at_the_deadline(folder, tmp_path, path, settings):
    for timeout_s in (0.5, 5.0):  # with the short one another call may be late on a busy machine
        own = tmp_path / str(timeout_s)
        own.mkdir()
        engine = SmallEngine(folder, weights_file=None if settings else own / "shared.weights")

        def publish(engine, url, own=own, timeout_s=timeout_s):
            trainer = Trainer(folder, own, url, publish_timeout_s=timeout_s, **settings)
            engine.faults = Faults(hangs_in=path)
            trainer.publish(0)

        started = time.monotonic()
        with serving(engine) as url, pytest.raises(SyncError, match=r"did not answer (GET|POST) /.* within") as error:
            publish(engine, url)
        assert time.monotonic() - started < 30
        if f"POST {path} within" in str(error.value):
            break
    assert f"POST {path} within" in str(error.value)
    assert "--publish-timeout-s" in error.value.fix


@pytest.mark.parametrize("settings", [{}, RELOAD], ids=["one copy", "reload"])
def test_training_goes_on_while_the_engine_reads_its_weights(folder, tmp_path, settings):
    engine = SmallEngine(folder, weights_file=None if settings else tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, publish_timeout_s=3.0, **settings)
        trainer.publish(0)
        engine.faults = Faults(hangs_in="/bridge/fingerprints")
        trainer.step(1)
        trainer.publish(1)  # it would raise this error if it waited
        trainer.step(2)
        with pytest.raises(SyncError, match="did not answer POST /bridge/fingerprints within"):
            trainer.publish(2)
        assert engine.version == 1


def test_a_step_is_not_counted_before_its_weights_are_verified(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, vllm_restart_interval=3, **RELOAD)
        trainer.run(last=2)
        engine.faults = Faults(fails_in="/bridge/fingerprints")
        trainer.run(first=3, last=3)
        with pytest.raises(SyncError, match="the card is gone"):
            trainer.run(first=4, last=4)


def test_a_restart_that_hangs_is_raised_by_the_publish_after_it(folder, tmp_path):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(
            folder, tmp_path, url, publish_timeout_s=2.0, weight_bridge_mode="none", vllm_restart_interval=1
        )
        trainer.publish(0)
        engine.faults = Faults(hangs_in="/bridge/restart")
        trainer.step(1)
        trainer.publish(1)  # pending
        trainer.step(2)
        with pytest.raises(SyncError, match="did not answer POST /bridge/restart"):
            trainer.publish(2)


ENGINE_THAT_ENDS = """
import sys, uvicorn, os
from pathlib import Path
from tests.unit.sync.small_engine import SmallEngine
engine = SmallEngine(Path(sys.argv[1]), weights_file=Path(sys.argv[2]))
uvicorn.run(engine.app(), port=int(sys.argv[3]), log_level="critical")
"""


def test_an_engine_that_dies_in_the_middle_of_a_publish_is_named_at_once(folder, tmp_path):
    from tests.e2e.processes import environment, free_port

    port = free_port()
    command = [sys.executable, "-c", ENGINE_THAT_ENDS, str(folder), str(tmp_path / "shared.weights"), str(port)]
    process = subprocess.Popen(command, env=environment(PYTHONPATH="."))
    try:
        trainer = Trainer(folder, tmp_path, f"http://127.0.0.1:{port}")
        trainer.publish(0)
        trainer.step(1)
        write = trainer.policy.write_step

        def write_and_kill():  # it is held, the weights are written, and then it is gone
            write()
            process.kill()
            process.wait()

        trainer.policy.write_step = write_and_kill
        started = time.monotonic()
        with pytest.raises(SyncError, match="ended during POST /bridge/adopt") as error:
            trainer.publish(1)
        print(error.value)
        assert time.monotonic() - started < 10
        assert "treadle run --resume" in error.value.fix
    finally:
        process.kill()
        process.wait()


def test_a_restarted_engine_is_detected_before_a_write(folder, tmp_path):
    engine = SmallEngine(folder, weights_file=tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url)
        trainer.run(last=2)
        trainer.sync.settle()  # version 2 is verified in the background
        engine.weights_file = tmp_path / "other.weights"
        engine._load(folder)
        engine.version = 0
        trainer.step(3)
        with pytest.raises(SyncError, match="serves version 0, where 2 was published last: it was restarted"):
            trainer.publish(3)
        assert not engine.is_paused  # it keeps serving the run that it belongs to


def test_an_engine_with_other_memory_is_detected_before_a_write(folder, tmp_path):
    engine = SmallEngine(folder, weights_file=tmp_path / "shared.weights")
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url)
        trainer.run(last=2)
        engine.weights_file = tmp_path / "other.weights"
        engine._load(folder)  # and it says nothing
        trainer.step(3)
        with pytest.raises(SyncError, match="its weights lie elsewhere than where they were attached"):
            trainer.publish(3)


def test_an_engine_that_is_not_there_is_waited_for_and_then_named():
    link = EngineLink("http://127.0.0.1:9", timeout_s=1.0)
    with pytest.raises(SyncError, match="not there after 0 s") as error:
        link.wait_for("/bridge/info", BridgeInfo, wait_s=0.3)
    assert "--engine-url" in error.value.fix


def test_a_frozen_engine_ends_in_an_error_too(folder, tmp_path):
    """The whole process is stopped, as after a lost GPU, not only one request."""
    from tests.e2e.processes import environment, free_port

    port = free_port()
    command = [sys.executable, "-c", ENGINE_THAT_ENDS, str(folder), str(tmp_path / "shared.weights"), str(port)]
    process = subprocess.Popen(command, env=environment(PYTHONPATH="."))
    try:
        trainer = Trainer(folder, tmp_path, f"http://127.0.0.1:{port}", publish_timeout_s=1.0)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(SyncError, match="did not answer POST /bridge/adopt within 1 s"):
            trainer.publish(0)
    finally:
        process.kill()
        process.wait()


def test_what_differs_is_explained_by_what_it_looks_like():
    own = {"a": "1", "b": "2", "c": "3", "d": "4"}
    same = {"own_dtype": "bfloat16", "engine_dtype": "bfloat16"}
    assert "has no d: it serves another model" in explain(own, {"a": "1", "b": "2", "c": "3"}, **same)[0]
    assert "which the trainer does not know" in explain(own, own | {"e": "5"}, **same)[0]
    assert explain(own, own | {"c": "x"}, **same)[0].startswith("1 of 4 weights differ, c: skipped")
    assert explain(own, own | {"b": "x", "c": "y"}, **same)[0].startswith("2 of 4 weights differ, b, c: skipped")
    assert (
        "4 of 4 weights differ, a, b, c and 1 more: the engine has other weights"
        in explain(own, dict.fromkeys(own, "x"), **same)[0]
    )
    recast = explain(own, dict.fromkeys(own, "x"), own_dtype="float32", engine_dtype="bfloat16")
    assert recast[1] == "give engine and trainer the same --dtype"


def test_a_token_is_sent_with_every_call(folder, tmp_path, monkeypatch):
    engine = SmallEngine(folder, weights_file=tmp_path / "shared.weights")
    monkeypatch.setenv("TREADLE_ENGINE_TOKEN", "secret")
    with serving(engine) as url:
        Trainer(folder, tmp_path, url).publish(0)
    assert set(engine.tokens) == {"Bearer secret"}


def test_layers_that_an_engine_names_otherwise_are_left_to_the_canary(folder, tmp_path, monkeypatch):
    engine = SmallEngine(folder)
    original = engine._adapter_fingerprints
    monkeypatch.setattr(
        engine, "_adapter_fingerprints", lambda v: {n.replace(".v_proj.", ".w."): f for n, f in original(v).items()}
    )
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, url, **LORA)
        trainer.publish(0)
        trainer.run(first=1, last=3)
        engine.faults = Faults(ignores_adapters=True)
        with pytest.raises(SyncError, match=r"weights differ, .*q_proj\.lora_"):
            trainer.run(first=4, last=5)


GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def own_folder(tmp_path):
    return write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)


@pytest.fixture
def weights(own_folder):
    return load_file(own_folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_their_places_pass_in_the_engines_number_format(own_folder, weights, dtype):
    shared = {name: weight.to(dtype) for name, weight in weights.items()}
    assert check_saved_weights(shared.items(), own_folder) == len(weights)


def test_two_halves_in_each_others_place_are_named(own_folder, weights):
    shared = weights | {GATE: weights[UP], UP: weights[GATE]}
    with pytest.raises(SyncError, match="have changed places") as error:
        check_saved_weights(shared.items(), own_folder)
    assert GATE in str(error.value)
    assert UP in str(error.value)


def test_a_weight_that_begins_a_row_too_late_is_named(own_folder, weights):
    with pytest.raises(SyncError, match=f"1 of {len(weights)} weights differ, {GATE}"):
        check_saved_weights((weights | {GATE: weights[GATE].roll(1, 0)}).items(), own_folder)


def test_names_that_only_one_side_has_are_not_compared(own_folder, weights):
    save_file(weights | {"lm_head.weight": torch.ones(2)}, own_folder / "model.safetensors")
    assert check_saved_weights({**weights, "new.weight": torch.ones(3)}.items(), own_folder) == len(weights)


def test_only_the_files_that_are_the_model_are_looked_at(own_folder, weights):
    save_file({GATE: torch.zeros_like(weights[GATE])}, own_folder / "pytorch_model.safetensors")  # left over
    assert check_saved_weights(weights.items(), own_folder) == len(weights)
    shard = {name: weight for name, weight in weights.items() if name != GATE}
    save_file(shard, own_folder / "model-00001-of-00002.safetensors")
    save_file({GATE: weights[GATE]}, own_folder / "model-00002-of-00002.safetensors")
    save_file({GATE: torch.zeros_like(weights[GATE])}, own_folder / "model.safetensors")
    places = {name: f"model-0000{1 + (name == GATE)}-of-00002.safetensors" for name in weights}
    (own_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert check_saved_weights(weights.items(), own_folder) == len(weights)
