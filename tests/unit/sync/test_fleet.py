"""Several engines: those that prove a version serve it; the others are out, and come back by the same proof."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import httpx
import msgspec
import pytest
import torch

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from tests.unit.sync.small_engine import Faults, SmallEngine, serving
from treadle.background import in_background
from treadle.config import TrainConfig
from treadle.config.load import load_run
from treadle.errors import ConfigError, SyncError
from treadle.hub.engine_table import EngineTable
from treadle.sync import fleet
from treadle.sync.fleet_transports import FileFleetSync
from treadle.sync.modes import choose_sync
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import build_policy
from treadle.wire.bridge import BridgeInfo
from treadle.wire.engines import ServedEngine
from treadle.wire.hub import ProcessReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=2)


@pytest.fixture
def hub(tmp_path):
    """Of each test its own: a trainer posts its verdicts until its process ends."""
    with HubProcess(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fleet, "REFRESH_EVERY_S", 0.05)
    monkeypatch.setattr(fleet, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(fleet, "TABLE_READ_S", 0.0)
    monkeypatch.setattr(fleet, "table_interval", lambda *_: 0.0)
    yield
    for sync in Trainer.started:  # their threads run until the process ends, and would log into other tests
        sync._refresh_members = sync._take_out = lambda *_: None
    Trainer.started.clear()


@pytest.fixture
def no_retries(monkeypatch):
    """Engines that are out stay out; otherwise they join again within a tenth of a second."""
    monkeypatch.setattr(fleet, "FIRST_RETRY_S", 60.0)


@pytest.fixture
def try_again(no_retries, monkeypatch):
    """A function from whose call on engines that are out may join again."""

    def begin(trainer):
        monkeypatch.setattr(fleet, "FIRST_RETRY_S", 0.05)
        for member in list(trainer.sync._members.values()):
            member.retry_at_s = 0.0

    return begin


class Trainer:
    started: ClassVar[list[fleet.FleetSync]] = []

    def __init__(self, folder, tmp_path, hub, urls, **settings):
        plain = {
            "model": str(folder), "save_path": tmp_path / "saved", "device": "cpu", "lr": 1e-2, "warmup_steps": 0,
            "hub_url": hub.url, "engine_url": tuple(urls), "steps": 6, "weight_bridge_mode": "reload",
        }  # fmt: skip
        self.config = TrainConfig(**(plain | settings))
        self.sync = choose_sync(self.config)
        self.started.append(self.sync)
        self.policy = build_policy(self.sync.attach(), self.config)
        self.optimizer = build_optimizer(self.policy, self.config)

    def publish(self, version):
        if version:
            for gradient in self.optimizer.gradients.values():
                gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(version)))
            self.optimizer.step(version)
        return self.sync.publish(self.policy, version)


def rows_of(hub):
    return {row["url"]: row for row in httpx.get(f"{hub.url}/v1/engines").json()["engines"]}


def table(hub):
    """{URL: (state, proved version)} as environments read it."""
    return {url: (row["state"], row["proved_version"]) for url, row in rows_of(hub).items()}


def within(seconds, work):
    """What `work` returns or raises; a wait without an end fails the test."""
    return in_background("work", work).result(timeout=seconds)


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def error_once(condition, monkeypatch, work):
    """The error of `work`, which waits for engines; the time for engines to join ends when the condition holds."""
    monkeypatch.setattr(fleet, "LOADING_S", 120.0)
    future = in_background("work", work)
    wait_for(lambda: condition() or future.done())
    assert not future.done(), "it waits as long as engines may join"
    monkeypatch.setattr(fleet, "LOADING_S", -120.0)
    with pytest.raises(SyncError) as caught:
        future.result(timeout=60)
    return str(caught.value)


def has_weights_of(engine, trainer):
    served = dict(engine.served.named_parameters())
    return all(torch.allclose(served[name], weight, atol=1e-6) for name, weight in trainer.policy.served_weights())


WAYS = {
    "reload": {},
    "lora_only": {"weight_bridge_mode": "lora_only"},
    "shared_vllm": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
}


@pytest.mark.parametrize("mode", ["reload", "lora_only", "shared_vllm"])
def test_each_engine_gets_every_version_and_proves_it(folder, tmp_path, hub, mode):
    engines = [SmallEngine(folder) for _ in range(3)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(engine)) for engine in engines]
        trainer = Trainer(folder, tmp_path, hub, urls, **WAYS[mode])
        assert table(hub) == {}, "nothing serves before it has proved a version"
        for version in range(3):
            assert trainer.publish(version).verified.canary_max < 1e-4
            wait_for(lambda version=version: table(hub) == dict.fromkeys(urls, ("serving", version)))
    assert all(has_weights_of(engine, trainer) for engine in engines)
    assert all(engine.calls.count("/generate") >= 6 for engine in engines), "a canary at every version"


def test_an_engine_with_wrong_weights_is_out_and_the_others_serve(folder, tmp_path, hub, try_again):
    good, bad = SmallEngine(folder), SmallEngine(folder)
    with serving(good) as good_url, serving(bad) as bad_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, bad_url])
        trainer.publish(0)
        bad.faults = Faults(skips="mlp.up_proj.weight")
        trainer.publish(1)
        assert table(hub) == {good_url: ("serving", 1), bad_url: ("out", None)}
        assert "up_proj" in rows_of(hub)[bad_url]["reason"]
        bad.faults = Faults(fails_in="/reload_weights")
        try_again(trainer)
        trainer.publish(2)
        bad.faults = Faults()
        wait_for(lambda: table(hub)[bad_url] == ("serving", 2))
        assert rows_of(hub)[bad_url]["proved_since"] == 2, "version 1 was never proved"
        assert rows_of(hub)[good_url]["proved_since"] == 0


def test_a_failed_version_stays_unverified_if_a_newer_one_follows_at_once(folder, tmp_path, hub):
    engine = SmallEngine(folder)
    with serving(engine) as url:
        trainer = Trainer(folder, tmp_path, hub, [url, "http://127.0.0.1:9"])
        trainer.publish(0)
        engine.faults = Faults(fails_in="/reload_weights")
        (member,) = trainer.sync._members.values()
        with trainer.sync._lock:  # as if version 1 were published while the engine still loads version 0
            trainer.sync._bring(member, replace(trainer.sync._published))
            assert (member.state, member.proved_since, member.proved_version) == ("serving", None, None)


@pytest.mark.usefixtures("no_retries")
def test_proofs_of_an_earlier_trainer_do_not_hold_for_the_next_one(folder, tmp_path, hub, monkeypatch):
    engine, seen = SmallEngine(folder), []
    load = engine.reload_weights

    def observed_load(body):
        seen.append(list(table(hub).values()))
        return load(body)

    engine.reload_weights = observed_load
    with serving(engine) as url:
        urls = [url, "http://127.0.0.1:9"]
        first = Trainer(folder, tmp_path, hub, urls)
        for version in range(3):
            first.publish(version)
        assert table(hub)[url] == ("serving", 2)
        first.sync._posts_verdicts = False  # its process ends
        again = Trainer(folder, tmp_path, hub, urls, publish_timeout_s=60.0)
        engine.faults = Faults(skips="mlp.up_proj.weight")
        seen.clear()
        error = error_once(lambda: table(hub)[url] == ("out", None), monkeypatch, lambda: again.publish(1))
        assert "version 1 was not verified in any engine" in error
        assert seen[0] == [("joining", None)], "before the engine loads weights that the range of versions would cover"
        assert table(hub)[url] == ("out", None)


class HubWith:
    """In place of HubTable: a hub's table in this process."""

    def __init__(self, table):
        self._table = table

    def exchange(self, verdicts):
        if verdicts is not None:
            self._table.judge(verdicts)
        return self._table.rows([])


