"""Engines behind a router: it chooses the engine, and the environment checks which one answered."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test_env_engine_fleet import QUICK, Fleet, ask

from tests.served_app import listening
from treadle.config.env import ServerConfig
from treadle.envs import engine_fleet, routed_fleet
from treadle.envs.engine_pool import open_engine
from treadle.errors import ConfigError


class RouterDouble:
    """Passes requests on to the engines in `targets`, in turn; the last one gets all further requests."""

    def __init__(self):
        self.targets = []
        self.refusals = []  # statuses that are answered first
        self.keys = []
        self.app = Starlette(routes=[Route("/generate", self._generate, methods=["POST"])])

    async def _generate(self, http):
        self.keys.append(http.headers.get("X-SMG-Routing-Key"))
        if self.refusals:
            return JSONResponse({"error": {"message": "no"}}, self.refusals.pop(0))
        url = self.targets.pop(0) if len(self.targets) > 1 else self.targets[0]
        async with httpx.AsyncClient() as client:
            answer = await client.post(url + "/generate", content=await http.body(), timeout=60)
        return Response(answer.content, answer.status_code, media_type="application/json")


class RoutedEngines(Fleet):
    def __init__(self, tmp_path, stack):
        super().__init__(tmp_path, stack)
        self.router = RouterDouble()
        self.router_url = stack.enter_context(listening(self.router.app))

    def open(self, oldest=lambda newest: newest):
        config = ServerConfig(base_url="hub", router_url=self.router_url)
        return open_engine(config, oldest_allowed=oldest, retry_policy=QUICK, hub_url=self.hub.url)

    def route(self, *names):
        self.router.targets = [self.urls[name] for name in names]


@pytest.fixture
def engines(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_fleet, "TABLE_POLL_S", 0.1)
    monkeypatch.setattr(routed_fleet, "UNPROVED_PAUSE_S", 0.05)
    monkeypatch.setattr(routed_fleet, "HANGS_AFTER_S", 1.0)
    monkeypatch.setattr(routed_fleet, "ROUTER_LEARNS_S", 0.2)
    with ExitStack() as stack:
        yield RoutedEngines(tmp_path, stack)


def test_the_router_gets_the_prompt_and_the_key_of_the_rollout(engines):
    engines.judge("a")
    engines.route("a")

    async def scenario():
        async with engines.open() as pool:
            return [await ask(pool, conversation="x"), await ask(pool)]

    assert asyncio.run(scenario()) == ["a", "a"]
    assert engines.router.keys == ["x", None]
    assert {(request.prompt, tuple(request.input_ids)) for request in engines.doubles["a"].requests} == {(None, (65,))}


def test_an_answer_of_an_engine_without_a_proof_is_not_used(engines):
    engines.judge("a")
    engines.judge("b", "joining")
    engines.route("b", "b", "a")

    async def scenario():
        async with engines.open() as pool:
            return await ask(pool)

    assert asyncio.run(scenario()) == "a"
    assert engines.asked == {"a": 1, "b": 2}


def test_an_engine_that_the_router_knew_first_is_looked_up(engines):
    engines.judge("a")
    engines.route("b")

    async def scenario():
        async with engines.open() as pool:
            await pool.health()
            await asyncio.to_thread(engines.judge, "b")  # after the pool has read the table
            return await ask(pool)

    assert asyncio.run(scenario()) == "b"
    assert engines.asked == {"a": 0, "b": 1}


def test_refusals_of_the_router_are_retried(engines):
    engines.judge("a")
    engines.route("a")
    engines.router.refusals = [404, 503, 502]  # 404: smg has no engine yet

    async def scenario():
        async with engines.open() as pool:
            return await ask(pool)

    assert asyncio.run(scenario()) == "a"


def test_requests_are_asked_again_if_an_engine_hangs(engines):
    engines.judge("a")
    engines.judge("b")
    engines.doubles["a"].write = lambda *_: time.sleep(4)  # its health check hangs too
    engines.route("a", "b")

    async def scenario():
        async with engines.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not engines.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(engines.judge, "a", "out")
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "b"


def test_so_are_those_that_the_router_sends_to_it_after_it_left(engines):
    engines.judge("a")
    engines.judge("b")
    engines.doubles["a"].write = lambda *_: time.sleep(4)
    engines.route("a", "a", "b")

    async def scenario():
        async with engines.open() as pool:
            asking = [asyncio.ensure_future(ask(pool))]
            while not engines.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(engines.judge, "a", "out")
            await asyncio.sleep(0.5)  # the pool has read the table, and the router has not
            asking.append(asyncio.ensure_future(ask(pool)))
            return await asyncio.wait_for(asyncio.gather(*asking), 30)

    assert asyncio.run(scenario()) == ["b", "b"]


def test_an_answer_of_an_engine_that_has_left_is_used_if_proved(engines, monkeypatch):
    monkeypatch.setattr(routed_fleet, "HANGS_AFTER_S", 20.0)  # its health check waits for the answer
    engines.judge("a")
    engines.judge("b")
    engines.doubles["a"].write = lambda *_: time.sleep(0.5) or ["a"]
    engines.route("a")

    async def scenario():
        async with engines.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not engines.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(engines.judge, "a", "out")
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "a"
    assert engines.asked == {"a": 1, "b": 0}


def test_nothing_is_asked_while_an_engine_has_older_weights(engines):
    engines.judge("a", version=1)
    engines.judge("b", version=0)
    engines.doubles["a"].policy_version = engines.doubles["b"].policy_version = lambda: 1
    engines.route("b")

    async def scenario():
        async with engines.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            done, _ = await asyncio.wait({asking}, timeout=0.6)
            assert not done
            assert not engines.asked["b"]
            await asyncio.to_thread(engines.judge, "b", version=1)
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "b"


def test_the_prompts_of_a_wave_are_asked_for_one_by_one(engines):
    engines.judge("a")
    engines.judge("b")
    engines.route("a", "b", "a")

    async def scenario():
        async with engines.open() as pool:
            wave = await pool.generate_wave(
                "w", [[65], [66], [67]], n=2, max_tokens=8, temperature=1.0, seeds=[1, 2, 3]
            )
            return [len(result.completions) for result in wave]

    assert asyncio.run(scenario()) == [2, 2, 2]
    requests = [request for double in engines.doubles.values() for request in double.requests]
    assert sorted((*request.input_ids, request.seed) for request in requests) == [(65, 1), (66, 2), (67, 3)]
    assert all(request.wave is None for request in requests)


def test_a_router_is_refused_for_engines_that_are_named():
    with pytest.raises(ConfigError, match="a router chooses among the engines in the hub's table"):
        open_engine(ServerConfig(router_url="http://127.0.0.1:9000"))
