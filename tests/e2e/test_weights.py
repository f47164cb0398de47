"""Weights across a process border: the trainer writes, the engine answers, and each answer names its version."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.sync.shared_vllm import SingleCopySync
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import share_policy
from treadle.wire.groups import ScoredGroup

PROMPT = [20, 21, 22, 23]
CONFIG = TrainConfig(device="cpu", micro_tokens=100_000)


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    model = write_tiny_model(folder / "model")
    port, log = free_port(), folder / "engine.log"
    flags = ("--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1")
    with running("engine", *flags, "--weights-file", str(folder / "shared.weights"), log=log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(f"{url}/health", process, log)
        yield url
    assert not (folder / "shared.weights").exists(), "the engine leaves its shared file behind"


@pytest.fixture(scope="module")
def policy_and_sync(engine_url):
    sync = SingleCopySync(CONFIG.model_copy(update={"engine_url": (engine_url,)}))
    policy = share_policy(sync.fetch_layout(), CONFIG)
    return policy, build_optimizer(policy, CONFIG).masters, sync


def generate(url, **fields):
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 30, "logprobs": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs_of(answer, i):
    return [next(iter(position[0].values())) for position in answer["logprobs"][i]]


def score_with_trainer(policy, answer, temperature):
    """Trainer logprobs of every sampled token of an answer."""
    completions = answer["token_ids"]
    group = ScoredGroup(
        tokens=[PROMPT + c for c in completions],
        masks=[[-100] * len(PROMPT) + c for c in completions],
        scores=[float(i) for i in range(len(completions))],
        inference_logprobs=[[1.0] * len(PROMPT) + logprobs_of(answer, i) for i in range(len(completions))],
        generation_params={"temperature": temperature},
    )
    (micro,) = pack([group], CONFIG).micros
    with torch.no_grad():
        return policy.score(micro)[0], micro.loss_tokens.rollout_logprobs_L


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_engine_agree_on_logprobs_in_fp32(engine_url, policy_and_sync, temperature):
    policy, masters, sync = policy_and_sync
    for version in (1, 2):
        with torch.no_grad():
            for master in masters.values():
                master.add_(torch.randn_like(master) * 0.02)
        sync.publish(policy, version)
        answer = generate(engine_url, n=4, seed=version, temperature=temperature)
        assert answer["policy_version"] == version
        ours, engines = score_with_trainer(policy, answer, temperature)
        assert len(ours) == 120
        difference = (ours - engines).abs().max().item()
        print(f"max |trainer - engine| = {difference:.2e} at version {version}, temperature {temperature}")
        assert difference < 1e-4


def test_every_answer_names_the_versions_it_came_from(engine_url, policy_and_sync):
    """30 publishes of two very different policies under load. An answer of one version is entirely that policy's; one
    that was frozen and went on under new weights says so, and began as the older policy would."""
    policy, masters, sync = policy_and_sync
    generator = torch.Generator().manual_seed(3)
    base = {n: m.detach().clone() for n, m in masters.items()}
    noise = {n: torch.randn(m.shape, generator=generator) * 0.1 for n, m in masters.items()}

    def set_policy(version):
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(base[name] + noise[name] * (version % 2))

    expected = {}
    for version in (0, 1):
        set_policy(version)
        sync.publish(policy, version)
        expected[version] = generate(engine_url, n=2, temperature=0.0)["token_ids"]
    assert expected[0] != expected[1], "the two policies must differ for this test to mean anything"
    stop = threading.Event()
    answers = []

    def ask_until_stopped():
        while not stop.is_set():
            answers.append(generate(engine_url, n=2, temperature=0.0))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask_until_stopped) for _ in range(4)]
        for version in range(2, 32):
            set_policy(version)
            sync.publish(policy, version)
            deadline, seen = time.monotonic() + 30, len(answers)
            while len(answers) == seen and time.monotonic() < deadline:
                time.sleep(0.01)
        stop.set()
        for client in clients:
            client.result()
    whole = mixed = 0
    for answer in answers:
        for i, (tokens, versions) in enumerate(zip(answer["token_ids"], answer["policy_versions"], strict=True)):
            first = expected[versions[0] % 2][i]
            assert versions == sorted(set(versions))
            assert tokens == first if len(versions) == 1 else tokens[0] == first[0]
            whole, mixed = whole + (len(versions) == 1), mixed + (len(versions) > 1)
    print(f"{whole} completions of one version, {mixed} of several")
    assert whole > 0
    assert mixed > 0


def test_bad_requests_are_answered_with_a_sentence(engine_url):
    cases = [
        ({"prompt": "hi", "max_tokens": 10_000}, "max-model-len"),
        ({"prompt": {"prompt_token_ids": [99999]}}, "prompt_token_ids"),
        ({"prompt": "hi", "temprature": 1.0}, "temprature"),
        ({"prompt": "hi", "n": 0}, "n and max_tokens"),
        ({"prompt": "hi", "n": 1000}, "max-num-seqs"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": "hi", "top_p": 0}, "out of range"),
    ]
    for body, words in cases:
        answer = httpx.post(f"{engine_url}/generate", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    assert httpx.post(f"{engine_url}/generate", content=b"{nonsense").status_code == 400
    assert httpx.get(f"{engine_url}/health").json()["status"] == "ok"


def test_a_text_prompt_and_a_missing_wave_member(engine_url):
    answer = httpx.post(f"{engine_url}/generate", json={"prompt": "Say 7", "max_tokens": 3, "ignore_eos": True}).json()
    assert answer["prompt"] == "Say 7"
    assert "logprobs" not in answer
    assert len(answer["token_ids"][0]) == 3
