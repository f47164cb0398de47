"""The page's routes, asked in the process itself, over a real queue and a real run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from bench.page_history import GROUP_SIZE, write_config, write_metrics, write_run
from treadle.dash.routes import open_pages
from treadle.dash.web import HEADERS
from treadle.store import SqliteStore, Store

NUM_STEPS, NUM_GROUPS = 20, 200


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "own"
    write_run(folder, num_steps=NUM_STEPS, num_groups=NUM_GROUPS)
    return folder


def client_of(store: Store, run_folder: Path | None) -> Iterator[TestClient]:
    with open_pages(run_folder, store, lambda: "waiting for 2 more groups of gsm8k", lambda: False) as pages:
        yield TestClient(Starlette(routes=[Route(path, handler, methods=["GET"]) for path, handler in pages]))


@pytest.fixture(scope="module")
def client(run_folder: Path) -> Iterator[TestClient]:
    with SqliteStore.open(run_folder / "hub.sqlite") as store:
        yield from client_of(store, run_folder)


def groups_of(client: TestClient, **asked) -> list[dict]:
    """Once all facts are known."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        answer = client.get("/dash/api/groups", params=asked).json()
        if answer["num_known"] == answer["num_groups"]:
            return client.get("/dash/api/groups", params=asked).json()["groups"]
        time.sleep(0.02)
    raise AssertionError("the facts are not known after 20 s")


