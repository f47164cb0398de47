from __future__ import annotations

import contextlib
import os

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.unit.hub.conftest import LOCAL, HubCalls
from treadle.hub import metrics
from treadle.hub.endpoint import access_of
from treadle.hub.process import app_of
from treadle.hub.state import HubState
from treadle.net.prometheus_text import CONTENT_TYPE, Histogram, Page
from treadle.store import SqliteStore
from treadle.wire.groups import BINARY_TYPE, ScoredGroup, join_groups, pack_group

PLACES = ("queue_groups", "leased_groups", "trained_groups_total", "dropped_groups_total", "dead_groups_total")


class Figures:
    """A page as its readers see it: figures("queue_groups", env="a_0") sums the samples with these labels."""

    def __init__(self, client: TestClient) -> None:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == CONTENT_TYPE
        self.text = answer.text
        self.samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"treadle_hub_{name}" and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if sample.name == f"treadle_hub_{name}"}

    def assert_every_group_is_in_one_place(self) -> None:
        for env in self.labels("accepted_groups_total", "env"):
            assert self("accepted_groups_total", env=env) == sum(self(place, env=env) for place in PLACES)


@pytest.fixture
def figures(client):
    return lambda: Figures(client)


@contextlib.contextmanager
def hub_of(store, config, clock):
    with TestClient(
        app_of(HubState.build(store, config, clock), access_of(config, os.environ)), LOCAL, client=("127.0.0.1", 50_000)
    ) as client:
        yield HubCalls(client)


def start(calls, **fields):
    calls.register(**fields)
    calls.lease(1)
    return calls.register_env()["env_id"]


def test_every_accepted_group_is_counted_in_exactly_one_state(client, calls, figures):
    env_id = start(calls)

    def now(**expected):
        page = figures()
        page.assert_every_group_is_in_one_place()
        assert {name: page(name, env="math_0") for name in expected} == expected
        return page

    now(accepted_groups_total=0, queue_groups=0, delivered_groups_total=0)
    for tag in range(6):
        calls.post(tag, env_id=env_id)
    page = now(accepted_groups_total=6, queue_groups=6, queue_sequences=12, leased_groups=0)
    assert page("queue_bytes", env="math_0") > 100
    assert 0 <= page("oldest_waiting_seconds") < 10

    token = calls.lease(1)["batch"]["token"]
    now(queue_groups=4, leased_groups=2, delivered_groups_total=2, trained_groups_total=0)
    client.post("/v1/batches/1/ack", json={"token": token})
    now(leased_groups=0, delivered_groups_total=2, trained_groups_total=2)

    for _ in range(2):  # max_deliveries
        token = calls.lease(2)["batch"]["token"]
        client.post("/v1/batches/2/nack", json={"token": token, "reason": 'it said "no"\n'})
    page = now(queue_groups=2, delivered_groups_total=4, dead_groups_total=2, trained_groups_total=2)
    assert page("batches_delivered_total", delivery="first") == 2
    assert page("batches_delivered_total", delivery="repeated") == 1
    assert page("step") == 1

    calls.register(batch_size=1)  # what waits is larger than any batch now
    page = now(queue_groups=0, dropped_groups_total=2, accepted_groups_total=6)
    assert page("dropped_groups_total", env="math_0", reason="oversize") == 2
    assert page("batch_size") == 1
    assert page("oldest_waiting_seconds") == 0

    client.get("/reset_data")
    assert figures()("accepted_groups_total") == 0


def test_what_the_store_knows_survives_a_restart(config, clock):
    with SqliteStore.open(config.database, clock=clock) as store, hub_of(store, config, clock) as calls:
        env_id = start(calls)
        calls.post(0, 1, 2, env_id=env_id)
        calls.lease(1)
        before = Figures(calls.client)
    names = ("accepted_groups_total", "delivered_groups_total", "queue_groups", "leased_groups", "queue_bytes")
    with SqliteStore.open(config.database, clock=clock) as again, hub_of(again, config, clock) as other:
        after = Figures(other.client)
    values = [before(name, env="math_0") for name in names]
    assert values[:-1] == [3, 2, 1, 2]
    assert [after(name, env="math_0") for name in names] == values
    assert after("batches_delivered_total") == 0  # since the start of this process


