"""Run vLLM's server as a child process: start it, wait until it generates, follow its log, stop it.

The child cannot outlive this process (child_guard.py).
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

import httpx
import msgspec

from treadle.engines.vllm import child_guard
from treadle.engines.vllm.command import MODEL_NAME, Place, ServerCommand
from treadle.engines.vllm.completions import GENERATE, Order
from treadle.errors import EngineError
from treadle.log import get_logger

Tell = Callable[[str, int, int], None]  # ("loading safetensors checkpoint shards", 3, 4)

_BAR = re.compile(r"(?P<what>(?:Loading|Capturing) [^:|]+):\s+\d+%.*\|\s*(?P<done>\d+)/(?P<total>\d+)")
log = get_logger("engine")
NUM_TAIL_LINES = 20
STOP_S = child_guard.GRACE_S + 10.0
FIRST_TOKEN_S = 120.0  # at least; on a CPU it may have to wait for a compiler
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")  # the last line of a traceback
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SEE_PLAN = "treadle plan says what a run needs and what would make it fit"
# What in its log means what to do; the first that is found counts.
_REMEDIES = (
    (r"address already in use", "another program took the port in between: start again"),
    (r"unrecognized arguments|invalid choice", "check --vllm-args"),
    (
        r"CUDA does not share these weights|pidfd_getfd",
        "start engine and trainer in one container, and with PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) without "
        "expandable_segments; or choose another --weight-bridge-mode",
    ),
    (
        r"Error in memory profiling",
        "another process freed memory of the GPU while vLLM looked at what is free: start again, or name what it may "
        "take (--vllm-args=--kv-cache-memory-bytes=8G)",
    ),
    (
        r"Available memory on node|CPU_KVCACHE_SPACE|DefaultCPUAllocator|Cannot allocate memory",
        "free some memory, or lower --kv-cache-gib (it is reserved at the start), --max-num-seqs or --max-model-len; "
        + _SEE_PLAN,
    ),
    (
        r"KV\s+cache is needed|No available memory for the cache|estimated maximum model length",
        "raise --gpu-memory-utilization (on a CPU: --kv-cache-gib), or lower --max-model-len; " + _SEE_PLAN,
    ),
    (
        r"out of memory|Free memory on device|less than desired GPU memory utilization",
        "stop what else uses the GPU's memory, or lower --gpu-memory-utilization, --max-num-seqs or --max-model-len; "
        + _SEE_PLAN,
    ),
)


def read_bar(line: str) -> tuple[str, int, int] | None:
    """What is counted, how many are done, of how many; None: the line is no bar.

    >>> read_bar("(EngineCore pid=8235) Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:07<00:07]")
    ('loading safetensors checkpoint shards', 2, 4)
    >>> read_bar("Capturing CUDA graphs (FULL):  27%|██▋       | 3/11 [00:00<00:01,  6.11it/s]")
    ('capturing CUDA graphs (FULL)', 3, 11)
    """
    found = _BAR.search(line)
    if found is None:
        return None
    what = found["what"]
    return what[0].lower() + what[1:], int(found["done"]), int(found["total"])


def tell_nobody(_what: str, _done: int, _total: int) -> None:
    """For a start that nobody follows: a restart has a wait of its own."""


class ServerProcess:
    """One life of the server. `tell` hears how far it has come with its start."""

    def __init__(self, command: ServerCommand, place: Place, tell: Tell = tell_nobody) -> None:
        self.place = place
        self._tell = tell
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._first_error = ""  # the ones after it are its consequences
        self._is_stopping = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(child_guard.__file__)), str(place.scratch), *command.argv],
            env=dict(command.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is ours to handle
        )
        assert self._process.stdout is not None  # noqa: S101 (it is a pipe)
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()

    @property
    def scratch(self) -> Path:
        return self.place.scratch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.place.api_key}"}

    def death(self) -> str | None:
        """None while it lives; else how it ended and its last words."""
        code = self._process.poll()
        if code is None:
            return None
        self._listener.join(timeout=2)  # what it said last
        cause = f" ({self._first_error})" if self._first_error else ""
        return f"vLLM ended with exit code {code}{cause}; the end of its log:\n{self._last_words()}"

    def wait_until_it_generates(self, timeout_s: float) -> None:
        """Healthy, and a first token was really sampled: what its kernels cannot do shows only then.

        One that does not get there is ended. `stop`, called meanwhile from another thread, ends the waiting at once.
        """
        started = time.monotonic()
        try:
            self._wait_until_it_generates(timeout_s)
        except BaseException:
            if not self._is_stopping.is_set():
                self.stop()
            raise
        log.info("vllm_started", seconds=time.monotonic() - started)

    def stop(self) -> None:
        """End it and everything it started; returns when it is gone."""
        self._is_stopping.set()
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard's sign to end it
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            log.error("vllm_guard_stuck", pid=self._process.pid)
            self._process.kill()
            self._process.wait()

    def _wait_until_it_generates(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=5.0, trust_env=False) as client:
            while not self._answers(client):
                death = self.death()
                if death is not None:
                    raise EngineError(death, fix=remedy([self._first_error, *self._tail]))
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"vLLM was not ready after {timeout_s:.0f} s; the end of its log:\n{self._last_words()}",
                        fix="raise --start-timeout-s, or see what it waits for",
                    )
                if self._is_stopping.wait(0.1):
                    raise EngineError("vLLM was stopped while it started", fix="start the engine again")
            self._sample_one_token(client, max(FIRST_TOKEN_S, deadline - time.monotonic()))

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _sample_one_token(self, client: httpx.Client, timeout_s: float) -> None:
        order = Order(MODEL_NAME, [0], {"max_tokens": 1, "logprobs": 0, "detokenize": False}, cache_salt="probe")
        try:
            answer = client.post(GENERATE, content=msgspec.json.encode(order), timeout=timeout_s)
            complaint = "" if answer.status_code == httpx.codes.OK else answer.text[:500]
        except httpx.TimeoutException:
            raise EngineError(
                f"vLLM started, but its first token did not come within {timeout_s:.0f} s; the end of its log:\n"
                f"{self._last_words()}",
                fix="raise --start-timeout-s, or see what it waits for",
            ) from None
        except httpx.TransportError as error:
            complaint = repr(error)
        if complaint:
            cause = self._first_error or complaint
            raise EngineError(f"vLLM started, but cannot generate: {cause}", fix=remedy([cause, *self._tail]))

    def _last_words(self) -> str:
        return "\n".join(f"  | {line}" for line in self._tail) or "  | (nothing)"

    def _listen(self, stream: IO[bytes]) -> None:
        # A bar is drawn again and again in one line: here each is a line.
        for raw in io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline=None):
            line = _COLOURS.sub("", raw).rstrip()
            bar = read_bar(line)
            if bar is not None:
                self._tell(*bar)
            if line and (bar is None or bar[1] == bar[2]):
                self._tail.append(line)
                if not self._first_error and " WARNING " not in line and (error := _ERROR.search(line)):
                    self._first_error = error[0]
                sys.stderr.write(f"vllm | {line}\n")


def remedy(tail: list[str]) -> str:
    """What a user can do about a server that did not start.

    >>> remedy(["OSError: [Errno 98] Address already in use"])
    'another program took the port in between: start again'
    """
    text = "\n".join(tail)
    for pattern, fix in _REMEDIES:
        if re.search(pattern, text, re.IGNORECASE):
            return fix
    return "its log, above, says why"
