"""A hub and an engine that serve now: do they answer, are they ours, and who waits for whom?"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from treadle.launch.doctor.finding import Check
from treadle.net.probe import ProbeAnswer, ServerProbe
from treadle.watch.telling import tell_process
from treadle.wire.hub import Processes, ProcessStanding

TOKEN_TIMEOUT_S = 15.0
ONE_TOKEN = {"prompt": {"prompt_token_ids": [0]}, "max_tokens": 1, "temperature": 0.0}
_REFUSED, _NOT_FOUND, _UNAVAILABLE = (401, 403), 404, 503


def check_hub(hub: ServerProbe) -> list[Check]:
    """Whether it is there; if so, why there is no batch, and what every process that reports to it waits for."""
    health = hub.ask("/healthz")
    if health.status != 200 or health.values.get("status") != "ok":
        return [_unreachable(hub, health, "/healthz")]
    checks = [Check("hub", "ok", f"{hub.shown} answers")]
    explained, processes = hub.ask("/v1/explain"), hub.ask("/v1/processes")
    for path, answer in (("/v1/explain", explained), ("/v1/processes", processes)):
        if answer.status != 200:
            return [*checks, _unreachable(hub, answer, path)]
    checks.append(Check("batches", "ok", str(explained.values.get("reason", ""))))
    return [*checks, *check_processes(read_processes(processes.body))]


def read_processes(body: bytes) -> list[ProcessStanding]:
    try:
        return msgspec.json.decode(body, type=Processes).processes
    except msgspec.MsgspecError:
        return []


def check_processes(standings: list[ProcessStanding]) -> list[Check]:
    """Pure. A process with nothing worth saying is one line with its state."""
    checks = []
    for standing in standings:
        report = standing.report
        fixes = [wait.fix for wait in report.waits if wait.fix] + ([report.fix] if report.fix else [])
        told = tell_process(standing)
        if not told:
            state = f"{report.state or 'running'}, heard of {standing.heard_s:.0f} s ago"
            checks.append(Check(f"process {report.name}", "ok", state))
            continue
        is_bad = bool(report.problem) or any(wait.is_late for wait in report.waits)
        remedy = next(iter(fixes), f"kill -USR1 {report.pid} on {report.machine} writes to its log where it stands")
        checks.append(Check(f"process {report.name}", "problem" if is_bad else "warning", "; ".join(told), remedy))
    return checks


def check_engine(engine: ServerProbe) -> list[Check]:
    """GET /health, then one token by POST /generate: the way rollouts take."""
    health = engine.ask("/health")
    if health.status == 0 or health.status in _REFUSED:
        return [_unreachable(engine, health, "/health")]
    status = str(health.values.get("status", ""))
    if health.status == _UNAVAILABLE and status:
        remedy = "its log says why; curl -X POST .../bridge/restart, or start the engine again"
        return [Check("engine", "problem", f"{engine.shown}: {status}", remedy)]
    checks = []
    if health.status == 200 and status:
        version = health.values.get("policy_version")
        checks.append(Check("engine", "ok", f"{engine.shown} answers: {status}, policy version {version}"))
    else:
        checks.append(_not_ours(engine, health, "GET /health"))
    return [*checks, _check_generate(engine, is_paused=status == "paused")]


def _check_generate(engine: ServerProbe, *, is_paused: bool) -> Check:
    name = "POST /generate"
    answer = engine.ask("/generate", ONE_TOKEN, timeout_s=TOKEN_TIMEOUT_S)
    if answer.status == 200:
        return Check(name, "ok", "gave one token")
    if answer.status == _NOT_FOUND:
        return _not_ours(engine, answer, name)
    if answer.status in _REFUSED:
        return _unreachable(engine, answer, "/generate")
    if answer.status == 0 and is_paused:
        found = f"{answer.trouble}: the engine is held while weights change"
        return Check(name, "warning", found, f"see the trainer's log; POST {engine.shown}/bridge/resume lets it go")
    if answer.status == 0:
        return Check(name, "problem", answer.trouble, "it is stuck, or much too busy: kill -USR1 its pid, see its log")
    return Check(name, "problem", answer.summary, "the engine's log says why")


def _not_ours(engine: ServerProbe, answer: ProbeAnswer, asked: str) -> Check:
    """The classic: another server's address, or a base URL that ends in a path."""
    has_path = urlsplit(engine.url).path.strip("/")
    why = f"the URL ends in /{has_path}" if has_path else "what answers there is not a treadle engine"
    remedy = (
        f"leave the path out: {engine.shown}"
        if has_path
        else "start one with `treadle engine --port N` and give its address to both: treadle train --engine-url, "
        "treadle env --openai.base-url"
    )
    return Check(asked, "problem", f"{answer.summary}; {why}", remedy)


def _unreachable(server: ServerProbe, answer: ProbeAnswer, path: str) -> Check:
    what = f"{server.shown}{path}"
    if answer.status in _REFUSED:
        return Check(server.kind, "problem", f"{what} answered {answer.summary}", f"export {server.token_variable}=...")
    if answer.status:
        found = f"{what} answered {answer.summary}: that is not a treadle {server.kind}"
        return Check(server.kind, "problem", found, f"give the address of the {server.kind}, without a path")
    if answer.is_late:
        remedy = "it is stuck, stopped, or much too busy: its log says more, kill -USR1 its pid writes where it stands"
        return Check(server.kind, "problem", f"{what}: {answer.trouble}", remedy)
    port = urlsplit(server.url).port
    remedy = f"start it with `treadle {server.kind}" + (f" --port {port}`" if port else "`")
    return Check(server.kind, "problem", f"{what} cannot be reached: {answer.trouble}", f"{remedy}, or correct the URL")
