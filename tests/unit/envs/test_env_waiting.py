"""Waits of an environment are logged with address and fix: soon, then at growing intervals, and at the end."""

import asyncio
import re
import subprocess
import sys

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.responses import JSONResponse

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.eval_schedule import wait_for_step
from treadle.envs.serving.runner import run
from treadle.errors import HubError
from treadle.net.client import RetryPolicy
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import RegisterEnv

OFTEN = RetryPolicy(give_up_after_s=5.0, first_pause_s=0.001, longest_pause_s=0.001)
REGISTRATION = RegisterEnv(max_token_length=8, desired_name="arithmetic", weight=1.0, group_size=4)


class Harness:
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
        self._watchdog.check()

    def reported(self, event):
        self._watchdog.check()
        return [record.treadle_fields for record in self._caplog.records if record.getMessage() == event]


class WatchedNetwork(FlakyNetwork):
    def __init__(self, app, losses, harness):
        super().__init__(app, losses)
        self._scene = harness

    async def request(self, *args, **named):
        self._scene.tick()
        return await super().request(*args, **named)


@pytest.fixture
def harness(caplog):
    return Harness(caplog)


def test_an_unreachable_hub_is_reported_once_with_address_and_command(harness):
    network = harness.network(HubDouble().app, {"/register-env": 50})

    async def scenario():
        async with HubClient(
            "http://127.0.0.1:8000", retry_policy=OFTEN, transport=network, waits=harness.waits
        ) as client:
            await client.register_env(REGISTRATION)

    asyncio.run(scenario())
    reported = harness.reported("waiting")
    assert reported[0]["for"] == "the hub at http://127.0.0.1:8000"
    assert reported[0]["fix"] == "start it with `treadle hub`, or name another with --env.hub-url"
    assert "connection refused" in reported[0]["problem"]
    assert [fields["seconds"] for fields in reported] == [2.0, 6.0, 14.0]  # of 25, and fifty tries
    (there,) = harness.reported("waited")
    assert there == {"for": reported[0]["for"], "seconds": 25.0}


def test_an_engine_that_is_not_there_is_reported_once_for_all_who_ask_it(tmp_path, harness):
    engine = EngineDouble(save_tokenizer(tmp_path), lambda _, request: ["1"] * request.n)
    network = harness.network(engine.app, {"/generate": 4 * 16})

    async def scenario():
        config = ServerConfig(base_url="http://127.0.0.1:9001/v1")
        async with EngineClient(config, retry_policy=OFTEN, transport=network, waits=harness.waits) as client:
            await asyncio.gather(*(client.generate([1], max_tokens=4, temperature=1.0) for _ in range(16)))

    asyncio.run(scenario())
    reported = harness.reported("waiting")
    assert {fields["for"] for fields in reported} == {"the engine at http://127.0.0.1:9001"}
    assert reported[0]["fix"] == "start it with `treadle engine`, or name another with --openai.base-url"
    assert len(reported) <= 4
    assert len(harness.reported("waited")) == 1


def test_a_trainer_that_has_not_registered_is_reported(harness):
    hub = HubDouble()
    hub.num_register_waits = 6

    async def scenario():
        network = harness.network(hub.app)
        async with HubClient(
            "http://127.0.0.1:8000", retry_policy=OFTEN, transport=network, waits=harness.waits
        ) as client:
            await client.register_env(REGISTRATION)

    asyncio.run(scenario())
    (fields,) = harness.reported("waiting")
    assert fields["for"] == "a trainer to register at the hub (http://127.0.0.1:8000)"
    assert fields["fix"] == "start one with `treadle train`, or everything at once with `treadle run`"
    assert len(harness.reported("waited")) == 1


def test_a_hub_that_is_there_and_takes_nothing_is_not_to_be_started(harness):
    hub = HubDouble()
    hub.failures = [JSONResponse({"detail": "the queue is full"}, 503)] * 6

    async def scenario():
        async with HubClient(
            "http://hub", retry_policy=OFTEN, transport=harness.network(hub.app), waits=harness.waits
        ) as client:
            await client.post_groups([ScoredGroup(tokens=[[5]], masks=[[5]], scores=[1.0])], "key")

    asyncio.run(scenario())
    (fields,) = harness.reported("waiting")
    assert fields["problem"] == "status 503: the queue is full"
    assert fields["fix"] == "the log of the hub says more"


def test_the_token_in_an_address_is_not_said(harness):
    network = harness.network(HubDouble().app, {"/info": 10**6})

    async def scenario():
        retry_policy = RetryPolicy(give_up_after_s=0.1, first_pause_s=0.001, longest_pause_s=0.001)
        url = "http://hub:8000/t/secret"
        async with HubClient(url, retry_policy=retry_policy, transport=network, waits=harness.waits) as client:
            await client.info()

    with pytest.raises(HubError, match="failed"):
        asyncio.run(scenario())
    assert {fields["for"] for fields in harness.reported("waiting")} == {"the hub at http://hub:8000"}
    assert harness.reported("waited") == [], "it was given up"


