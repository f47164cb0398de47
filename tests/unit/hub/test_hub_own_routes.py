from __future__ import annotations

import asyncio
import contextlib
import datetime
import threading
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from treadle.config.schema import HubConfig
from treadle.hub.endpoint import access_of
from treadle.hub.presence import GONE_AFTER_S, PRESENT_FOR_S, Presence
from treadle.hub.process import app_of
from treadle.hub.state import HubState
from treadle.store import EnvRecord, Store, groups
from treadle.wire.groups import BINARY_TYPE, LeaseAnswer, ScoredGroup
from treadle.wire.hub import EnvState, HubStatus


@contextlib.asynccontextmanager
async def in_this_loop(store: Store, config: HubConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A hub and its client in one event loop, where a test can see calls wait for each other."""
    hub = HubState.build(store, config, asyncio.get_running_loop().time)
    app = app_of(hub, access_of(config, {}))
    await hub.validators.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            yield client
    finally:
        await hub.validators.close()


def test_a_lease_is_a_typed_answer_that_carries_our_fields(client, calls):
    calls.register(starting_step=3)
    client.get("/batch")
    calls.register_env()
    calls.post(1, policy_version=3, item=9, metrics={"accuracy": 0.5}, env_id=0)
    calls.post(2)
    raw = client.post("/v1/lease", json={"step": 4, "holder": "a"}).content
    batch = msgspec.json.decode(raw, type=LeaseAnswer).batch
    assert batch is not None
    assert (batch.step, batch.lease_s) == (4, 60.0)
    first = msgspec.convert(calls.group(tag=1), ScoredGroup)
    first.policy_version, first.item, first.metrics, first.env_id = 3, 9, {"accuracy": 0.5}, 0
    assert batch.groups == [first, msgspec.convert(calls.group(tag=2), ScoredGroup)]


def test_no_batch_is_answered_with_the_reason(client, calls):
    assert calls.lease(1) == {
        "batch": None,
        "reason": "no trainer has registered, so the size of a batch is not known",
    }
    calls.register(batch_size=64)
    calls.post(1, 2, 3)
    reason = "3 of 32 groups wait (6 of 64 sequences); 0 environments registered"
    assert calls.lease(1) == {"batch": None, "reason": reason}
    assert client.get("/v1/explain").json() == {"reason": reason}
    calls.register()
    assert "a batch is ready" in client.get("/v1/explain").json()["reason"]


def test_the_first_lease_opens_the_registration_of_envs(calls):
    calls.register()
    calls.lease(1)
    assert calls.register_env()["status"] == "success"


def test_the_life_of_a_batch_over_http(client, calls, clock):
    calls.register()
    calls.post(0, 1, 2, 3)
    leased = calls.lease(1)["batch"]
    update = {"token": leased["token"]}
    assert client.post("/v1/lease", json={"step": 1, "holder": "b"}).status_code == 409
    assert client.post("/v1/batches/1/renew", json=update).json()["lease_s"] == 60.0
    assert client.post("/v1/batches/1/ack", json={"token": "wrong"}).status_code == 409
    assert client.post("/v1/batches/1/ack", json=update).json() == {
        "status": "acknowledged",
        "current_step": 1,
    }
    assert client.get("/status").json() == {"current_step": 1, "queue_size": 2}
    assert client.post("/v1/batches/1/renew", json=update).status_code == 409

    again = calls.lease(1)["batch"]
    assert again["groups"] == leased["groups"]
    assert again["token"] != leased["token"]
    assert client.post("/v1/batches/1/ack", json=update).status_code == 409

    clock.now_s += 61
    assert calls.lease(1, holder="b")["batch"]["groups"] == leased["groups"]
    assert client.post("/v1/batches/9/ack", json=update).status_code == 409
    assert client.post("/v1/batches/nine/ack", json=update).status_code == 404


def test_a_batch_given_back_too_often_is_listed_with_its_reason(client, calls):
    calls.register()
    calls.post(0, 1, 2, 3)
    for status in ("returned", "dead-lettered"):
        batch = calls.lease(1)["batch"]
        assert calls.tags(batch["groups"]) == [0, 1]
        body = {"token": batch["token"], "reason": "it raises"}
        assert client.post("/v1/batches/1/nack", json=body).json() == {"status": status}
    letters = client.get("/v1/dead-letters").json()["dead_letters"]
    assert [(letter["id"], letter["step"], letter["reason"]) for letter in letters] == [
        (2, 1, "it raises"),
        (1, 1, "it raises"),
    ]
    assert calls.tags(calls.lease(1)["batch"]["groups"]) == [2, 3]


def test_a_trainer_that_comes_back_repeats_its_steps_on_the_same_data(client, calls):
    calls.register()
    calls.post(*range(8))
    before_restart = {}
    for step in (1, 2, 3):
        batch = calls.lease(step)["batch"]
        before_restart[step] = batch["groups"]
        if step < 3:
            client.post(f"/v1/batches/{step}/ack", json={"token": batch["token"]})
    calls.register(starting_step=1, headers={"Treadle-Holder": "a"})
    assert client.get("/status").json()["current_step"] == 1
    assert calls.lease(2, holder="b")["batch"]["groups"] == before_restart[2]
    assert calls.lease(3, holder="b")["batch"]["groups"] == before_restart[3]
    assert calls.tags(calls.lease(4, holder="b")["batch"]["groups"]) == [6, 7]


def test_status_adds_up(client, calls, clock):
    calls.register()
    client.get("/batch")
    calls.register_env()
    calls.post(*range(7), env_id=0)
    client.post("/v1/batches/1/ack", json={"token": calls.lease(1)["batch"]["token"]})
    calls.lease(2)
    clock.now_s += 2
    status = msgspec.json.decode(client.get("/v1/status").content, type=HubStatus)
    assert (status.step, status.started, status.batch_size) == (1, True, 4)
    assert (status.queued_groups, status.queued_sequences) == (3, 6)
    assert (status.leased_groups, status.trained_groups, status.dead_groups) == (2, 2, 0)
    assert status.accepted_groups == 7
    assert [(env.name, env.groups_accepted, env.idle_s) for env in status.envs] == [("math_0", 7, 2.0)]


def standing_of(client, env_id):
    return msgspec.json.decode(client.get(f"/v1/envs/{env_id}").content, type=EnvState)


def test_an_environment_learns_how_much_of_its_own_is_not_trained_yet(client, calls, clock):
    calls.register()
    client.get("/batch")
    calls.register_env(weight=3.0)
    calls.register_env(desired_name="code", weight=1.0)
    calls.post(*range(7), env_id=0)
    calls.post(7, env_id=1)
    client.post("/v1/batches/1/ack", json={"token": calls.lease(1)["batch"]["token"]})
    calls.lease(2)
    clock.now_s += 2
    standing, others = standing_of(client, 0), standing_of(client, 1)
    assert (standing.step, standing.share, standing.batch_size) == (1, 0.75, 4)
    assert standing.untrained_sequences + others.untrained_sequences == 12  # 8 groups of 2 posted, 2 trained
    assert client.get("/v1/status").json()["envs"][0]["idle_s"] == 0.0  # whoever asks is alive
    assert client.get("/v1/envs/9").status_code == 404
    assert client.get("/v1/envs/none").status_code == 404


def test_shares_are_one_together_and_those_who_are_gone_have_none(client, calls, clock):
    calls.register()
    client.get("/batch")
    calls.register_env(weight=1.0, min_batch_allocation=0.5)
    calls.register_env(desired_name="code", weight=3.0)
    assert [standing_of(client, env_id).share for env_id in (0, 1)] == [0.625, 0.375]
    assert standing_of(client, 0).num_present == 2
    clock.now_s += 60
    assert (standing_of(client, 0).share, standing_of(client, 0).num_present) == (1.0, 1)


def test_an_environment_learns_that_a_trainer_waits(client, calls):
    calls.register()
    client.get("/batch")
    calls.register_env()
    assert standing_of(client, 0).trainer_waits
    calls.post(0, 1, env_id=0)
    assert len(client.get("/batch").json()["batch"]) == 2
    assert not standing_of(client, 0).trainer_waits
    assert calls.lease(2)["batch"] is None
    assert standing_of(client, 0).trainer_waits


def test_what_a_resumed_trainer_has_in_its_checkpoint_is_trained(client, calls):
    """It was killed between the checkpoint of step 2 and its acknowledgement."""
    calls.register()
    client.get("/batch")
    calls.register_env()
    calls.post(*range(6), env_id=0)
    for step in (1, 2, 3):
        calls.lease(step)
    calls.register(starting_step=2, headers={"Treadle-Holder": "a"})
    status = client.get("/v1/status").json()
    assert (status["trained_groups"], status["leased_groups"]) == (4, 2)
    assert calls.tags(calls.lease(3)["batch"]["groups"]) == [4, 5]


def test_a_run_has_a_name_that_a_reset_changes(client, calls):
    calls.register()
    client.get("/batch")
    first = calls.register_env()["run_id"]
    assert calls.register_env(headers={"Treadle-Resume": "1"})["run_id"] == first
    client.get("/reset_data")
    calls.register()
    client.get("/batch")
    assert calls.register_env()["run_id"] not in ("", first)


@pytest.mark.parametrize(
    "body",
    [{"step": -1, "holder": "a"}, {"step": 1, "holder": ""}, {"step": 2**70, "holder": "a"}, {"step": 1},
     {"step": 1, "holder": "a", "wait_s": "nan"}],
)  # fmt: skip
def test_a_nonsensical_lease_is_422(client, body):
    assert client.post("/v1/lease", json=body).status_code == 422


def test_a_waiting_lease_is_answered_when_the_batch_is_complete(store, config, calls):
    """In one event loop: the call waits, two groups arrive, it is answered at once."""
    calls.register()

    async def scenario() -> tuple[httpx.Response, float]:
        async with in_this_loop(store, config) as client:
            body = {"step": 1, "holder": "a", "wait_s": 30}
            waiting = asyncio.create_task(client.post("/v1/lease", json=body))
            for _ in range(2):
                await asyncio.sleep(0.05)
                assert not waiting.done()
                await client.post("/scored_data", json=calls.group())
            began = asyncio.get_running_loop().time()
            return await waiting, asyncio.get_running_loop().time() - began

    answer, seconds = asyncio.run(scenario())
    assert len(answer.json()["batch"]["groups"]) == 2
    assert seconds < 10  # long before its wait is over


def test_a_waiting_lease_gives_up_in_time(store, config, calls):
    calls.register()

    async def scenario() -> tuple[httpx.Response, float]:
        async with in_this_loop(store, config) as client:
            began = asyncio.get_running_loop().time()
            answer = await client.post("/v1/lease", json={"step": 1, "holder": "a", "wait_s": 0.2})
            return answer, asyncio.get_running_loop().time() - began

    answer, seconds = asyncio.run(scenario())
    assert answer.json()["batch"] is None
    assert 0.2 <= seconds < 10


def test_concurrent_posts_share_commits_and_keys_hold(store, config, calls):
    """200 posts while a commit is under way, each key twice: 100 groups stored, in a few commits."""
    config = config.model_copy(update={"queue_limit_groups": 1000})
    commit_ends = threading.Event()

    async def scenario() -> list[str]:
        async with in_this_loop(store, config) as client:
            posts = [
                asyncio.create_task(
                    client.post("/scored_data", json=calls.group(tag=i), headers={"Idempotency-Key": f"k{i}"})
                )
                for i in [*range(100), *range(100)]
            ]
            async with asyncio.timeout(20):
                while store._writer._jobs.qsize() < len(posts):
                    await asyncio.sleep(0.01)
            assert not any(call.done() for call in posts)
            commit_ends.set()
            return [answer.json()["status"] for answer in await asyncio.gather(*posts)]

    store._writer.submit(lambda _: commit_ends.wait(20))
    commits = []
    store.commit_watchers.append(lambda *_: commits.append(1))
    statuses = asyncio.run(scenario())
    assert statuses == ["received"] * 100 + ["duplicate"] * 100
    assert store.read(groups.counts).accepted_groups == 100
    assert len(commits) <= 6


@pytest.mark.parametrize(
    "rest",
    [
        {"images": float("nan")},
        {"images": msgspec.msgpack.Ext(5, b"x")},
        {"images": b"bytes"},
        {"images": {1: 2}},
        {"images": 2**64 - 1},
        {"images": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
        {"overrides": [{}]},
        {"overrides": [None, None]},
        {"messages": [[{"role": "user"}]]},
        {"advantages": [[float("inf")]]},
        {"tokens": [[1]]},
        {"weight": 2.0},
    ],
)
def test_what_msgpack_can_say_and_json_cannot_is_refused(client, rest):
    """A client of Atropos' must be able to get every group, and a trainer to train it."""
    numbers = b"\1\0\0\0" * 2
    packed = {"lengths": [1, 1], "tokens": numbers, "masks": numbers, "scores": [1.0, 0.0], "rest": rest}
    body = msgspec.msgpack.encode([msgspec.msgpack.encode(packed)])
    answer = client.post("/v1/groups", content=body, headers={"Content-Type": BINARY_TYPE})
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"][:2] == ["body", 0]
    plain = msgspec.msgpack.encode([msgspec.msgpack.encode(packed | {"rest": {"images": [None, {"a": "x"}]}})])
    assert client.post("/v1/groups", content=plain, headers={"Content-Type": BINARY_TYPE}).status_code == 200
    assert client.get("/latest_example").json()["images"] == [None, {"a": "x"}]


def test_environments_that_ask_at_once_are_read_from_the_store_once(clock) -> None:
    registered = [EnvRecord(n, f"e_{n}", "e", 1.0, 8, 64, None, 0, connected=True) for n in range(3)]
    num_reads = 0

    def read_envs() -> list[EnvRecord]:
        nonlocal num_reads
        num_reads += 1
        return registered

    def shares() -> list[float]:
        return [present.batch_share(n) for n in range(3) if (present := presence.others_with(n))]

    def read_env(env_id: int) -> EnvRecord | None:
        return next((env for env in registered if env.env_id == env_id), None)

    presence = Presence(clock, read_envs, read_env)
    assert shares() == pytest.approx([1 / 3] * 3)
    assert num_reads == 1
    assert presence.others_with(3) is None
    registered.append(EnvRecord(3, "e_3", "e", 3.0, 8, 64, None, 0, connected=True))
    presence.registrations_changed()
    assert shares() == pytest.approx([1 / 6] * 3)
    clock.now_s += 2 * PRESENT_FOR_S
    before = num_reads
    assert shares() == pytest.approx([1 / 6] * 3)
    assert num_reads == before + 1
    clock.now_s += 2 * GONE_AFTER_S
    assert shares() == pytest.approx([1.0, 1 / 2, 1 / 3]), "all were silent, and ask one after the other"
    assert num_reads == before + 2