def test_a_later_trainer_counts_at_all_hubs_although_its_clock_is_late(tmp_path, monkeypatch):
    now, tables = time.time(), [EngineTable(time.monotonic) for _ in range(3)]

    def trainer(table, state):
        sync = FileFleetSync(TrainConfig(engine_url=("http://a:1", "http://b:1")), HubWith(table))
        sync._take_in("e", "http://a:1").state = state
        sync._posts_verdicts = True
        return sync

    def exchange():
        facts = [table.posted_here for table in tables]
        for place, table in enumerate(tables):
            table.hear([posted for posted in facts[:place] + facts[place + 1 :] if posted is not None])
        return [[entry.state for entry in table.rows([]).engines] for table in tables]

    first = trainer(tables[0], "serving")
    for _ in range(3):
        first._post_verdicts()
    assert exchange() == [["serving"]] * 3
    monkeypatch.setattr(time, "time", lambda: now - 30)
    trainer(tables[1], "out")._post_verdicts()
    assert exchange() == [["out"]] * 3
    tables[2] = EngineTable(time.monotonic)  # a hub that has just started, and has heard nothing
    third = trainer(tables[2], "joining")
    third._post_verdicts()
    exchange()
    third._post_verdicts()
    assert exchange() == [["joining"]] * 3


