"""How a process stands, in words. Pure."""

from __future__ import annotations

import msgspec

from treadle.wire.hub import ProcessReport, ProcessStanding, WaitReport, WorkReport

SILENT_AFTER_S = 10.0  # five reports
LAST_WORD = "ended"  # the state of a process that reports for the last time
LONGEST_TEXT = 500
MOST_WAITS, MOST_COUNTS = 16, 64
LONG_S = 30.0  # for work of its own: worth a word, also where it may be in order


def short(text: str) -> str:
    """One line that can be shown anywhere: what is not printable, as escape sequences are not, becomes a blank."""
    cut = text[:LONGEST_TEXT]
    return "".join(c if c.isprintable() else " " for c in cut) + ("..." if len(text) > LONGEST_TEXT else "")


def cleaned(report: ProcessReport) -> ProcessReport:
    """A report that others may be shown, whoever sent it."""
    work = report.work
    return msgspec.structs.replace(
        report,
        name=short(report.name),
        machine=short(report.machine),
        state=short(report.state),
        problem=short(report.problem),
        fix=short(report.fix),
        counts={short(name): count for name, count in list(report.counts.items())[:MOST_COUNTS]},
        work=None if work is None else msgspec.structs.replace(work, what=short(work.what)),
        waits=[_cleaned_wait(wait) for wait in report.waits[:MOST_WAITS]],
    )


def _cleaned_wait(wait: WaitReport) -> WaitReport:
    texts = {field: short(getattr(wait, field)) for field in ("what", "of", "holding", "problem", "fix")}
    return msgspec.structs.replace(wait, **texts)


def tell_wait(report: ProcessReport, wait: WaitReport) -> str:
    """ "env gsm8k has waited 42 s for the engine at http://127.0.0.1:9001 (it holds group 17)"."""
    holding = f" (it holds {wait.holding})" if wait.holding else ""
    problem = f": {wait.problem}" if wait.problem else ""
    return f"{report.name} has waited {wait.seconds:.0f} s for {wait.what}{holding}{problem}"


def tell_work(work: WorkReport) -> str:
    """ "evaluating at step 20: 64 of 256"."""
    return f"{work.what}: {work.done} of {work.total}"


def tell_process(standing: ProcessStanding) -> list[str]:
    """What is worth saying of a process, the worst first; nothing while all is well."""
    report = standing.report
    told = []
    if standing.heard_s > SILENT_AFTER_S:
        told.append(f"{report.name} has not been heard of for {standing.heard_s:.0f} s (pid {report.pid})")
    worth_it = [wait for wait in report.waits if wait.fix or wait.is_late or (not wait.of and wait.seconds > LONG_S)]
    told += [tell_wait(report, wait) for wait in worth_it[:3]]
    if report.problem:
        told.append(f"{report.name} {report.problem}" + (f" ({report.fix})" if report.fix else ""))
    return told
