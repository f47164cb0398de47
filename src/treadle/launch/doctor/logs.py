"""What the last lines of a log mean, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treadle.formatting import one_line
from treadle.launch.doctor.finding import Check, Verdict

NUM_LINES = 200
_QUOTED = 160


@dataclass(frozen=True)
class Pattern:
    words: str  # a regular expression
    cause: str
    remedy: str
    verdict: Verdict = "problem"


PATTERNS = (
    Pattern(
        r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|No available memory for the cache blocks",
        "the GPU's memory is full",
        "`treadle plan` with your flags says what fits; lower --train.micro-tokens or --engine.gpu-memory-utilization",
    ),
    Pattern(
        r"can't allocate memory|\bMemoryError|Cannot allocate memory|exit code -9|Killed$",
        "main memory is full, and the system may have ended a process (exit code -9)",
        "`treadle plan` with your flags says what fits; end other programs; docker run --memory gives a container more",
    ),
    Pattern(
        r"Address already in use|port \d+.* is in use",
        "another program listens at that port",
        "choose another --port, or end the other program: `ss -ltnp` names it",
    ),
    Pattern(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a worker was forked after CUDA was used",
        "export VLLM_WORKER_MULTIPROCESSING_METHOD=spawn",
    ),
    Pattern(
        r"before the current process has finished its bootstrapping phase",
        "a program of yours starts processes while it is being imported",
        'put its code under if __name__ == "__main__":',
    ),
    Pattern(r"Too many open files", "the limit of open files is reached", "ulimit -n 65536, then start again"),
    Pattern(
        r"No space left on device|the disk is full|DiskFull",
        "a disk is full, or shared memory is",
        "df -h . /dev/shm; free some space, or choose another disk with --output",
    ),
    Pattern(
        r"Bus error|SIGBUS",
        "shared memory is smaller than the weights",
        "docker run --shm-size 4g (or more than the model's weights)",
    ),
    Pattern(
        r"pidfd_getfd|CUDA does not share these weights|cannot open the engine's weights",
        "CUDA IPC does not work between engine and trainer",
        "treadle doctor tries it and names the cause; --train.use-shared-memory does without",
    ),
    Pattern(
        r"operator torchvision::nms does not exist",
        "torchvision is a build for another torch",
        "pip uninstall torchvision torchaudio torchcodec in vLLM's Python",
    ),
    Pattern(
        r"LogProb Alignment: MISMATCH!",
        "trainer and engine compute different logprobs for the same tokens",
        "give both the same --model and --dtype; docs/troubleshooting.md, 'mismatch'",
    ),
    Pattern(
        r"the engine's weights do not fit this model",
        "engine and trainer were given different models",
        "give both the same --model",
    ),
    Pattern(
        r"started without --weights-file|nobody serves the weights it names",
        "the trainer wants to map weights that no engine shares",
        "start the engine with --weights-file FILE; docs/troubleshooting.md, 'empty mappings'",
    ),
    Pattern(
        r"rank \d+ of \d+ did not find the others",
        "not all ranks of the trainer were started, or they cannot reach each other",
        "torchrun --nproc-per-node N -m treadle train ..., with the same flags for all",
    ),
    Pattern(
        r"/generate[^\n]*\b404\b|\b404\b[^\n]*/generate",
        "what answers at that address is not a treadle engine",
        "check --openai.base-url and --engine-url; treadle doctor --engine URL asks it",
    ),
    Pattern(
        r"watchdog late ",
        "a wait took longer than is normal",
        "the stacks that follow it in the log say where",
        "warning",
    ),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern.words), pattern) for pattern in PATTERNS)


def check_logs(tails: Mapping[str, Iterable[str]]) -> list[Check]:
    """`tails`: the last lines of each log, by the name of its process. The last line of each kind is quoted."""
    checks = []
    for name, lines in tails.items():
        seen: dict[Pattern, str] = {}
        for line in lines:
            for compiled, pattern in _COMPILED:
                if compiled.search(line):
                    seen[pattern] = line
        checks += [
            Check(f"log of the {name}", p.verdict, f"{p.cause}: {one_line(line, _QUOTED)}", p.remedy)
            for p, line in seen.items()
        ]
    if not checks:
        told = f"no known trouble in the last {NUM_LINES} lines of {', '.join(tails)}" if tails else "there are none"
        checks.append(Check("logs", "ok", told))
    return checks
