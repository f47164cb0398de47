"""`treadle engine` with vLLM as a process: default model, no shared weights, no adapters, raw logprobs. The last test
stops it."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import httpx
import psutil
import pytest

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.vllm.conftest import HAS_GPU, SAME, START_S, vllm_processes, wait_until, words_of
from tests.vllm.reference import load, mean_difference
from treadle.config import DEFAULT_MODEL
from treadle.engines.interface import SampledCompletion
from treadle.engines.models import resolve_model
from treadle.engines.tokenizer import ModelTokenizer
from treadle.sync.fingerprint import fingerprints as fingerprints_of

CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
STOP_S = 30.0  # vLLM has six seconds to exit by itself; the rest is for a busy machine


@dataclass(frozen=True)
class EngineProcess:
    url: str
    process: Popen
    folder: Path

    def post(self, route, **body):
        return httpx.post(self.url + route, json=body, timeout=START_S)

    def get(self, route):
        return httpx.get(self.url + route, timeout=60)

    def generate(self, prompt_ids, **fields):
        answer = self.post("/generate", prompt={"prompt_token_ids": prompt_ids}, logprobs=0, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("engine") / "engine.log"
    flags = ["--engine", "vllm", "--dtype", "float32", "--port", str(port)]
    # Before it serves, vLLM computes a prompt as long as it takes at once; of this model that is most of its start.
    flags += ["--max-num-seqs", "8", "--max-model-len", "256", "--gpu-memory-utilization", "0.1", "--threads", "1"]
    flags.append("--vllm-args=--max-num-batched-tokens 256" + " --kv-cache-memory-bytes=1G" * HAS_GPU)
    with running("engine", *flags, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(f"{url}/health", process, log, timeout_s=START_S)
        yield EngineProcess(url, process, resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def prompt_ids(engine):
    return ModelTokenizer.load(engine.folder).encode(CAPITAL)


def test_a_real_model_answers_and_ends_by_itself(engine, prompt_ids):
    answer = engine.generate(prompt_ids, max_tokens=24, temperature=0.0)
    assert answer["text"] == ["The capital of France is Paris."]
    assert answer["finish_reasons"] == ["stop"]
    assert answer["policy_versions"] == [[0]]


@pytest.mark.full  # with the default model; test_vllm_api.py compares logprobs of a small one
def test_logprobs_at_temperature_1_are_the_models(engine, prompt_ids):
    answer = engine.generate(prompt_ids, n=4, max_tokens=24, temperature=1.0, ignore_eos=True)
    completions = [
        SampledCompletion(token_ids, [next(iter(position[0].values())) for position in logprobs])
        for token_ids, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True)
    ]
    assert mean_difference(load(engine.folder), prompt_ids, completions) < SAME


def test_without_a_weights_file_fingerprints_are_still_reported(engine):
    assert engine.get("/bridge/info").json()["shared_weights"] is False
    assert engine.get("/bridge/state_dict_info").status_code == 404
    theirs = engine.post("/bridge/fingerprints", policy_version=1).json()["fingerprints"]
    assert theirs == fingerprints_of(load(engine.folder).named_parameters(), 1)


def test_adapters_are_refused_without_enable_lora(engine, tmp_path):
    refused = engine.post("/lora/load", adapter_path=str(tmp_path), policy_version=1)
    assert refused.status_code == 503
    assert "takes no adapters" in refused.json()["error"]
    assert "--enable-lora" in refused.json()["error"]


@pytest.mark.full  # tests/unit/engines/test_vllm_parts.py stops a server while it starts
def test_a_stop_during_a_restart_leaves_no_process(engine):
    first = {p.pid for p in vllm_processes()}
    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(engine.post, "/bridge/restart", model_path=str(engine.folder), policy_version=1)
        wait_until(lambda: any(p.pid not in first and "EngineCor" in "".join(words_of(p)) for p in vllm_processes()))
        begun = psutil.Process(engine.process.pid).children(recursive=True)
        stopped = time.monotonic()
        engine.process.terminate()
        assert engine.process.wait(STOP_S) == 0
        assert time.monotonic() - stopped < STOP_S
        with contextlib.suppress(httpx.TransportError):  # the engine may have exited before it answered
            assert restarting.result(STOP_S).status_code >= 500
    wait_until(lambda: not any(map(words_of, begun)), deadline_s=STOP_S)
