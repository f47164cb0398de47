"""The scheduler with less work per token (scheduler.py) gives the same outputs as vLLM's own."""

from __future__ import annotations

import asyncio
import time

import pytest

from treadle.engines.interface import Request
from treadle.engines.sampling import SamplingParams
from treadle.engines.vllm.command import SCHEDULER

from .conftest import HAS_GPU, serve, wait_until

pytestmark = pytest.mark.full  # starts another server
LONG = 100  # tokens: three messages and a part of one


@pytest.fixture(scope="module")
def other(tiny_model, tmp_path_factory):
    """An engine with the scheduler that is not the default: on a GPU vLLM's own, on a CPU ours."""
    scheduler = "vllm.v1.core.sched.async_scheduler.AsyncScheduler" if HAS_GPU else SCHEDULER
    flag = f"--scheduler-cls={scheduler}"
    found = serve(tiny_model, tmp_path_factory.mktemp("other") / "weights", enable_lora=False, vllm_args=flag)
    yield found
    found.close()


@pytest.fixture
def lean(served, other):
    return served if HAS_GPU else other


def requests(**changes):
    given = {"max_tokens": LONG, "n": 2, "ignore_eos": True, "num_top": 0, "sampling": SamplingParams(temperature=1.0)}
    given |= changes
    return [Request(prompt_ids=[5 + i, 6, 7], seed=i, **given) for i in range(3)]


def sampled(served, asked):
    async def all_at_once():
        return await asyncio.gather(*map(served.engine.generate, asked))

    return [one for generation in served(all_at_once()) for one in generation.completions]


@pytest.mark.parametrize("num_top", [0, 3], ids=["sampled", "tops"])
def test_tokens_and_logprobs_are_those_of_the_stock_scheduler(served, other, num_top):
    ours, stock = (sampled(each, requests(num_top=num_top)) for each in (served, other))
    assert [one.token_ids for one in ours] == [one.token_ids for one in stock]
    for mine, theirs in zip(ours, stock, strict=True):
        assert len(mine.token_ids) == len(mine.logprobs) == LONG
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert [set(top) for top in mine.tops] == [set(top) for top in theirs.tops]


def test_a_stream_has_one_token_per_message(lean):
    async def moments():
        return [delta async for delta in lean.engine.stream(requests(n=1)[0])]

    assert len(lean(moments())) >= LONG / 2


def test_vllm_reports_its_load_and_zero_when_idle(lean):
    running = lean.begin(lean.engine.generate(requests(max_tokens=200, n=4)[0]))
    wait_until(lambda: lean(lean.engine._client.load()).num_running == 4)
    assert 0 < lean(lean.engine._client.load()).kv_cache_usage < 1
    running.result(60)
    wait_until(lambda: lean(lean.engine._client.load()).num_running == 0, 10)


def test_requests_of_all_kinds_run_concurrently(lean):
    asked = [*requests(), *requests(num_top=5), *requests(max_tokens=1, n=1), *requests(stop=("zz",), n=1)]
    for request, generation in zip(asked, lean(_gathered(lean, asked)), strict=True):
        for one in generation.completions:
            assert len(one.logprobs) == len(one.token_ids) <= request.max_tokens
            assert all(len(top) == request.num_top for top in one.tops)


async def _gathered(served, asked):
    return await asyncio.gather(*map(served.engine.generate, asked))


@pytest.mark.skipif(not HAS_GPU, reason="without async scheduling no step is running when a hold begins")
def test_a_request_aborted_by_a_hold_returns_its_tokens(lean):
    running = lean.begin(lean.engine.generate(requests(max_tokens=200, n=1)[0]))
    time.sleep(0.3)
    lean(lean.engine.hold("abort", 30))
    [one] = running.result(30).completions
    lean(lean.engine.release(None))
    assert one.finish_reason == "abort" or len(one.token_ids) == 200
