"""Describe processes and their waits in words. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from treadle.wire.hub import LastReport, ProcessReport, WaitReport, WorkReport

SILENT_AFTER_S = 10.0  # five reports
ENDED = "ended"  # the state in the last report of a process
LONGEST_TEXT = 500
MOST_WAITS, MOST_COUNTS = 16, 64
SHOWN_AFTER_S = 2.0  # shorter waits are not shown
NORMAL_SHARE = 0.5  # of its deadline: a longer wait is explained
NORMAL_S = 30.0  # the same for a wait without a deadline that has a fix, or that is for no other process
_DETAILS = re.compile(r" at https?://\S+| \(.*")


def short(text: str) -> str:
    """Cut a text to one line and replace characters that are not printable (escape sequences) by blanks."""
    cut = text[:LONGEST_TEXT]
    return "".join(c if c.isprintable() else " " for c in cut) + ("..." if len(text) > LONGEST_TEXT else "")


def cleaned(report: ProcessReport) -> ProcessReport:
    """A report with all texts cut and cleaned, so that it can be shown whoever sent it."""
    work = report.work
    texts = ("what", "of", "holding", "problem", "fix")
    return msgspec.structs.replace(
        report,
        name=short(report.name),
        machine=short(report.machine),
        state=short(report.state),
        problem=short(report.problem),
        fix=short(report.fix),
        counts={short(name): count for name, count in list(report.counts.items())[:MOST_COUNTS]},
        work=None if work is None else msgspec.structs.replace(work, what=short(work.what)),
        waits=[
            msgspec.structs.replace(wait, **{field: short(getattr(wait, field)) for field in texts})
            for wait in report.waits[:MOST_WAITS]
        ],
    )


def describe_wait(report: ProcessReport, wait: WaitReport) -> str:
    """ "env gsm8k has waited 42 s for the engine at http://127.0.0.1:9001 (it holds group 17)"."""
    holding = f" (it holds {wait.holding})" if wait.holding else ""
    problem = f": {wait.problem}" if wait.problem else ""
    return f"{report.name} has waited {wait.seconds:.0f} s for {wait.what}{holding}{problem}"


def is_long(wait: WaitReport) -> bool:
    """Whether a wait needs an explanation: it is late, past half of its deadline, or something went wrong."""
    if wait.problem:
        normal_s = SHOWN_AFTER_S
    elif wait.deadline_s is not None:
        normal_s = NORMAL_SHARE * wait.deadline_s
    else:
        normal_s = NORMAL_S if wait.fix or not wait.of else math.inf
    return wait.is_late or wait.seconds > normal_s


def wait_to_show(report: ProcessReport) -> WaitReport | None:
    """The longest wait that needs an explanation, else the longest one for another process."""
    long = [wait for wait in report.waits if is_long(wait)]
    normal = [wait for wait in report.waits if wait.of not in ("", report.kind) and wait.seconds >= SHOWN_AFTER_S]
    return next(iter(long or normal), None)


def shortened(what: str) -> str:
    """What is waited for without addresses and details: "the batch of step 3", "the engine to be ready"."""
    return _DETAILS.sub("", what)


def describe_now(standings: Sequence[LastReport]) -> str:
    """What the run is waiting for, in a few words: work first, then what the trainer waits for; "" when nothing."""
    works = [describe_work(standing.report.work) for standing in standings if standing.report.work is not None]
    trainer_first = sorted(standings, key=lambda standing: standing.report.kind != "trainer")
    waits = [wait for standing in trainer_first if (wait := wait_to_show(standing.report)) is not None]
    return "; ".join(works) or (f"waiting for {shortened(waits[0].what)}" if waits else "")


def describe_work(work: WorkReport) -> str:
    """ "evaluating at step 20: 64 of 256"."""
    return f"{work.what}: {work.done} of {work.total}"


def describe_problems(standing: LastReport, *, with_fixes: bool = False) -> list[str]:
    """What is wrong with a process, the worst first; nothing while all is well. `with_fixes`: of its waits too."""
    report = standing.report
    problems = []
    if standing.heard_s > SILENT_AFTER_S:
        problems.append(f"{report.name} has not reported for {standing.heard_s:.0f} s (pid {report.pid})")
    for wait in [wait for wait in report.waits if is_long(wait)][:3]:
        problems.append(describe_wait(report, wait) + (f" ({wait.fix})" if with_fixes and wait.fix else ""))
    if report.problem:
        problems.append(f"{report.name} {report.problem}" + (f" ({report.fix})" if report.fix else ""))
    return problems