def test_the_page_is_served_with_a_strict_content_security_policy(client: TestClient):
    page = client.get("/dash/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert policy == HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("app.js", "style.css", "uPlot.iife.min.js", "icon.svg"):
        assert client.get(f"/dash/{name}").status_code == 200
    for name in ("routes.py", "uPlot.LICENSE", "..%2froutes.py", "nothing.js"):
        assert client.get(f"/dash/{name}").status_code == 404


def test_the_page_names_no_other_host(client: TestClient):
    for name in (
        "",
        "app.js",
        "api.js",
        "charts.js",
        "card.js",
        "start.js",
        "rollouts.js",
        "group.js",
        "processes.js",
        "style.css",
    ):
        text = client.get(f"/dash/{name}").text
        assert "https://" not in text
        assert text.count("http://") == text.count("http://www.w3.org/")  # the name of SVG, which nobody asks for


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient):
    first = client.get("/dash/app.js")
    again = client.get("/dash/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_run_tells_its_charts_and_the_series_have_their_points(client: TestClient):
    run = client.get("/dash/api/run").json()
    assert (run["name"], run["steps"], run["env"]) == ("own", NUM_STEPS, "arithmetic/addition")
    series = client.get("/dash/api/series", params={"names": "reward,mean_kl"}).json()
    assert series["steps"] == list(range(1, NUM_STEPS + 1))
    assert set(series["values"]) == {"reward", "mean_kl"}
    assert len(series["held_out"]) == 11
    cut = client.get("/dash/api/series", params={"names": "reward", "first": 5, "last": 7}).json()
    assert cut["steps"] == [5, 6, 7]


def test_groups_are_filtered_and_paged(client: TestClient):
    assert len(groups_of(client, step=3)) == 9
    assert {group["step"] for group in groups_of(client, step=3)} == {3}
    assert {group["env_id"] for group in groups_of(client, env=1)} == {1}
    assert {group["score"] for group in groups_of(client, score_from=1)} == {1.0}
    assert {group["state"] for group in groups_of(client, state="queued")} == {"queued"}
    first = client.get("/dash/api/groups", params={"limit": 30}).json()
    second = client.get("/dash/api/groups", params={"limit": 30, "before": first["go_on_before"]}).json()
    seen = [group["id"] for group in first["groups"] + second["groups"]]
    assert seen == list(range(NUM_GROUPS, NUM_GROUPS - 60, -1))


def test_a_group_has_its_tokens_as_text_with_logprobs_advantages_and_parts(client: TestClient):
    mixed = next(group for group in groups_of(client, state="trained") if 0 < group["score"] < 1)
    view = client.get(f"/dash/api/groups/{mixed['id']}").json()
    assert len(view["rollouts"]) == GROUP_SIZE
    assert sum(rollout["advantage"] for rollout in view["rollouts"]) == pytest.approx(0)
    for rollout in view["rollouts"]:
        text = "".join(rollout["pieces"])
        assert text.startswith("What is ")
        assert "The sum is " in text[view["prompt_tokens"] :]
        assert rollout["logprobs"][0] is None
        assert rollout["logprobs"][-1] <= 0
        assert rollout["details"]["parts"]["correct"] == rollout["score"]
    assert (view["older"], view["newer"]) == (mixed["id"] - 1, mixed["id"] + 1)
    whole = client.get(f"/dash/api/groups/{mixed['id']}", params={"form": "whole"}).json()
    assert whole["scores"] == [rollout["score"] for rollout in view["rollouts"]]


def test_only_a_trained_group_has_the_trainers_token_values(client: TestClient):
    mixed = next(group for group in groups_of(client, state="trained") if 0 < group["score"] < 1)
    view = client.get(f"/dash/api/groups/{mixed['id']}").json()
    assert view["has_record"]
    for rollout in view["rollouts"]:
        trained = [place for place, is_trained in enumerate(rollout["is_trained"]) if is_trained]
        expected = {round(2 * rollout["advantage"], 3)} if rollout["advantage"] else {0.0}
        assert {round(rollout["trained_advantages"][place], 3) for place in trained} == expected
        differences = [rollout["differences"][place] for place in trained]
        assert all(isinstance(one, float) for one in differences) == (rollout["advantage"] != 0)
        assert rollout["differences"][0] is None
    waiting = groups_of(client, state="queued")[0]
    view = client.get(f"/dash/api/groups/{waiting['id']}").json()
    assert not view["has_record"]
    assert view["rollouts"][0]["differences"] is None


def test_a_search_finds_the_text_says_how_far_it_came_and_goes_on_there(client: TestClient):
    answer = client.get("/dash/api/search", params={"text": "THE SUM is"}).json()
    assert len(answer["hits"]) == 50
    assert answer["num_searched"] == 50
    assert answer["go_on_before"] == NUM_GROUPS - 49
    rest = client.get("/dash/api/search", params={"text": "no such words", "before": 101}).json()
    assert (rest["hits"], rest["num_searched"], rest["go_on_before"]) == ([], 100, None)


def test_the_state_is_a_sentence_and_the_processes_are_listed(client: TestClient):
    now = client.get("/dash/api/now").json()
    result = "held-out accuracy 0.0 % → 80.0 % (75.0 to 85.0, 95 % interval)"
    assert (now["standing"], now["words"]) == ("complete", [f"all {NUM_STEPS} steps are trained", result])
    assert now["groups"]["trained"] == 180
    (hub,) = [one for one in now["processes"] if one["name"] == "hub"]
    assert hub["state"] == "running"
    assert hub["memory_bytes"] > 1e6
    others = {(one["state"], one["detail"]) for one in now["processes"] if one["name"] != "hub"}
    assert others == {("finished", "")}, "a finished run has nobody missing"
    assert "step=19" in client.get("/dash/api/logs/trainer").json()["tail"]
    assert client.get("/dash/api/logs/..%2fconfig").status_code == 404
    syncs = client.get("/dash/api/syncs").json()["syncs"]
    assert [sync["version"] for sync in syncs] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize(
    ("envs", "has_note"),
    [([{"name": "arithmetic"}], True), ([{"name": "arithmetic", "eval_temperature": 1}], False), ([{}, {}], False)],
)
def test_the_sampling_note_is_of_the_only_environment(tmp_path: Path, envs: list[dict], has_note: bool):
    write_config(tmp_path, NUM_STEPS)
    write_metrics(tmp_path, NUM_STEPS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"envs": envs}))
    far = {"step": NUM_STEPS, "accuracy": 0.1, "interval_95": [0.05, 0.15]}
    (tmp_path / "evals" / f"step-{NUM_STEPS:06d}.json").write_text(json.dumps(far))
    with SqliteStore.open(tmp_path / "hub.sqlite") as store:
        for client in client_of(store, tmp_path):
            assert bool(client.get("/dash/api/now").json()["sampling_note"]) == has_note


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("groups", {"step": "x"}, 422),
        ("groups", {"step": "9" * 30}, 422),
        ("groups", {"step": "0" * 20 + "9" * 5000}, 422),
        ("groups", {"score_from": "nan"}, 422),
        ("groups", {"state": "lost"}, 422),
        ("groups/abc", {}, 404),
        ("groups/99999", {}, 404),
        ("search", {}, 422),
        ("search", {"text": "x" * 201}, 422),
        ("series", {"run": "../own"}, 404),
        ("series", {"first": "²"}, 422),
    ],
)
def test_what_cannot_be_meant_is_answered_with_a_sentence(client: TestClient, path: str, asked: dict, status: int):
    answer = client.get(f"/dash/api/{path}", params=asked)
    assert answer.status_code == status
    assert len(answer.json()["detail"]) > 10


def test_a_hub_without_a_run_folder_shows_its_rollouts_and_no_figures(tmp_path: Path):
    with SqliteStore.open(tmp_path / "hub.sqlite") as store:
        for client in client_of(store, None):
            assert client.get("/dash/api/series").json()["num_steps"] == 0
            assert client.get("/dash/api/now").json()["words"] == ["no trainer has registered yet"]
            assert client.get("/dash/api/groups").json()["groups"] == []
            assert client.get("/dash/api/logs/hub").status_code == 404
