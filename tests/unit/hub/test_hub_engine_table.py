"""The table of engines: what they report, joined with what the trainer says of their weights."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from treadle.hub.engine_table import SILENT_AFTER_S, EngineTable
from treadle.hub.observer_routes import TABLE_AGE_S
from treadle.wire.engines import EngineEntry, EngineVerdict, EngineVerdicts, ServedEngine
from treadle.wire.hub import LastReport, ProcessReport


def reported(engine_id: str, url: str = "http://a:1", heard_s: float = 0.5) -> LastReport:
    served = ServedEngine(engine_id=engine_id, url=url, model="/m", dtype="float32")
    report = ProcessReport(kind="engine", name="engine", machine="m", pid=1, policy_version=3, serves=served)
    return LastReport(report=report, heard_s=heard_s)


def verdict(engine_id: str, url: str = "http://a:1", **more: Any) -> EngineVerdict:
    return EngineVerdict(engine_id=engine_id, url=url, **{"state": "serving", "proved_version": 3, **more})


def rows(reports: list[LastReport], *verdicts: EngineVerdict) -> list[EngineEntry]:
    table = EngineTable(lambda: 0.0)
    if verdicts:
        table.judge(EngineVerdicts(engines=list(verdicts)))
    return table.rows(reports).engines


def states(reports: list[LastReport], *verdicts: EngineVerdict) -> list[tuple[str, str]]:
    return [(entry.engine_id, entry.state) for entry in rows(reports, *verdicts)]


def test_an_engine_serves_only_by_the_trainers_verdict_on_this_start_of_it():
    assert states([reported("new")]) == [("new", "joining")]
    assert states([reported("new")], verdict("new")) == [("new", "serving")]
    assert states([reported("new")], verdict("old")) == [("new", "joining")], "restarted at the same address"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_proof_holds_for_the_url_that_the_trainer_asked(order):
    reports = [reported("a"), reported("a", url="http://evil:1")]
    (entry,) = rows([reports[place] for place in order], verdict("a"))
    assert (entry.url, entry.served and entry.served.url) == ("http://a:1", "http://a:1")
    (entry,) = rows([reports[1]], verdict("a"))
    assert (entry.url, entry.state) == ("http://a:1", "serving"), "requests go nowhere else"


@pytest.mark.parametrize("kind", ["env", "trainer", "hub"])
def test_only_engines_may_name_an_engine_in_their_reports(client: TestClient, kind: Any):
    report = ProcessReport(kind=kind, name="x", machine="m", pid=1, serves=reported("a").report.serves)
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/reports", content=msgspec.json.encode(report), headers=headers)
    assert (answer.status_code, "cannot name an engine" in answer.text) == (403, True)
    assert client.get("/v1/engines").json()["engines"] == []


def test_an_engine_without_reports_for_some_seconds_does_not_serve():
    assert states([reported("a", heard_s=SILENT_AFTER_S + 1)], verdict("a")) == [("a", "silent")]


def test_an_engine_that_reports_elsewhere_stands_as_the_trainer_says():
    entry = rows([], verdict("a", state="out", reason="it hangs"))[0]
    assert (entry.url, entry.state, entry.reason, entry.proved_version) == ("http://a:1", "out", "it hangs", 3)


def test_the_last_verdicts_hold_whichever_hub_they_were_posted_to():
    def posted(sequence: int, state: str) -> EngineVerdicts:
        return EngineVerdicts(engines=[verdict("a", state=state)], sequence=sequence)

    def state() -> str:
        (entry,) = table.rows([reported("a")]).engines
        return entry.state

    table = EngineTable(lambda: 0.0)
    table.hear([posted(10, "serving"), posted(9, "out")])
    assert (state(), table.rows([]).has_trainer, table.posted_here) == ("serving", True, None)
    table.hear([])
    assert state() == "serving", "a hub that is gone takes no verdicts with it"
    table.judge(posted(12, "joining"))
    table.hear([posted(11, "serving")])
    assert state() == "joining", "what the trainer posted here is later"
    table.hear([posted(13, "out")])
    assert state() == "out"
    table.hear([])
    assert state() == "out", "the hub to which the trainer posted last is silent"
    table.judge(posted(12, "serving"))
    assert (state(), table.rows([]).sequence) == ("out", 13), "a late post"
    table.clear()
    assert not table.rows([]).has_trainer


def test_the_table_is_read_and_written_over_http(client: TestClient):
    report = ProcessReport(kind="engine", name="engine-1", machine="m", pid=1, serves=reported("a").report.serves)
    client.post("/v1/reports", content=msgspec.json.encode(report), headers={"Content-Type": "application/json"})
    before = client.get("/v1/engines").json()
    assert (before["has_trainer"], before["engines"][0]["state"]) == (False, "joining")
    verdict = {"engine_id": "a", "url": "http://a:1", "state": "serving"}
    answer = client.post("/v1/engines/verdicts", json={"engines": [verdict]}).json()
    assert answer == client.get("/v1/engines").json() | {"engines": answer["engines"]}
    assert (answer["has_trainer"], answer["engines"][0]["state"], answer["engines"][0]["name"]) == (
        True, "serving", "engine-1",
    )  # fmt: skip
    unknown = client.post("/v1/engines/verdicts", json={"engines": [{"engine_id": "a", "url": "u", "state": "good"}]})
    assert unknown.status_code == 422


def test_the_table_is_made_once_for_many_readers(client: TestClient, clock, monkeypatch):
    num_made, make = [], EngineTable.rows
    monkeypatch.setattr(EngineTable, "rows", lambda *args, **more: num_made.append(1) or make(*args, **more))
    engines = [{"engine_id": f"e{n}", "url": f"http://10.0.0.{n}:9001", "state": "serving"} for n in range(64)]
    judged = client.post("/v1/engines/verdicts", json={"engines": engines})
    answers = [client.get("/v1/engines", headers={"Accept-Encoding": sent}) for sent in ("gzip", "identity") * 5]
    assert len(num_made) == 1
    assert {answer.content for answer in answers} == {judged.content}
    assert [answer.headers.get("Content-Encoding") for answer in answers[:2]] == ["gzip", None]
    assert {answer.headers["Vary"] for answer in answers} == {"Accept-Encoding"}

    client.post("/v1/engines/verdicts", json={"engines": engines[:1]})
    assert len(client.get("/v1/engines").json()["engines"]) == 1, "verdicts show at once"
    clock.now_s += TABLE_AGE_S
    client.get("/v1/engines")
    assert len(num_made) == 3


def test_the_table_says_how_many_environments_read_it(client: TestClient, clock, calls):
    calls.register()
    client.get("/batch")
    for _ in range(3):
        client.get(f"/v1/envs/{calls.register_env()['env_id']}")
    assert client.get("/v1/engines").json()["num_present"] == 3
    clock.now_s += 60
    assert client.get("/v1/engines").json()["num_present"] == 0


def test_the_history_has_each_change_of_state_once(client: TestClient):
    def judge(*states: str) -> None:
        engines = [{"engine_id": f"e{n}", "url": f"u{n}", "state": state} for n, state in enumerate(states)]
        assert client.post("/v1/engines/verdicts", json={"engines": engines}).status_code == 200

    for states in (["joining"], ["serving", "joining"], ["serving", "joining"], ["out"]):
        judge(*states)
    changes = client.get("/v1/engines/history").json()["changes"]
    assert [(change["name"], change["state"]) for change in changes] == [
        ("u0", "joining"), ("u0", "serving"), ("u1", "joining"), ("u1", "gone"), ("u0", "out"),
    ]  # fmt: skip