def test_an_engine_that_hangs_is_out_at_the_deadline(folder, tmp_path, hub, try_again):
    good, slow = SmallEngine(folder), SmallEngine(folder)
    with serving(good) as good_url, serving(slow) as slow_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, slow_url], publish_timeout_s=6.0)
        trainer.publish(0)
        slow.faults.hangs_in = "/reload_weights"
        began = time.monotonic()
        trainer.publish(1)
        assert 5.5 < time.monotonic() - began < 60
        assert table(hub)[good_url] == ("serving", 1)
        assert table(hub)[slow_url][0] == "out"
        began = time.monotonic()
        trainer.publish(2)
        assert time.monotonic() - began < 5, "one that is out holds nobody"
        slow.faults.hangs_in = ""
        try_again(trainer)
        wait_for(lambda: table(hub)[slow_url] == ("serving", 2))
        assert has_weights_of(slow, trainer)


@pytest.mark.parametrize("trouble", ["fails_in", pytest.param("hangs_in", marks=pytest.mark.full)])
@pytest.mark.parametrize("route", ["/bridge/join", "/bridge/pause", "/bridge/receive", "/bridge/resume"])
def test_an_engine_that_fails_a_broadcast_is_out_and_the_others_get_it(
    folder, tmp_path, hub, route, trouble, try_again
):
    engines = [SmallEngine(folder) for _ in range(3)]
    deadline_s = 6.0 if trouble == "hangs_in" else 30.0  # of the other engines too
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(engine)) for engine in engines]
        trainer = Trainer(folder, tmp_path, hub, urls, **WAYS["shared_vllm"], publish_timeout_s=deadline_s)
        if route != "/bridge/join":  # of a group that exists
            trainer.publish(0)
        engines[1].faults = Faults(**{trouble: route})
        assert trainer.publish(1).num_bytes == 2 * sum(w.nbytes for _, w in trainer.policy.served_weights())
        assert table(hub)[urls[0]] == table(hub)[urls[2]] == ("serving", 1)
        assert table(hub)[urls[1]] == ("out", None)
        assert has_weights_of(engines[0], trainer)
        assert has_weights_of(engines[2], trainer)
        engines[1].faults = Faults()
        try_again(trainer)
        within(60, lambda: welcome_until(trainer, lambda: table(hub)[urls[1]] == ("serving", 1)))
        assert has_weights_of(engines[1], trainer)
        trainer.publish(2)
        assert table(hub) == dict.fromkeys(urls, ("serving", 2))


def welcome_until(trainer, condition):
    """What the trainer does while it waits for a batch."""
    while not condition():
        if (welcome := trainer.sync.welcome()) is not None:
            welcome(trainer.policy)
        time.sleep(0.02)


def test_an_engine_that_joins_is_sent_the_weights_while_the_trainer_waits(folder, tmp_path, hub):
    port, late = free_port(), SmallEngine(folder)
    with serving(SmallEngine(folder)) as url, ExitStack() as stack:
        other = f"http://127.0.0.1:{port}"
        trainer = Trainer(folder, tmp_path, hub, [url, other], **WAYS["shared_vllm"])
        trainer.publish(0)
        trainer.publish(1)
        assert trainer.sync.welcome() is None
        stack.enter_context(serving(late, port=port))
        wait_for(lambda: trainer.sync.welcome() is not None)
        wait_for(lambda: table(hub).get(other) == ("joining", None))
        within(60, lambda: welcome_until(trainer, lambda: table(hub)[other] == ("serving", 1)))
        assert has_weights_of(late, trainer)
        assert trainer.sync.welcome() is None


def test_a_broadcast_waits_for_a_proof_that_outlasts_a_step(folder, tmp_path, hub):
    port, late = free_port(), SmallEngine(folder)
    generate = late.generate

    def slow_generate(body):
        time.sleep(0.3)
        return generate(body)

    late.generate = slow_generate
    with serving(SmallEngine(folder)) as url, ExitStack() as stack:
        other = f"http://127.0.0.1:{port}"
        trainer = Trainer(folder, tmp_path, hub, [url, other], **WAYS["shared_vllm"])
        trainer.publish(0)
        stack.enter_context(serving(late, port=port))
        wait_for(lambda: table(hub).get(other) == ("joining", None))
        trainer.publish(1)  # does not wait for the proof of an engine that joins
        trainer.publish(2)
        trainer.publish(3)
        assert table(hub) == dict.fromkeys((url, other), ("serving", 3))
        assert rows_of(hub)[other]["proved_since"] == 1, "it was never out"


