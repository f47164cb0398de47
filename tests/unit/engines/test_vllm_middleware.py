"""The middleware's conversion of vLLM's outputs, and the order of its calls when weights change."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import prometheus_client
import pytest
from starlette.requests import Request

from treadle.engines.vllm import middleware
from treadle.engines.vllm.completions import VllmChoice, VllmLoad, VllmOutput
from treadle.engines.vllm.middleware import MIN_LOGPROB, to_output
from treadle.net.server import unless_gone
from treadle.sync.gate import PublishGate


@dataclass
class Flat:
    """vLLM's flat logprobs: at each position the sampled (or the prompt's) token first, then the top tokens."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, *positions):
        flat = cls()
        for entries in positions:
            flat.start_indices.append(len(flat.logprobs))
            for token, logprob in entries:
                flat.token_ids.append(token)
                flat.logprobs.append(logprob)
            flat.end_indices.append(len(flat.logprobs))
        return flat


def completion(token_ids, logprobs, **changes):
    given = {"index": 0, "token_ids": token_ids, "logprobs": logprobs, "text": "", "finish_reason": None}
    return SimpleNamespace(**given | changes)


def output(*completions, prompt=None):
    return SimpleNamespace(outputs=list(completions), prompt_logprobs=prompt)


def test_the_sampled_token_is_separated_from_the_top_tokens():
    flat = Flat.of([(8, -2.0), (3, -0.1), (8, -2.0)], [(4, -0.2), (4, -0.2), (9, float("-inf"))])
    answer = to_output(output(completion([8, 4], flat, text="xy")), has_text=True, num_top=2)
    tops = [{3: -0.1, 8: -2.0}, {4: -0.2, 9: MIN_LOGPROB}]
    assert answer == VllmOutput([VllmChoice(0, [8, 4], [-2.0, -0.2], tops, text="xy")])


def test_joined_stream_outputs_keep_the_sampled_token_in_top_tokens():
    flat = Flat.of([(8, -2.0), (3, -0.1), (8, -2.0)], [(4, -0.2), (9, -1.0)], [(5, -9.0), (4, -0.2), (9, -1.0)])
    (choice,) = to_output(output(completion([8, 4, 5], flat)), has_text=False, num_top=2).choices
    assert choice.tops == [{3: -0.1, 8: -2.0}, {4: -0.2, 9: -1.0}, {4: -0.2, 9: -1.0}]
    assert choice.logprobs == [-2.0, -0.2, -9.0]


def test_a_logprob_that_is_no_number_is_an_error():
    flat = Flat.of([(8, float("nan"))])
    with pytest.raises(RuntimeError, match="diverged"):
        to_output(output(completion([8], flat)), has_text=False, num_top=0)


def test_without_tops_or_text_there_are_none():
    (choice,) = to_output(output(completion([8], Flat.of([(8, -2.0)]))), has_text=False, num_top=0).choices
    assert (choice.logprobs, choice.tops, choice.text) == ([-2.0], [], None)


def test_an_output_without_tokens_has_no_logprobs():
    everything = Flat.of([(8, -2.0)], [(4, -0.2)])
    last = completion([], everything, finish_reason="abort")
    assert to_output(output(last), has_text=True, num_top=2).choices[0].logprobs == []


def test_the_first_prompt_token_has_no_logprob():
    prompt = Flat.of([], [(6, -3.0), (2, -0.5)])
    answer = to_output(output(completion([8], Flat.of([(8, -1.0)])), prompt=prompt), has_text=False, num_top=0)
    assert answer.prompt_tops == [{}, {6: -3.0, 2: -0.5}]


def test_a_completion_that_failed_is_an_error():
    with pytest.raises(RuntimeError, match="could not finish"):
        to_output(output(completion([], Flat(), finish_reason="error")), has_text=False, num_top=0)


