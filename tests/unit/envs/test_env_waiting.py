"""What an environment waits for is said with its address and a remedy: soon, then ever more rarely, and at the end."""

import asyncio
import subprocess
import sys

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.responses import JSONResponse

from treadle.config.env import ServerConfig
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.transport import Patience
from treadle.errors import HubError
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import RegisterEnv

OFTEN = Patience(give_up_after_s=5.0, first_pause_s=0.001, longest_pause_s=0.001)
REGISTRATION = RegisterEnv(max_token_length=8, desired_name="arithmetic", weight=1.0, group_size=4)


class Scene:
    """A process whose watchdog looks at every call; each call takes half a second of its clock."""

    def __init__(self, caplog):
        caplog.set_level("INFO", logger="treadle")
        self._caplog = caplog
        self._now_s = 0.0
        self.waits = Waits(clock=lambda: self._now_s)
        self._watchdog = Watchdog("env", "env arithmetic", self.waits)

    def network(self, app, losses=None):
        return WatchedNetwork(app, losses, self)

    def tick(self):
        self._now_s += 0.5
        self._watchdog.look()

    def told(self, event):
        self._watchdog.look()
        return [record.treadle_fields for record in self._caplog.records if record.getMessage() == event]


class WatchedNetwork(FlakyNetwork):
    def __init__(self, app, losses, scene):
        super().__init__(app, losses)
        self._scene = scene

    async def request(self, *args, **named):
        self._scene.tick()
        return await super().request(*args, **named)


@pytest.fixture
def scene(caplog):
    return Scene(caplog)


def test_a_hub_that_is_not_there_is_told_with_address_and_command_and_not_for_every_try(scene):
    network = scene.network(HubDouble().app, {"/register-env": 50})

    async def scenario():
        async with HubClient("http://127.0.0.1:8000", patience=OFTEN, transport=network, waits=scene.waits) as client:
            await client.register_env(REGISTRATION)

    asyncio.run(scenario())
    told = scene.told("waiting")
    assert told[0]["for"] == "the hub at http://127.0.0.1:8000"
    assert told[0]["fix"] == "start it with `treadle hub`, or name another with --env.rollout-server-url"
    assert "connection refused" in told[0]["problem"]
    assert [said["seconds"] for said in told] == [2.0, 6.0, 14.0]  # of 25, and fifty tries
    (there,) = scene.told("waited")
    assert there == {"for": told[0]["for"], "seconds": 25.0}


def test_an_engine_that_is_not_there_is_told_once_for_all_who_ask_it(tmp_path, scene):
    engine = EngineDouble(save_tokenizer(tmp_path), lambda _, request: ["1"] * request.n)
    network = scene.network(engine.app, {"/generate": 4 * 16})

    async def scenario():
        config = ServerConfig(base_url="http://127.0.0.1:9001/v1")
        async with EngineClient(config, patience=OFTEN, transport=network, waits=scene.waits) as client:
            await asyncio.gather(*(client.generate([1], max_tokens=4, temperature=1.0) for _ in range(16)))

    asyncio.run(scenario())
    told = scene.told("waiting")
    assert {said["for"] for said in told} == {"the engine at http://127.0.0.1:9001"}
    assert told[0]["fix"] == "start it with `treadle engine`, or name another with --openai.base-url"
    assert len(told) <= 4
    assert len(scene.told("waited")) == 1


def test_a_trainer_that_has_not_registered_is_told(scene):
    hub = HubDouble()
    hub.num_register_waits = 6

    async def scenario():
        network = scene.network(hub.app)
        async with HubClient("http://127.0.0.1:8000", patience=OFTEN, transport=network, waits=scene.waits) as client:
            await client.register_env(REGISTRATION)

    asyncio.run(scenario())
    (said,) = scene.told("waiting")
    assert said["for"] == "a trainer to register at the hub (http://127.0.0.1:8000)"
    assert said["fix"] == "start one with `treadle train`, or everything at once with `treadle run`"
    assert len(scene.told("waited")) == 1


def test_a_hub_that_is_there_and_takes_nothing_is_not_to_be_started(scene):
    hub = HubDouble()
    hub.failures = [JSONResponse({"detail": "the queue is full"}, 503)] * 6

    async def scenario():
        async with HubClient(
            "http://hub", patience=OFTEN, transport=scene.network(hub.app), waits=scene.waits
        ) as client:
            await client.post_groups([ScoredGroup(tokens=[[5]], masks=[[5]], scores=[1.0])], "key")

    asyncio.run(scenario())
    (said,) = scene.told("waiting")
    assert said["problem"] == "status 503: the queue is full"
    assert said["fix"] == "the log of the hub says more"


def test_the_token_in_an_address_is_not_said(scene):
    network = scene.network(HubDouble().app, {"/info": 10**6})

    async def scenario():
        patience = Patience(give_up_after_s=0.1, first_pause_s=0.001, longest_pause_s=0.001)
        url = "http://hub:8000/t/secret"
        async with HubClient(url, patience=patience, transport=network, waits=scene.waits) as client:
            await client.info()

    with pytest.raises(HubError, match="failed"):
        asyncio.run(scenario())
    assert {said["for"] for said in scene.told("waiting")} == {"the hub at http://hub:8000"}
    assert scene.told("waited") == [], "it was given up"


def test_serve_without_an_engine_says_so_soon():
    nowhere = ["--openai.base-url", "http://127.0.0.1:9/v1", "--env.rollout-server-url", "http://127.0.0.1:9"]
    command = [sys.executable, "-m", "treadle", "env", "arithmetic", "serve", *nowhere]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            first = process.stderr.readline()
        finally:
            process.kill()
    assert 'waiting for="the engine at http://127.0.0.1:9"' in first
    assert "start it with `treadle engine`" in first
