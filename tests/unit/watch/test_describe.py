"""Normal waits are named in a few words; only long ones and problems are explained."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from treadle.watch.describe import describe_now, is_long, shortened
from treadle.wire.hub import LastReport, ProcessReport, WaitReport, WorkReport


def standing(kind: str, *waits: WaitReport, work: WorkReport | None = None) -> LastReport:
    report = ProcessReport(kind=kind, name=kind, machine="m", pid=7, waits=list(waits), work=work)  # type: ignore[arg-type]
    return LastReport(report=report, heard_s=0.0)


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        ({"seconds": 449, "deadline_s": 900, "of": "engine"}, False),
        ({"seconds": 451, "deadline_s": 900, "of": "engine"}, True),
        ({"seconds": 40, "deadline_s": 900, "of": "engine", "fix": "start it"}, False),
        ({"seconds": 1, "of": "engine", "is_late": True}, True),
        ({"seconds": 1, "of": "hub", "problem": "connection refused"}, False),
        ({"seconds": 3, "of": "hub", "problem": "connection refused"}, True),
        ({"seconds": 1000, "of": "trainer"}, False),
        ({"seconds": 31, "of": "trainer", "fix": "start one"}, True),
        ({"seconds": 31}, True),
    ],
)
def test_which_waits_need_an_explanation(wait: dict[str, Any], expected: bool) -> None:
    assert is_long(WaitReport(what="it", **wait)) == expected


def test_a_wait_of_an_older_client_has_no_deadline() -> None:
    assert msgspec.json.decode(b'{"what": "it", "seconds": 3}', type=WaitReport).deadline_s is None


def test_addresses_and_details_are_left_out() -> None:
    assert shortened("the engine at http://127.0.0.1:9001 to be ready") == "the engine to be ready"
    assert shortened("the batch of step 3 (3 of 8 groups wait (24 of 64 sequences))") == "the batch of step 3"
    assert shortened("a trainer to register at the hub (http://a:1)") == "a trainer to register at the hub"


def test_work_is_named_before_waits_and_the_trainer_before_others() -> None:
    completion = WaitReport(what="the engine at http://a:1 to finish a completion", seconds=20, of="engine")
    batch = WaitReport(what="the batch of step 3", seconds=9, of="env")
    evaluation = WorkReport(what="evaluating at step 0", done=128, total=256)
    assert describe_now([]) == ""
    assert describe_now([standing("env", completion)]) == "waiting for the engine to finish a completion"
    assert describe_now([standing("env", completion), standing("trainer", batch)]) == "waiting for the batch of step 3"
    works = [standing("env", completion, work=evaluation), standing("trainer", batch)]
    assert describe_now(works) == "evaluating at step 0: 128 of 256"


def test_short_waits_and_work_of_its_own_are_not_what_the_run_waits_for() -> None:
    own = WaitReport(what="the model to get on with a completion", seconds=20, of="engine", deadline_s=900)
    brief = WaitReport(what="the batch of step 3", seconds=1.9, of="env", deadline_s=900)
    assert describe_now([standing("engine", own), standing("trainer", brief)]) == ""
