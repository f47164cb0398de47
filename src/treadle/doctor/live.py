"""Check a hub and an engine that serve now, the processes that report to the hub, and the last lines of logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from treadle.formatting import Finding, Verdict, one_line
from treadle.launch.monitor import read_processes
from treadle.net.probe import ProbeAnswer, ServerProbe
from treadle.watch.describe import describe_problems
from treadle.wire.hub import LastReport

TOKEN_TIMEOUT_S = 15.0
ONE_TOKEN = {"prompt": {"prompt_token_ids": [0]}, "max_tokens": 1, "temperature": 0.0}
_REFUSED, _NOT_FOUND, _UNAVAILABLE = (401, 403), 404, 503
NUM_LINES = 200  # of a log that are searched for known problems
_QUOTED = 160  # characters of a log line in a finding


def check_hub(hub: ServerProbe) -> list[Finding]:
    """Whether it answers; if so, why there is no batch, and what every process that reports to it waits for."""
    health = hub.ask("/healthz")
    if health.status != 200 or health.values.get("status") != "ok":
        return [_unreachable(hub, health, "/healthz")]
    checks = [Finding("hub", "ok", f"{hub.shown} answers")]
    explained, processes = hub.ask("/v1/explain"), hub.ask("/v1/processes")
    for path, answer in (("/v1/explain", explained), ("/v1/processes", processes)):
        if answer.status != 200:
            return [*checks, _unreachable(hub, answer, path)]
    checks.append(Finding("batches", "ok", str(explained.values.get("reason", ""))))
    return [*checks, *check_processes(read_processes(processes.content))]


def check_processes(standings: list[LastReport]) -> list[Finding]:
    """Pure. For a process without a problem or a long wait the finding is its state."""
    checks = []
    for standing in standings:
        report = standing.report
        fixes = [wait.fix for wait in report.waits if wait.fix] + ([report.fix] if report.fix else [])
        problems = describe_problems(standing)
        if not problems:
            state = f"{report.state or 'running'}, last report {standing.heard_s:.0f} s ago"
            checks.append(Finding(f"process {report.name}", "ok", state))
            continue
        is_bad = bool(report.problem) or any(wait.is_late for wait in report.waits)
        remedy = next(iter(fixes), f"kill -USR1 {report.pid} on {report.machine} writes to its log where it stands")
        checks.append(
            Finding(f"process {report.name}", "problem" if is_bad else "warning", "; ".join(problems), remedy)
        )
    return checks


def check_engine(engine: ServerProbe) -> list[Finding]:
    """GET /health, then one token by POST /generate, as rollouts use it."""
    health = engine.ask("/health")
    if health.status == 0 or health.status in _REFUSED:
        return [_unreachable(engine, health, "/health")]
    status = str(health.values.get("status", ""))
    if health.status == _UNAVAILABLE and status:
        remedy = "its log says why; curl -X POST .../bridge/restart, or start the engine again"
        return [Finding("engine", "problem", f"{engine.shown}: {status}", remedy)]
    checks = []
    if health.status == 200 and status:
        version = health.values.get("policy_version")
        checks.append(Finding("engine", "ok", f"{engine.shown} answers: {status}, policy version {version}"))
    else:
        checks.append(_not_ours(engine, health, "GET /health"))
    return [*checks, _check_generate(engine, is_paused=status == "paused")]


def _check_generate(engine: ServerProbe, *, is_paused: bool) -> Finding:
    name = "POST /generate"
    answer = engine.ask("/generate", ONE_TOKEN, timeout_s=TOKEN_TIMEOUT_S)
    if answer.status == 200:
        return Finding(name, "ok", "gave one token")
    if answer.status == _NOT_FOUND:
        return _not_ours(engine, answer, name)
    if answer.status in _REFUSED:
        return _unreachable(engine, answer, "/generate")
    if answer.status == 0 and is_paused:
        found = f"{answer.trouble}: the engine is held while weights change"
        return Finding(name, "warning", found, f"see the trainer's log; POST {engine.shown}/bridge/resume lets it go")
    if answer.status == 0:
        return Finding(
            name, "problem", answer.trouble, "it is stuck, or much too busy: kill -USR1 its pid, see its log"
        )
    return Finding(name, "problem", answer.summary, "the engine's log says why")


def _not_ours(engine: ServerProbe, answer: ProbeAnswer, asked: str) -> Finding:
    """Common causes: the address of another server, or a base URL that ends in a path."""
    has_path = urlsplit(engine.url).path.strip("/")
    why = f"the URL ends in /{has_path}" if has_path else "what answers there is not a treadle engine"
    remedy = (
        f"leave the path out: {engine.shown}"
        if has_path
        else "start one with `treadle engine --port N` and give its address to both: treadle train --engine-url, "
        "treadle env --openai.base-url"
    )
    return Finding(asked, "problem", f"{answer.summary}; {why}", remedy)


def _unreachable(server: ServerProbe, answer: ProbeAnswer, path: str) -> Finding:
    what = f"{server.shown}{path}"
    if answer.status in _REFUSED:
        return Finding(
            server.kind, "problem", f"{what} answered {answer.summary}", f"export {server.token_variable}=..."
        )
    if answer.status:
        found = f"{what} answered {answer.summary}: that is not a treadle {server.kind}"
        return Finding(server.kind, "problem", found, f"give the address of the {server.kind}, without a path")
    if answer.is_late:
        remedy = "it is stuck, stopped, or much too busy: its log says more, kill -USR1 its pid writes where it stands"
        return Finding(server.kind, "problem", f"{what}: {answer.trouble}", remedy)
    port = urlsplit(server.url).port
    remedy = f"start it with `treadle {server.kind}" + (f" --port {port}`" if port else "`")
    return Finding(
        server.kind, "problem", f"{what} cannot be reached: {answer.trouble}", f"{remedy}, or correct the URL"
    )


# ---- logs


@dataclass(frozen=True)
class LogPattern:
    regex: str
    cause: str
    remedy: str
    verdict: Verdict = "problem"


PATTERNS = (
    LogPattern(
        r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache blocks",
        "the GPU's memory is full",
        "`treadle plan` with your flags says what fits; lower --train.micro-tokens or --engine.gpu-memory-utilization",
    ),
    LogPattern(
        r"can't allocate memory|\bMemoryError|Cannot allocate memory|exit code -9|Killed$",
        "main memory is full, and the system may have ended a process (exit code -9)",
        "`treadle plan` with your flags says what fits; end other programs; docker run --memory gives a container more",
    ),
    LogPattern(
        r"Address already in use|port \d+.* is in use",
        "another program listens at that port",
        "choose another --port, or end the other program: `ss -ltnp` names it",
    ),
    LogPattern(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a worker was forked after CUDA was used",
        "export VLLM_WORKER_MULTIPROCESSING_METHOD=spawn",
    ),
    LogPattern(
        r"before the current process has finished its bootstrapping phase",
        "a program of yours starts processes while it is being imported",
        'put its code under if __name__ == "__main__":',
    ),
    LogPattern(r"Too many open files", "the limit of open files is reached", "ulimit -n 65536, then start again"),
    LogPattern(
        r"No space left on device|the disk is full|DiskFull",
        "a disk is full, or shared memory is",
        "df -h . /dev/shm; free some space, or choose another disk with --output",
    ),
    LogPattern(
        r"Bus error|SIGBUS",
        "shared memory is smaller than the weights",
        "docker run --shm-size 4g (or more than the model's weights)",
    ),
    LogPattern(
        r"pidfd_getfd|CUDA does not share these weights|cannot open the engine's weights",
        "CUDA IPC does not work between engine and trainer",
        "treadle doctor tries it and names the cause; --train.use-shared-memory does without",
    ),
    LogPattern(
        r"operator torchvision::nms does not exist",
        "torchvision is a build for another torch",
        "pip uninstall torchvision torchaudio torchcodec in vLLM's Python",
    ),
    LogPattern(
        r"LogProb Alignment: MISMATCH!",
        "trainer and engine compute different logprobs for the same tokens",
        "give both the same --model and --dtype; docs/troubleshooting.md, 'mismatch'",
    ),
    LogPattern(
        r"the engine's weights do not fit this model",
        "engine and trainer were given different models",
        "give both the same --model",
    ),
    LogPattern(
        r"started without --weights-file|nobody serves the weights it names",
        "the trainer wants to map weights that no engine shares",
        "start the engine with --weights-file FILE; docs/troubleshooting.md, 'empty mappings'",
    ),
    LogPattern(
        r"rank \d+ of \d+ did not find the others",
        "not all ranks of the trainer were started, or they cannot reach each other",
        "torchrun --nproc-per-node N -m treadle train ..., with the same flags for all",
    ),
    LogPattern(
        r"/generate[^\n]*\b404\b|\b404\b[^\n]*/generate",
        "what answers at that address is not a treadle engine",
        "check --openai.base-url and --engine-url; treadle doctor --engine URL asks it",
    ),
    LogPattern(
        r"watchdog late ",
        "a wait took longer than is normal",
        "the stacks that follow it in the log say where",
        "warning",
    ),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern.regex), pattern) for pattern in PATTERNS)


def check_logs(tails: Mapping[str, Iterable[str]]) -> list[Finding]:
    """`tails`: the last lines of each log, by process. The last match of each pattern is quoted."""
    checks = []
    for name, lines in tails.items():
        seen: dict[LogPattern, str] = {}
        for line in lines:
            for compiled, pattern in _COMPILED:
                if compiled.search(line):
                    seen[pattern] = line
        checks += [
            Finding(f"log of the {name}", p.verdict, f"{p.cause}: {one_line(line, _QUOTED)}", p.remedy)
            for p, line in seen.items()
        ]
    if not checks:
        found = f"no known trouble in the last {NUM_LINES} lines of {', '.join(tails)}" if tails else "there are none"
        checks.append(Finding("logs", "ok", found))
    return checks