@pytest.mark.usefixtures("no_retries")
def test_an_engine_that_returns_proves_the_present_version_first(folder, tmp_path, hub):
    stays, port = SmallEngine(folder), free_port()
    with serving(stays) as url, ExitStack() as stack:
        leaving = stack.enter_context(ExitStack())
        other = leaving.enter_context(serving(SmallEngine(folder), port=port))
        trainer = Trainer(folder, tmp_path, hub, [url, other])
        trainer.publish(0)
        leaving.close()  # it dies
        trainer.publish(1)
        assert table(hub)[other][0] == "out"
        returned = SmallEngine(folder)
        stack.enter_context(serving(returned, port=port))
        wait_for(lambda: table(hub).get(other) == ("serving", 1))
        assert has_weights_of(returned, trainer), "it got them between two publishes"


class SlowTransfer:
    """Version files of which one engine receives all weights slowly, and what changed at once."""

    def __init__(self, files, slow_url, seconds):
        self._files, self._slow_url, self._seconds = files, slow_url, seconds

    def __getattr__(self, name):
        return getattr(self._files, name)

    def hand_over(self, engine, folder, version):
        if engine.url == self._slow_url and engine.get("/bridge/info", BridgeInfo).update_count != version - 1:
            time.sleep(self._seconds)
        return self._files.hand_over(engine, folder, version)


def test_an_engine_whose_first_transfer_outlasts_several_steps_serves(folder, tmp_path, hub):
    port = free_port()
    with serving(SmallEngine(folder)) as url, ExitStack() as stack:
        slow_url = f"http://127.0.0.1:{port}"
        trainer = Trainer(folder, tmp_path, hub, [url, slow_url])
        trainer.sync._files = SlowTransfer(trainer.sync._files, slow_url, seconds=2.0)
        for version in range(3):
            trainer.publish(version)
        slow = SmallEngine(folder)
        stack.enter_context(serving(slow, port=port))
        wait_for(lambda: slow_url in table(hub))
        for version in range(3, 20):
            time.sleep(0.3)  # a step
            trainer.publish(version)
            if table(hub)[slow_url][0] == "serving":
                break
        assert table(hub) == dict.fromkeys((url, slow_url), ("serving", version))
        assert has_weights_of(slow, trainer)


def test_a_publish_waits_for_an_engine_when_there_is_none(folder, tmp_path, hub, monkeypatch):
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with serving(SmallEngine(folder), port=ports[0]):
        trainer = Trainer(folder, tmp_path, hub, urls, publish_timeout_s=20.0)
        trainer.publish(0)
    error = error_once(lambda: trainer.sync._has_warned_of_none, monkeypatch, lambda: trainer.publish(1))
    assert "version 1 was not verified in any engine within" in error
    monkeypatch.setattr(fleet, "LOADING_S", 60.0)
    engine = SmallEngine(folder)
    with serving(engine, port=ports[1]):
        assert trainer.publish(2).version == 2
        assert engine.version == 2


def test_training_waits_for_as_many_engines_as_were_asked_for(folder, tmp_path, hub, monkeypatch):
    monkeypatch.setenv("NUM_INFERENCE_NODES", "2")
    port = free_port()
    with serving(SmallEngine(folder)) as url:
        urls = [url, f"http://127.0.0.1:{port}"]

        def has_joined():
            return any(sync._list_members() for sync in Trainer.started)

        error = error_once(has_joined, monkeypatch, lambda: Trainer(folder, tmp_path, hub, urls))
        assert "1 of 2 engines have joined this run within" in error
        monkeypatch.setattr(fleet, "LOADING_S", 60.0)
        with serving(SmallEngine(folder), port=port):
            Trainer(folder, tmp_path, hub, urls).publish(0)
            assert table(hub) == dict.fromkeys(urls, ("serving", 0))


@pytest.mark.usefixtures("no_retries")
def test_an_engine_of_another_number_format_does_not_serve(folder, tmp_path, hub):
    good, other = SmallEngine(folder), SmallEngine(folder, dtype=torch.bfloat16)
    with serving(good) as good_url, serving(other) as other_url:
        trainer = Trainer(folder, tmp_path, hub, [good_url, other_url], dtype="float32")
        trainer.publish(0)
        assert table(hub)[good_url] == ("serving", 0)
        assert table(hub)[other_url] == ("out", None)
        assert "/reload_weights" not in other.calls