def test_stale_groups_are_dropped_under_their_reason(store, config, clock):
    with hub_of(store, config.model_copy(update={"max_age": 1}), clock) as calls:
        calls.register(starting_step=9)
        calls.post(1, 2, policy_version=3)
        calls.post(3, 4, policy_version=9)
        assert calls.tags(calls.lease(10)["batch"]["groups"]) == [3, 4]
        page = Figures(calls.client)
    page.assert_every_group_is_in_one_place()
    assert page("dropped_groups_total", env="none", reason="stale") == 2
    assert page("delivered_age_versions_bucket", le="0") == 2


def test_groups_that_count_less_are_counted(store, config, clock):
    config = config.model_copy(update={"max_age": 1, "stale": "downweight"})
    with hub_of(store, config, clock) as calls:
        calls.register(starting_step=9)
        calls.post(1, policy_version=3)
        calls.post(2, policy_version=9)
        calls.lease(10)
        page = Figures(calls.client)
    assert page("downweighted_groups_total") == 1
    assert page("delivered_age_versions_count") == 2
    assert page("delivered_age_versions_sum") == 6


def test_refusals_are_counted_for_the_environment_that_was_refused(client, calls, figures):
    env_id = start(calls)
    bad = calls.group(env_id=env_id) | {"scores": [1.0]}
    assert client.post("/scored_data", json=bad).status_code == 422
    assert client.post("/scored_data_list", json=[calls.group(env_id=env_id), bad]).status_code == 422
    packed = join_groups([pack_group(msgspec.convert(calls.group(env_id=env_id, tag=-1), ScoredGroup))])
    assert client.post("/v1/groups", content=packed, headers={"content-type": BINARY_TYPE}).status_code == 422
    assert client.post("/scored_data", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    for made_up in range(100, 120):
        assert client.post("/scored_data", json=calls.group(env_id=made_up)).status_code == 422
    text = b'{"tokens": [[1]], "masks": [[1]], "scores": [NaN], "env_id": 77}'
    assert client.post("/scored_data", content=text, headers={"content-type": "application/json"}).status_code == 422
    page = figures()
    assert page("refused_posts_total", env="math_0", reason="length_mismatch") == 2
    assert page("refused_posts_total", env="math_0", reason="negative_id") == 1
    assert page("refused_posts_total", env="none", reason="json_invalid") == 1
    assert page("refused_posts_total", env="none", reason="unknown_env") >= 20
    assert page.labels("refused_posts_total", "env") == {"math_0", "none"}
    assert page("refused_requests_total", route="/scored_data", reason="length_mismatch") == 1
    page.assert_every_group_is_in_one_place()


def test_a_refusal_in_a_porter_process_is_counted_for_its_environment(client, calls, figures):
    env_id = start(calls, max_token_len=100_000)
    long = {"tokens": [[1] * 20_000], "masks": [[1] * 20_000], "scores": [], "env_id": env_id}
    assert client.post("/scored_data", json=long).status_code == 422
    assert figures()("refused_posts_total", env="math_0", reason="length_mismatch") == 1


def test_a_full_queue_is_counted_once_a_post_and_environment(client, calls, figures):
    env_id = start(calls)
    groups = [calls.group(env_id=env_id)] * 51
    assert client.post("/scored_data_list", json=groups).status_code == 503
    page = figures()
    assert page("refused_posts_total", env="math_0", reason="queue_full") == 1
    assert page("refused_requests_total", route="/scored_data_list", reason="queue_full") == 1


def test_a_reused_key_is_a_refusal_too(client, calls, figures):
    env_id = start(calls)
    key = {"Idempotency-Key": "k"}
    assert client.post("/scored_data", json=calls.group(tag=1, env_id=env_id), headers=key).status_code == 200
    assert client.post("/scored_data", json=calls.group(tag=2, env_id=env_id), headers=key).status_code == 409
    assert figures()("refused_posts_total", env="math_0", reason="key_reused") == 1


def test_a_minimum_that_was_not_waited_for_is_counted_once(client, calls, figures, clock):
    start(calls)
    calls.register_env(desired_name="silent", min_batch_allocation=0.5)
    clock.now_s += 60
    calls.post(1, 2, env_id=0)
    calls.lease(1)
    for _ in range(2):  # looking twice does not count twice
        page = figures()
        assert page("minimums_waived_total", env="silent_0") == 1
    assert page("env_idle_seconds", env="silent_0") == 60
    assert page("env_connected") == 2
    client.post("/disconnect-env", json={"env_id": 1})
    page = figures()
    assert page("env_connected") == 1
    assert "silent_0" not in page.labels("env_idle_seconds", "env")


def test_times_and_commits_are_in_the_metrics(client, calls, figures):
    start(calls)
    calls.post(1, 2)
    calls.lease(1)
    client.get("/nowhere/of/a/client")
    client.post("/status")
    page = figures()
    assert page("request_seconds_count", route="/scored_data", method="POST", status="2xx") == 2
    assert page("request_seconds_bucket", route="/scored_data", le="+Inf") == 2
    assert page("queue_wait_seconds_count") == 2
    assert page("commit_seconds_count") == page("commit_jobs_count") >= 5
    assert page("commit_jobs_sum") >= page("commit_jobs_count")
    assert page("refused_requests_total", route="none", reason="404") == 1
    assert page("refused_requests_total", route="none", reason="405") == 1
    assert "nowhere" not in page.text
    assert page("build_info") == 1
    assert page("trainer_registered") == 1


def test_names_are_escaped(calls, figures):
    start(calls)
    name = 'quote " back \\ line \n end'
    calls.register_env(desired_name=name)
    assert f"{name}_0" in figures().labels("accepted_groups_total", "env")


def test_more_environments_than_are_named_are_counted_together(calls, figures, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_NAMED_ENVS", 2)
    start(calls)
    for name in ("b", "c", "d"):
        calls.register_env(desired_name=name)
    for env_id in range(4):
        calls.post(env_id, env_id=env_id)
    page = figures()
    assert page.labels("accepted_groups_total", "env") == {"math_0", "b_0", "further"}
    assert page("accepted_groups_total", env="further") == 2
    page.assert_every_group_is_in_one_place()


def test_a_batch_that_is_dissolved_does_not_take_its_delivery_back(calls, figures):
    start(calls)
    calls.post(1, 2, 3, env_id=0)
    calls.lease(1)
    assert figures()("delivered_groups_total", env="math_0") == 2
    calls.register(batch_size=6)
    page = figures()
    assert (page("delivered_groups_total", env="math_0"), page("queue_groups", env="math_0")) == (2, 3)
    calls.lease(1)
    page = figures()
    assert page("delivered_groups_total", env="math_0") == 5
    page.assert_every_group_is_in_one_place()


def test_the_text_format_by_hand():
    page = Page()
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 9):
        histogram.observe(value)
    page.family("h", "histogram", "what\nit is").add_histogram(histogram, {"a": "b"})
    page.family("g", "gauge", "x").add(float("inf"))
    assert page.text().splitlines() == [
        "# HELP h what\\nit is",
        "# TYPE h histogram",
        'h_bucket{a="b",le="1"} 2',
        'h_bucket{a="b",le="2.5"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 12.5',
        'h_count{a="b"} 4',
        "# HELP g x",
        "# TYPE g gauge",
        "g +Inf",
    ]
