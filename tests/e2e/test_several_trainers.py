"""Two trainer processes as users start them, against a real hub and a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.processes import end_of, environment, free_port, running, wait_until_healthy
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model

TIMEOUT_S = 6  # of the ranks; the trainer waits longer than that for a batch


def post_groups(hub, num_groups):
    for tag in range(num_groups):
        group = {
            "tokens": [[5, 6, 10 + tag, 1], [5, 6, 20 + tag, 1]], "masks": [[-100, -100, 10, 1]] * 2,
            "scores": [0.0, 1.0], "inference_logprobs": [[1.0, 1.0, -4.0, -4.0]] * 2,
        }  # fmt: skip
        assert httpx.post(f"{hub.url}/scored_data", json=group, timeout=30).status_code == 200


def wait_for(condition, what, process, log, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, end_of(log)
        assert time.monotonic() < deadline, f"{what}:\n{end_of(log)}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.full  # tests/unit/train/test_ranks.py trains several ranks in real processes
def test_two_trainers_train_publish_wait_and_stop_as_one(tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    port, engine_log, log = free_port(), tmp_path / "engine.log", tmp_path / "trainers.log"
    engine_url = f"http://127.0.0.1:{port}"
    flags = ("--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1")
    with (
        HubProcess(tmp_path) as hub,
        running("engine", *flags, "--weights-file", str(tmp_path / "shared.weights"), log=engine_log) as engine,
    ):
        wait_until_healthy(f"{engine_url}/health", engine, engine_log)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
            "-m", "treadle", "train", "--model", str(model), "--device", "cpu", "--hub-url", hub.url,
            "--engine-url", engine_url, "--save-path", str(tmp_path / "out"), "--batch-size", "4", "--steps", "3",
            "--lr", "0.001", "--warmup-steps", "0", "--micro-tokens", "4", "--share-prompts", "off",
            "--ranks-timeout-s", str(TIMEOUT_S),
        ]  # fmt: skip
        with log.open("ab") as output:
            trainers = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            wait_for(lambda: "trainer ready" in log.read_text(), "not ready", trainers, log)
            post_groups(hub, 4)
            wait_for(lambda: "trainer step step=2" in log.read_text(), "no second step", trainers, log)
            time.sleep(TIMEOUT_S + 2)
            assert trainers.poll() is None, end_of(log)  # to wait for a batch is not to be silent
            trainers.terminate()
            trainers.wait(30)
        finally:
            trainers.kill()
            trainers.wait()
        log_text = log.read_text()
        assert log_text.count("trainer stopped") == 1  # rank 0 says it for all
        assert log_text.count("trainer step step=1") == 1
        manifest = json.loads((tmp_path / "out" / "step_2" / "trainer.json").read_text())
        assert manifest["step"] == 2
        assert {name for name in manifest["sha256"] if name.startswith("state")} == {"state-000.tensors"}
        rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "step" in row] == [1, 2]
        answer = httpx.post(f"{engine_url}/generate", json={"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 1})
        assert answer.json()["policy_version"] == 2
        assert httpx.get(f"{hub.url}/status").json()["current_step"] == 2
        before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out/step_2/model.safetensors")
        assert all(not after[name].equal(before[name]) for name in after)


@pytest.mark.slow
@pytest.mark.full
def test_two_trainers_publish_and_save_merged_adapters(tmp_path):
    """Fingerprints and canary prove each publish of the merged weights; the final model has them too."""
    model, saved = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2), tmp_path / "out"
    port, engine_log, log = free_port(), tmp_path / "engine.log", tmp_path / "trainers.log"
    engine_url = f"http://127.0.0.1:{port}"
    flags = ("--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1")
    with (
        HubProcess(tmp_path) as hub,
        running("engine", *flags, "--adapter-root", str(saved), log=engine_log) as engine,
    ):
        wait_until_healthy(f"{engine_url}/health", engine, engine_log)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
            "-m", "treadle", "train", "--model", str(model), "--device", "cpu", "--hub-url", hub.url,
            "--engine-url", engine_url, "--save-path", str(saved), "--batch-size", "4", "--steps", "2",
            "--lr", "0.01", "--warmup-steps", "0", "--lora", "true", "--weight-bridge-mode", "reload",
            "--merge-final", "true", "--verify-publish", "always",
        ]  # fmt: skip
        with log.open("ab") as output:
            trainers = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            wait_for(lambda: "trainer ready" in log.read_text(), "not ready", trainers, log)
            post_groups(hub, 4)
            assert trainers.wait(120) == 0, end_of(log)
        finally:
            trainers.kill()
            trainers.wait()
        answer = httpx.post(f"{engine_url}/generate", json={"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 1})
        assert answer.json()["policy_version"] == 2
    rows = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    assert [row["sync/canary_mean_abs_diff"] < 1e-4 for row in rows if "step" in row] == [True, True]
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    merged = PeftModel.from_pretrained(base, saved / "final_adapter").merge_and_unload().state_dict()
    final, start = load_file(saved / "final_model/model.safetensors"), load_file(model / "model.safetensors")
    assert final.keys() == start.keys()
    for name, weight in final.items():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=1e-5)
    assert any(not weight.equal(start[name]) for name, weight in final.items())


@pytest.mark.slow
@pytest.mark.full  # tests/unit/train/test_ranks.py: a lost rank ends the others
def test_a_killed_rank_ends_the_other_before_its_timeout(tmp_path):
    """Started by hand, with the flags that Atropos' trainer has; rank 0 waits for a batch, outside of any exchange."""
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    logs, trainers, port = [tmp_path / f"rank{rank}.log" for rank in (0, 1)], [], free_port()
    with HubProcess(tmp_path) as hub:
        try:
            for rank in (0, 1):
                command = [
                    sys.executable, "-m", "treadle", "train", "--model", str(model), "--device", "cpu",
                    "--hub-url", hub.url, "--weight-bridge-mode", "offline", "--save-path", str(tmp_path / "out"),
                    "--trainer-rank", str(rank), "--ranks", "2", "--init-method", f"tcp://127.0.0.1:{port}",
                ]  # fmt: skip
                with logs[rank].open("ab") as output:
                    trainers.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment()))
            wait_for(lambda: "waiting_for_batch" in logs[0].read_text(), "not waiting", trainers[0], logs[0])
            trainers[1].kill()
            assert trainers[0].wait(40) == 1
        finally:
            for trainer in trainers:
                trainer.kill()
                trainer.wait()
    assert "treadle: rank 0 of 2 lost rank 1 (process " in logs[0].read_text()
