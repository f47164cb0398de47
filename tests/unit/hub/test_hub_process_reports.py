"""Reports of processes: overdue waits make the responsible process dump its stacks, and /v1/explain shows them."""

from __future__ import annotations

import pytest

from treadle.hub.state import MOST_OF_A_KIND, ProcessReports
from treadle.watch.describe import describe_problems
from treadle.wire.hub import ProcessReport, WaitReport


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(kind: str = "env", pid: int = 1, **more: object) -> ProcessReport:
    return ProcessReport(kind=kind, name=f"{kind} {pid}", machine="m", pid=pid, **more)  # type: ignore[arg-type]


LATE = WaitReport(what="the engine", seconds=61.0, of="engine", holding="group 17", is_late=True)


def test_whose_turn_it_is_is_asked_once_for_its_stacks() -> None:
    clock = FakeClock()
    process_reports = ProcessReports(clock)
    assert process_reports.take(report("engine", 2)).dump == ""
    assert process_reports.take(report("env", 1, waits=[LATE])).dump == "", "who waits has written its own"
    assert process_reports.take(report("engine", 2)).dump == "env 1 has waited 61 s for the engine (it holds group 17)"
    process_reports.take(report("env", 1, waits=[LATE]))
    assert process_reports.take(report("engine", 2)).dump == "", "once for each wait"
    process_reports.take(report("env", 1))
    process_reports.take(report("env", 1, waits=[LATE]))
    assert process_reports.take(report("engine", 2)).dump == "", "not again within a minute"
    process_reports.take(report("env", 1))
    clock.now_s = 61
    process_reports.take(report("env", 1, waits=[LATE]))
    assert process_reports.take(report("engine", 2)).dump, "a new wait is a new question"


def test_a_late_wait_for_the_hub_dumps_its_stacks_once_a_minute() -> None:
    process_reports = ProcessReports(FakeClock())
    for number in range(3):
        late = WaitReport(what=f"answer {number}", seconds=61.0, of="hub", is_late=True)
        process_reports.take(report("trainer", 1, waits=[late]))
        assert bool(process_reports.hub_is_blamed) == (number == 0)
        process_reports.hub_is_blamed = ""


def test_a_trainer_that_was_started_again_replaces_the_one_that_was_killed() -> None:
    process_reports = ProcessReports(FakeClock())
    ranks = [
        ProcessReport(kind="trainer", name=name, machine="m", pid=1 + n)
        for n, name in enumerate(("trainer", "trainer-1"))
    ]
    for own in ranks:
        process_reports.take(own)
    process_reports.take(ProcessReport(kind="trainer", name="trainer-1", machine="m", pid=9))
    assert [(one.report.name, one.report.pid) for one in process_reports.standings()] == [
        ("trainer", 1),
        ("trainer-1", 9),
    ]
    for pid in (1, 2):  # two environments may have one name
        process_reports.take(ProcessReport(kind="env", name="env", machine="m", pid=pid))
    assert len(process_reports.standings()) == 4


def test_what_a_full_board_does_not_keep_is_not_blamed_either() -> None:
    process_reports = ProcessReports(FakeClock())
    for pid in range(MOST_OF_A_KIND + 100):
        process_reports.take(report("env", pid, waits=[LATE]))
    assert len(process_reports.standings()) == len(process_reports._blamed) == MOST_OF_A_KIND


def test_what_others_are_shown_is_short_and_printable_whoever_sent_it() -> None:
    process_reports = ProcessReports(FakeClock())
    waits = [WaitReport(what="x" * 10_000, seconds=1.0)] * 100
    process_reports.take(
        report("env", 1, waits=waits, state="a\x1b]0;title\x07b", counts={str(n): 1.0 for n in range(1000)})
    )
    (standing,) = process_reports.standings()
    assert len(standing.report.waits) == 16
    assert len(standing.report.waits[0].what) < 510
    assert standing.report.state == "a ]0;title b"
    assert len(standing.report.counts) == 64