class SlowTrainer(HubDouble):
    """A hub whose trainer has its batch, and takes step n at the `looks_for[n]`th look after step n - 1."""

    def __init__(self, looks_for, *, looks_without_trainer=0):
        super().__init__(batch_size=8, num_steps=len(looks_for))
        self.steps_at_once = False
        self.looks_for = looks_for
        self.looks_without_trainer = looks_without_trainer
        self.num_looks = 0

    @property
    def untrained(self):
        return sum(len(group.tokens) for _, groups in self.deliveries for group in groups) - 8 * self.current_step

    def look(self):
        if self.current_step < self.num_steps and self.untrained >= 8:
            self.num_looks += 1
            if self.num_looks > self.looks_for[self.current_step]:
                self.current_step, self.num_looks = self.current_step + 1, 0

    async def _standing(self, http):
        if self.looks_without_trainer and self.registrations:
            self.looks_without_trainer -= 1
            nobody = {"step": 0, "num_steps": 0, "batch_size": 0, "untrained_sequences": 0}
            return JSONResponse({**nobody, "trainer_waits": False, "share": self.share})
        self.look()
        standing = {"step": self.current_step, "num_steps": self.num_steps, "batch_size": 8, "share": 1.0}
        return JSONResponse({**standing, "untrained_sequences": self.untrained, "trainer_waits": False})


def serve(tmp_path, harness, hub, pace):
    def add(prompt, request):
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        return [str(a + b) if i % 2 == 0 else "?" for i in range(request.n)]

    engine_double = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    config = EnvConfig(group_size=4, num_eval=0, max_age=0, state_dir=tmp_path / "state", pace=pace)

    async def scenario():
        async with (
            EngineClient(ServerConfig(), retry_policy=OFTEN, transport=FlakyNetwork(engine_double.app)) as engine,
            HubClient(
                "http://hub", retry_policy=OFTEN, transport=harness.network(hub.app), waits=harness.waits
            ) as client,
            open_context(load_environment(config), engine, ChatTokenizer.load(engine_double.folder)) as context,
        ):
            await asyncio.wait_for(run(context, client), 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("pace", ["waves", "stream"])
def test_a_trainer_that_takes_no_step_is_reported_late_once_with_the_step(tmp_path, harness, pace, monkeypatch):
    monkeypatch.setattr("treadle.envs.hub_client.STEP_LATE_S", 5.0)
    hub = SlowTrainer([1, 15, 1])
    serve(tmp_path, harness, hub, pace)
    (late,) = harness.reported("late")
    assert late["for"] == "the trainer to take step 2"
    assert late["process"] == "trainer"
    assert hub.current_step == 3, "it is reported, and waited for all the same"


@pytest.mark.parametrize("pace", ["waves", "stream"])
def test_a_slow_trainer_that_takes_its_steps_is_never_late(tmp_path, harness, pace, monkeypatch):
    monkeypatch.setattr("treadle.envs.hub_client.STEP_LATE_S", 8.0)
    serve(tmp_path, harness, SlowTrainer([7, 7, 7]), pace)  # four seconds each
    assert harness.reported("late") == []


@pytest.mark.parametrize("pace", ["waves", "stream"])
def test_a_trainer_that_is_started_later_is_reported_and_never_late(tmp_path, harness, pace, monkeypatch):
    monkeypatch.setattr("treadle.envs.hub_client.STEP_LATE_S", 5.0)
    hub = SlowTrainer([1, 1], looks_without_trainer=14)  # the hub was reset when the environment had registered
    serve(tmp_path, harness, hub, pace)
    assert hub.current_step == 2
    assert {fields["for"] for fields in harness.reported("waiting")} == {
        "a trainer to register at the hub (http://hub)"
    }
    assert harness.reported("late") == []


class PollingHub(HubDouble):
    """Its trainer takes a step after a number of requests for the step."""

    def __init__(self, looks_per_step):
        super().__init__()
        self.looks_per_step = looks_per_step
        self.num_looks = 0

    async def _status(self, http):
        self.num_looks += 1
        self.current_step = self.num_looks // self.looks_per_step
        return await super()._status(http)


@pytest.mark.parametrize(("looks_per_step", "late"), [(3, []), (8, [1, 2, 3])])  # half a second each
def test_each_step_that_an_evaluation_waits_for_has_the_same_patience(harness, looks_per_step, late, monkeypatch):
    monkeypatch.setattr("treadle.envs.hub_client.STEP_LATE_S", 2.0)
    network = harness.network(PollingHub(looks_per_step).app)

    async def scenario():
        async with HubClient("http://hub", retry_policy=OFTEN, transport=network, waits=harness.waits) as client:
            await wait_for_step(client, 3)

    asyncio.run(scenario())
    assert [fields["for"] for fields in harness.reported("late")] == [
        f"the trainer to take step {step}" for step in late
    ]
    assert harness.waits.now == []


def test_serve_without_an_engine_says_so_soon():
    nowhere = ["--openai.base-url", "http://127.0.0.1:9/v1", "--env.hub-url", "http://127.0.0.1:9"]
    command = [sys.executable, "-m", "treadle", "env", "arithmetic", "serve", *nowhere]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            first = process.stderr.readline()
        finally:
            process.kill()
    assert 'waiting for="the engine at http://127.0.0.1:9"' in first
    assert "start it with `treadle engine`" in first
