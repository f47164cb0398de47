"""The server's life: started, killed, begun anew with another model. The tests follow one another."""

from __future__ import annotations

import signal
import time

import pytest
from tokenizers import Tokenizer

from tests.vllm.conftest import Served, vllm_processes
from tests.vllm.reference import load, mean_difference
from treadle.config import DEFAULT_MODEL, EngineConfig
from treadle.engines.models import resolve_model
from treadle.engines.port import Request
from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError
from treadle.sync.fingerprint import fingerprint

PROMPT = [20, 21, 22, 23, 30]
CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
START_S = 180.0


@pytest.fixture(scope="module")
def served(tiny_model):
    config = EngineConfig(engine="vllm", dtype="float32", max_num_seqs=16, logprobs_mode="raw_logprobs")
    served = Served(config, tiny_model)
    yield served
    served.close()


def request(**changes):
    given = {"prompt_ids": PROMPT, "n": 1, "max_tokens": 24, "sampling": SamplingParams(), "ignore_eos": True}
    return Request(**given | changes)


def wait_until(condition, deadline_s=30.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def test_raw_logprobs_are_the_models_at_temperature_1(served, tiny_model):
    generation = served(served.engine.generate(request(n=8, sampling=SamplingParams(temperature=0.5, top_p=0.9))))
    assert mean_difference(load(tiny_model), PROMPT, generation.completions) < 1e-4


def test_without_a_file_no_weights_are_shared_but_their_fingerprints_are_told(served, tiny_model):
    assert served(served.engine.layout()) is None
    theirs = served(served.engine.fingerprints(1))
    assert theirs == {name: fingerprint(p, 1) for name, p in load(tiny_model).named_parameters()}


def test_adapters_need_an_engine_that_was_started_for_them(served, tmp_path):
    with pytest.raises(EngineError, match="takes no adapters") as caught:
        served(served.engine.load_adapter("a", tmp_path, 1))
    assert "--enable-lora" in caught.value.fix


def test_a_restart_from_nothing_is_refused_and_the_server_goes_on(served, tmp_path):
    with pytest.raises(RequestError, match="safetensors"):
        served(served.engine.restart(tmp_path, None, 1))
    assert len(served(served.engine.generate(request())).completions[0].token_ids) == 24


def test_a_killed_engine_ends_every_request_and_is_not_healthy(served):
    engine = served.engine
    running = [served.begin(engine.generate(request(max_tokens=240))) for _ in range(3)]
    wait_until(lambda: served(engine.state()).num_running == 3)
    served(engine.hold("keep", 30))
    waiting = served.begin(engine.generate(request()))
    next(p for p in vllm_processes() if "EngineCor" in " ".join([p.name(), *p.cmdline()])).send_signal(signal.SIGKILL)
    for unfinished in [*running, waiting]:
        with pytest.raises(EngineError):
            unfinished.result(30)
    wait_until(lambda: served(engine.state()).failure is not None)
    with pytest.raises(EngineError):
        served(engine.generate(request()), timeout_s=30)
    with pytest.raises(EngineError):
        served(engine.hold("keep", 5), timeout_s=60)


def test_a_restart_brings_it_back_with_another_model_and_serves_those_who_waited(served):
    engine = served.engine
    smollm2 = resolve_model(DEFAULT_MODEL)
    prompt = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(CAPITAL).ids
    restarting = served.begin(engine.restart(smollm2, None, 7))
    wait_until(lambda: served(engine.state()).failure is None)
    asked = request(prompt_ids=prompt, sampling=SamplingParams(temperature=0), ignore_eos=False)
    waiting = served.begin(engine.generate(asked))
    restarting.result(START_S)
    (answer,) = waiting.result(30).completions
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.policy_versions == [7]
    state = served(engine.state())
    assert (state.policy_version, state.is_held, state.failure) == (7, False, None)
    assert engine.facts.folder == smollm2
    sampled = served(engine.generate(request(prompt_ids=prompt, n=8, max_tokens=32)))
    assert mean_difference(load(smollm2), prompt, sampled.completions) < 1e-4
    theirs = served(engine.fingerprints(3))
    assert theirs == {name: fingerprint(p, 3) for name, p in load(smollm2).named_parameters()}