def test_a_wait_in_time_asks_nobody() -> None:
    process_reports = ProcessReports(FakeClock())
    process_reports.take(report("engine", 2))
    process_reports.take(report("env", 1, waits=[WaitReport(what="the engine", seconds=3, of="engine")]))
    assert process_reports.take(report("engine", 2)).dump == ""


def test_a_process_that_ended_is_forgotten_at_once_and_a_silent_one_later() -> None:
    clock = FakeClock()
    process_reports = ProcessReports(clock)
    process_reports.take(report("env", 1))
    process_reports.take(report("trainer", 3))
    process_reports.take(report("env", 1, state="ended"))
    clock.now_s = 30
    (left,) = process_reports.standings()
    assert (left.report.kind, left.heard_s) == ("trainer", 30)
    assert describe_problems(left) == ["trainer 3 has not reported for 30 s (pid 3)"]
    clock.now_s = 601
    assert process_reports.standings() == []


def test_problems_are_described_and_normal_waits_are_not() -> None:
    process_reports = ProcessReports(FakeClock())
    in_order = WaitReport(what="the trainer's next step", seconds=90, of="trainer")
    own = WaitReport(what="item 17 to be sampled and scored", seconds=31)
    remedied = WaitReport(what="the hub", seconds=4, fix="treadle hub", problem="connection refused")
    process_reports.take(report("env", 1, waits=[in_order, own, remedied], problem="dropped 40 of its last 40 groups"))
    (standing,) = process_reports.standings()
    assert describe_problems(standing) == [
        "env 1 has waited 31 s for item 17 to be sampled and scored",
        "env 1 has waited 4 s for the hub: connection refused",
        "env 1 dropped 40 of its last 40 groups",
    ]


def test_reports_cannot_fill_the_memory() -> None:
    process_reports = ProcessReports(FakeClock())
    for pid in range(MOST_OF_A_KIND + 200):
        process_reports.take(report("env", pid))
    assert len(process_reports.standings()) == MOST_OF_A_KIND


def test_an_engine_is_kept_however_many_environments_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.hub.state.MOST_OF_A_KIND", 3)
    process_reports = ProcessReports(FakeClock())
    for pid in range(5):
        process_reports.take(report("env", pid))
    process_reports.take(report("engine", 9))
    assert [one.report.kind for one in process_reports.standings()] == ["env", "env", "env", "engine"]


def test_the_hub_takes_reports_and_explains_by_them(client, calls, clock) -> None:
    sent = {"kind": "env", "name": "env gsm8k", "machine": "m", "pid": 5, "problem": "dropped 40 of its last 40 groups"}
    registration = {
        "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "",
        "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 2,
    }  # fmt: skip
    assert client.post("/register", json=registration).status_code == 200
    assert client.post("/v1/reports", json=sent).json() == {"dump": ""}
    assert client.get("/v1/explain").json()["reason"].endswith("env gsm8k dropped 40 of its last 40 groups")
    own, standing = client.get("/v1/processes").json()["processes"]
    assert (own["report"]["name"], standing["report"]["name"]) == ("hub", "env gsm8k")
    assert own["report"]["memory_bytes"] > 0
    assert client.post("/v1/reports", json={"kind": "cat"}).status_code == 422
    client.get("/batch")
    assert calls.register_env()["env_id"] == 0
    assert "never fit" not in client.get("/v1/explain").json()["reason"]
    clock.now_s += 60
    assert "silent for a while" in client.get("/v1/explain").json()["reason"]
    client.post("/v1/reports", json={**sent, "env_id": 0})
    assert "silent for a while" not in client.get("/v1/explain").json()["reason"], "busy, and not gone"
    assert client.post("/v1/reset").status_code == 200
    assert len(client.get("/v1/processes").json()["processes"]) == 1


def test_a_trainer_hears_of_groups_that_are_larger_than_its_batch(client, calls) -> None:
    calls.register(batch_size=4)
    client.get("/batch")
    calls.register_env(group_size=8)
    assert "the groups of math_0 (8) never fit into a batch of 4: lower --env.group-size" in calls.lease(1)["reason"]