@pytest.mark.usefixtures("no_retries")
def test_training_starts_with_the_first_engine_that_fits(folder, tmp_path, hub):
    good, other = SmallEngine(folder), SmallEngine(folder, dtype=torch.bfloat16)
    with serving(good) as good_url, serving(other) as other_url:
        trainer = Trainer(folder, tmp_path, hub, [other_url, good_url], dtype="float32")
        trainer.publish(0)
        wait_for(lambda: table(hub) == {good_url: ("serving", 0), other_url: ("out", None)})


def test_when_no_engine_fits_the_reason_is_raised_at_the_deadline(folder, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(fleet, "LOADING_S", 2.0)
    began = time.monotonic()
    with serving(SmallEngine(folder, dtype=torch.bfloat16)) as url, pytest.raises(ConfigError, match="not float32"):
        Trainer(folder, tmp_path, hub, [url, "http://127.0.0.1:9"], dtype="float32")
    assert time.monotonic() - began > 2, "another engine may join until then"


def test_an_engine_that_failed_once_is_asked_again_at_the_start(folder, tmp_path, hub, monkeypatch):
    attach, times = fleet.attach_own_weights, Counter()

    def attach_at_the_second_time(config, link):
        times[link.url] += 1
        if times[link.url] == 1:
            raise SyncError("it was busy")
        return attach(config, link)

    monkeypatch.setattr(fleet, "attach_own_weights", attach_at_the_second_time)
    monkeypatch.setattr(fleet, "LOADING_S", 60.0)
    with serving(SmallEngine(folder)) as url:
        Trainer(folder, tmp_path, hub, [url, "http://127.0.0.1:9"])
    assert times == {url: 2}


def test_an_engine_that_died_after_it_was_listed_does_not_delay_the_start(folder, tmp_path, hub):
    dead = ServedEngine(engine_id="dead", url=f"http://127.0.0.1:{free_port()}", model=str(folder), dtype="float32")
    report = msgspec.json.encode(ProcessReport(kind="engine", name="a", machine="m", pid=1, serves=dead))
    httpx.post(f"{hub.url}/v1/reports", content=report, headers={"Content-Type": "application/json"})
    with serving(SmallEngine(folder)) as url:
        trainer = within(60, lambda: Trainer(folder, tmp_path, hub, [url, "http://127.0.0.1:9"]))
        assert trainer.publish(0).version == 0


def test_a_first_publish_without_any_engine_ends_at_the_deadline(folder, tmp_path, hub, monkeypatch):
    with serving(SmallEngine(folder)) as url:
        trainer = Trainer(folder, tmp_path, hub, [url, "http://127.0.0.1:9"], publish_timeout_s=1.0)
    monkeypatch.setattr(fleet, "LOADING_S", 1.0)
    with pytest.raises(SyncError, match=r"no engine of this run answers|ended during"):
        within(20, lambda: trainer.publish(0))


@pytest.mark.usefixtures("no_retries")
def test_an_engine_with_another_number_of_workers_is_out_and_that_is_said(folder, tmp_path, hub):
    one, two = SmallEngine(folder), SmallEngine(folder, num_workers=2)
    with serving(one) as url, ExitStack() as stack:
        port = free_port()
        trainer = Trainer(folder, tmp_path, hub, [url, f"http://127.0.0.1:{port}"])
        trainer.publish(0)
        other = stack.enter_context(serving(two, port=port))
        wait_for(lambda: table(hub).get(other) == ("out", None))
        assert "split over 2 GPUs, and those of the run's engines over 1" in rows_of(hub)[other]["reason"]
        assert "/reload_weights" not in two.calls


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train.weight_bridge_mode": "shared_vllm"}, "weight_bridge_mode shared_vllm publishes to one engine"),
        ({"train.use_shared_memory": "true", "train.broadcast_by": "memory"}, "broadcast_by memory publishes to one"),
        ({"train.weight_bridge_mode": "lora_only", "train.single_copy": "true"}, "single_copy is for one engine"),
        ({"train.weight_bridge_mode": "reload", "train.verify_publish": "off"}, "verify_publish is off"),
    ],
)
def test_settings_that_several_engines_cannot_have_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        load_run(None, {"train.engine_url": "http://a:1 http://b:1", **settings})
