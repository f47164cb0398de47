"""Engines that come and go: only those with a proof are asked, and what one did not answer is asked elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack, suppress

import httpx
import msgspec
import pytest
from env_doubles import EngineDouble, save_tokenizer

from tests.hub_process import HubProcess
from tests.served_app import listening
from treadle.config.env import ServerConfig
from treadle.envs import engine_fleet
from treadle.envs.engine_pool import open_engine
from treadle.errors import EngineError
from treadle.net.client import RetryPolicy
from treadle.wire.engines import EngineVerdict, EngineVerdicts, ServedEngine
from treadle.wire.hub import ProcessReport

QUICK = RetryPolicy(give_up_after_s=30.0, first_pause_s=0.01, longest_pause_s=0.05)


class Fleet:
    """Engines that write their own names, in the table of a real hub."""

    def __init__(self, tmp_path, stack):
        self.hub = stack.enter_context(HubProcess(tmp_path))
        self.doubles, self.urls = {}, {}
        for name in "ab":
            double = EngineDouble(save_tokenizer(tmp_path / name), lambda _, request, name=name: [name] * request.n)
            double.engine_id = f"start-{name}"
            self.doubles[name], self.urls[name] = double, stack.enter_context(listening(double.app))
        self.verdicts, self.reports = {}, {}
        is_over = threading.Event()
        threading.Thread(target=self._repeat_reports, args=(is_over,), daemon=True).start()
        stack.callback(is_over.set)

    def _repeat_reports(self, is_over):
        """As engines do: the hub takes one that does not report for a few seconds for dead."""
        while not is_over.wait(1.0):
            for report in list(self.reports.values()):
                with suppress(httpx.HTTPError, AssertionError):  # the hub is restarted
                    self._post("/v1/reports", report)

    def judge(self, name, state="serving", version=0, engine_id=None, since=0):
        engine_id = engine_id or self.doubles[name].engine_id
        served = ServedEngine(engine_id=engine_id, url=self.urls[name], model="m", dtype="float32")
        report = ProcessReport(kind="engine", name=name, machine="m", pid=ord(name), serves=served)
        self.reports[name] = report
        self._post("/v1/reports", report)
        self.verdicts[name] = EngineVerdict(
            engine_id=engine_id, url=self.urls[name], state=state, proved_since=since, proved_version=version
        )
        self._post("/v1/engines/verdicts", EngineVerdicts(engines=list(self.verdicts.values())))

    def _post(self, path, body):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(self.hub.url + path, content=msgspec.json.encode(body), headers=headers, timeout=60)
        assert answer.status_code == 200

    def open(self, oldest=lambda newest: newest):
        config = ServerConfig(base_url="hub")
        return open_engine(config, oldest_allowed=oldest, retry_policy=QUICK, hub_url=self.hub.url)

    @property
    def asked(self):
        return {name: len(double.requests) for name, double in self.doubles.items()}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_fleet, "TABLE_POLL_S", 0.1)
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


async def ask(pool, **more):
    return (await pool.generate([65], n=1, max_tokens=8, temperature=1.0, **more)).completions[0].text


def test_only_engines_with_a_new_enough_proof_are_asked(fleet):
    fleet.judge("a", version=0)
    fleet.judge("b", "joining")

    async def scenario():
        async with fleet.open() as pool:
            first = {await ask(pool) for _ in range(4)}
            fleet.judge("b", version=1)
            fleet.doubles["b"].policy_version = lambda: 1
            async with asyncio.timeout(30):
                while len(pool._by_id) < 2:  # a read of the table that began earlier may not list b
                    await pool.health()
            return first, {await ask(pool) for _ in range(4)}

    assert asyncio.run(scenario()) == ({"a"}, {"b"}), "version 0 of a is too old as soon as version 1 is there"


def test_requests_of_an_engine_that_hangs_are_asked_elsewhere(fleet):
    fleet.judge("a")
    fleet.doubles["a"].write = lambda *_: time.sleep(60)

    async def scenario():
        async with fleet.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not fleet.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(fleet.judge, "b")
            await asyncio.to_thread(fleet.judge, "a", "out")
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "b"
    prompts = [double.requests[0].prompt for double in fleet.doubles.values()]
    assert prompts[0] == prompts[1]


def test_an_answer_of_another_start_of_the_engine_is_not_used(fleet):
    fleet.judge("a")
    fleet.judge("b", "joining")
    fleet.doubles["a"].engine_id = "restarted"

    async def scenario():
        async with fleet.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not fleet.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(fleet.judge, "b")
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "b"


def test_an_answer_waits_until_its_version_is_proved(fleet):
    fleet.judge("a", version=4)
    fleet.doubles["a"].policy_version = lambda: 5

    async def scenario():
        async with fleet.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            done, _ = await asyncio.wait({asking}, timeout=0.6)
            assert not done
            await asyncio.to_thread(fleet.judge, "a", version=5)
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "a"
    assert fleet.asked["a"] == 1


def test_an_answer_of_a_version_whose_proof_failed_is_asked_again_at_once(fleet):
    fleet.judge("a", version=0)
    fleet.doubles["a"].policy_version = lambda: 1

    async def scenario():
        async with fleet.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not fleet.asked["a"]:
                await asyncio.sleep(0.02)
            done, _ = await asyncio.wait({asking}, timeout=0.6)
            assert not done
            fleet.doubles["a"].policy_version = lambda: 2
            await asyncio.to_thread(fleet.judge, "a", version=2, since=2)
            return await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == "a"
    assert fleet.asked["a"] == 2


def test_a_restart_of_the_hub_does_not_cancel_requests(fleet):
    fleet.judge("a")
    release = threading.Event()
    fleet.doubles["a"].write = lambda *_: [str(release.wait(30))]

    async def scenario():
        async with fleet.open() as pool:
            asking = asyncio.ensure_future(ask(pool))
            while not fleet.asked["a"]:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(fleet.hub.end)
            await asyncio.to_thread(fleet.hub.start)
            done, _ = await asyncio.wait({asking}, timeout=1.0)  # it reads a table without verdicts
            release.set()
            return done, await asyncio.wait_for(asking, 30)

    assert asyncio.run(scenario()) == (set(), "True")
    assert fleet.asked == {"a": 1, "b": 0}


def test_many_environments_read_the_table_less_often(fleet, monkeypatch):
    fleet.judge("a")
    monkeypatch.setattr("treadle.wire.engines.TABLE_READS_PER_S", 0.1)  # and there is no other environment
    reads = []

    async def num_reads(num_present, enough, longest_s):
        """While an engine writes, until there are `enough`."""

        def write(_, request):
            until_s = time.monotonic() + longest_s
            while len(reads) < enough and time.monotonic() < until_s:
                time.sleep(0.01)
            return ["a"] * request.n

        async with fleet.open() as pool:
            await ask(pool)
            pool._num_present = num_present
            reads.clear()
            monkeypatch.setattr(pool, "_fetch", lambda fetch=pool._fetch: reads.append(1) or fetch())
            monkeypatch.setattr(pool, "_take", lambda table: None)
            fleet.doubles["a"].write = write
            await ask(pool)
            return len(reads)

    assert asyncio.run(num_reads(0, 4, 30.0)) > 3
    assert asyncio.run(num_reads(1, 1, 0.8)) == 0


def test_a_conversation_stays_at_its_engine(fleet):
    fleet.judge("a")
    fleet.judge("b")

    async def scenario():
        async with fleet.open() as pool:
            turns = [await ask(pool, conversation=name) for _ in range(3) for name in ("x", "y", "z")]
            alone = await asyncio.gather(*(ask(pool) for _ in range(6)))
            return turns, set(alone)

    turns, alone = asyncio.run(scenario())
    assert turns[:3] == turns[3:6] == turns[6:]
    assert alone == {"a", "b"}


def test_without_an_engine_that_serves_that_is_said(fleet):
    fleet.judge("a", "out")

    async def scenario():
        async with open_engine(
            ServerConfig(base_url="hub"), retry_policy=RetryPolicy(give_up_after_s=0.3), hub_url=fleet.hub.url
        ) as pool:
            await ask(pool)

    with pytest.raises(EngineError, match="none of the engines in the hub's table serves"):
        asyncio.run(scenario())