def test_a_request_is_aborted_when_its_client_disconnects():
    async def leave():
        dropped, has_left = asyncio.Event(), asyncio.Event()

        async def generating():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                dropped.set()
                raise

        async def receive():
            await has_left.wait()
            return {"type": "http.disconnect"}

        asyncio.get_running_loop().call_later(0.01, has_left.set)
        assert await unless_gone(Request({"type": "http"}, receive), generating()) is None
        await asyncio.wait_for(dropped.wait(), 5)

    asyncio.run(leave())


@pytest.fixture
def gauges():
    """vLLM's gauges, with the label of its engine, among other metrics."""
    values = {
        "vllm:num_requests_running": 12, "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 0.5, "other": 7,
    }  # fmt: skip
    made = [prometheus_client.Gauge(name, name, ["engine"]) for name in values]
    for gauge, value in zip(made, values.values(), strict=True):
        gauge.labels("0").set(value)
    yield
    for gauge in made:
        prometheus_client.REGISTRY.unregister(gauge)


class HealthyClient:
    async def check_health(self):
        """vLLM's raises if its engine process has died."""


def test_the_load_is_read_from_vllms_gauges(gauges):
    answer = asyncio.run(middleware._load(SimpleNamespace(engine_client=HealthyClient()), {}))
    assert msgspec.convert(answer, VllmLoad) == VllmLoad(num_running=12, num_waiting=3, kv_cache_usage=0.5)


def test_without_vllms_statistics_the_load_is_unknown():
    assert asyncio.run(middleware._load(SimpleNamespace(engine_client=HealthyClient()), {})) == {}


class PausingClient:
    def __init__(self):
        self.modes = []

    async def pause_generation(self, *, mode, clear_cache):
        self.modes.append(mode)


def test_a_hold_that_aborts_pauses_first_so_that_pending_tokens_are_sent():
    client = PausingClient()
    for mode in ("keep", "abort"):
        asyncio.run(middleware._hold(SimpleNamespace(engine_client=client), {"mode": mode, "synchronize": False}))
    assert client.modes == ["keep", "keep", "abort"]


NUMBER = 7


class Core:
    """Like vLLM's engine client: a call is sent in its first turn of the event loop."""

    def __init__(self, sent):
        self._sent = sent

    async def call_utility_async(self, method, *_):
        self._sent.append(method)
        await asyncio.sleep(0)
        return True


class Client:
    def __init__(self, gate: Path, sent) -> None:
        self._gate = PublishGate(gate)
        self.sent = sent

    async def collective_rpc(self, method, kwargs):
        self.sent.append(method)
        await asyncio.sleep(0)
        self._gate.mark_written(kwargs["number"])
        return await asyncio.to_thread(self._gate.wait_for_write, kwargs["number"], until_allowed=True)

    async def reset_prefix_cache(self, *, reset_running_requests):
        """In separate tasks, as vLLM 0.32 calls several engines."""
        assert reset_running_requests
        return all(await asyncio.gather(Core(self.sent).call_utility_async("reset_prefix_cache")))


class ClientWithCore(Client):
    def __init__(self, gate: Path, sent) -> None:
        super().__init__(gate, sent)
        self.engine_core = Core(sent)


@pytest.mark.parametrize("kind", [Client, ClientWithCore])
def test_the_worker_resumes_only_after_the_cache_reset_is_sent(kind, tmp_path, monkeypatch):
    gate, sent = tmp_path / "gate", []
    PublishGate.create(gate)
    allow_resume = PublishGate.allow_resume

    def let_go(self, number):
        sent.append("may go on")
        allow_resume(self, number)

    monkeypatch.setattr(PublishGate, "allow_resume", let_go)
    order = {"gate": str(gate), "number": NUMBER, "timeout_s": 5.0}
    asyncio.run(asyncio.wait_for(middleware._adopt(SimpleNamespace(engine_client=kind(gate, sent)), order), 10))
    assert sent == ["treadle_wait_for_write", "reset_prefix_cache", "may go on"]
