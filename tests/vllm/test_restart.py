"""Restart the server with models of other families, and kill it. The tests depend on their order, and run after all
others that share the server."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.vllm.conftest import SAME, START_S, wait_until, words_of
from tests.vllm.reference import load, mean_difference
from treadle.engines.interface import Request, SampledCompletion
from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.sync.shared_memory import map_weights
from treadle.sync.verify import check_saved_weights

PROMPT = [20, 21, 22, 23, 30]


def request(**changes):
    given = {"prompt_ids": PROMPT, "n": 1, "max_tokens": 24, "sampling": SamplingParams(), "ignore_eos": True}
    return Request(**given | changes)


def post(served, route, **body):
    return httpx.post(served.url + route, json=body, timeout=START_S)


def ask(served, **fields):
    """The one completion of a request over HTTP."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 24, "logprobs": 0, "ignore_eos": True, **fields}
    answer = post(served, "/generate", **body)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    logprobs = [next(iter(position[0].values())) for position in body["logprobs"][0]]
    return SampledCompletion(body["token_ids"][0], logprobs, policy_versions=body["policy_versions"][0])


def check_serves(served, folder, version):
    """Check that its weights, also in the shared file, are those of `folder`, and that it samples from them."""
    model = load(folder)
    state = served(served.engine.status())
    assert (state.policy_version, state.is_held, state.failure) == (version, False, None)
    assert served.engine.facts.folder == folder
    expected = fingerprints_of(model.named_parameters(), 3)
    assert served(served.engine.fingerprints(3)) == expected
    shared = map_weights(served(served.engine.layout()))
    assert fingerprints_of(shared.items(), 3) == expected
    assert check_saved_weights(shared.items(), folder) == len(expected)
    sampled = served(served.engine.generate(request(n=8)))
    assert mean_difference(model, PROMPT, sampled.completions) < SAME


@pytest.mark.full  # for the modes none and lora_restart; test_engine_api.py restarts the transformers engine
def test_a_restart_serves_another_model_and_requests_wait_for_it(served, qwen2_model, tmp_path):
    version = served(served.engine.status()).policy_version
    stop = threading.Event()

    def ask_until_stopped():
        answers = [ask(served)]
        while not stop.is_set():
            answers.append(ask(served))
        return answers

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_until_stopped)
        try:
            answer = post(served, "/bridge/restart", model_path=str(qwen2_model), policy_version=version + 1)
        finally:
            stop.set()
        assert answer.json()["policy_version"] == version + 1, answer.text
        answers = asking.result(START_S)  # raises if one of them failed
    assert answers[0].policy_versions in ([version], [version + 1])
    check_serves(served, qwen2_model, version + 1)
    assert post(served, "/bridge/restart", model_path=str(tmp_path / "no"), policy_version=9).status_code == 404
    with pytest.raises(RequestError, match=r"config\.json"):
        served(served.engine.restart(tmp_path, None, 9))
    check_serves(served, qwen2_model, version + 1)


def test_a_killed_engine_fails_every_request_and_is_unhealthy(served):
    engine = served.engine
    running = [served.begin(engine.generate(request(max_tokens=240))) for _ in range(3)]
    wait_until(lambda: served(engine.status()).num_running == 3)
    served(engine.hold("keep", 60))
    waiting = served.begin(engine.generate(request()))
    core = next(p for p in served.processes() if "EngineCor" in " ".join(words_of(p)))
    core.send_signal(signal.SIGKILL)
    for unfinished in [*running, waiting]:
        with pytest.raises(EngineError):
            unfinished.result(60)
    wait_until(lambda: served(engine.status()).failure is not None)
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 503
    assert health.json()["status"].startswith("failed: ")
    with pytest.raises(EngineError):
        served(engine.generate(request()), timeout_s=60)
    with pytest.raises(EngineError):
        served(engine.hold("keep", 5), timeout_s=60)


@pytest.mark.full  # a restart takes as long as a start; the restart above has waiting requests too
def test_a_restart_after_a_crash_serves_waiting_requests(served, qwen3_model):
    with ThreadPoolExecutor(2) as pool:
        restarting = pool.submit(post, served, "/bridge/restart", model_path=str(qwen3_model), policy_version=70)
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200)
        waiting = pool.submit(ask, served)
        assert restarting.result(START_S).json()["policy_version"] == 70
        assert waiting.result(START_S).policy_versions == [70]
    check_serves(served, qwen3_model, 70)
