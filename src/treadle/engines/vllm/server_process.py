"""Run vLLM's server as a child process: start it, wait until it generates, follow its log, stop it.

The child cannot outlive this process (child_guard.py).
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

import treadle
from treadle.config import EngineConfig
from treadle.engines.interface import EngineFacts
from treadle.engines.model_folder import check_model_folder, read_checkpoint_facts
from treadle.engines.vllm import child_guard
from treadle.engines.vllm.command import (
    MODEL_NAME,
    Installation,
    ServerCommand,
    ServerResources,
    check_supported,
    lora_rank,
    max_model_len,
    server_command,
    serving_dtype,
)
from treadle.engines.vllm.completions import GENERATE, VllmRequest
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.net.client import OK, BlockingHttpClient, LateAnswer, NoAnswer
from treadle.sync.model_folders import cache_folder

OnProgress = Callable[[str, int, int], None]  # ("loading safetensors checkpoint shards", 3, 4)

_BAR = re.compile(r"(?P<what>(?:Loading|Capturing) [^:|]+):\s+\d+%.*\|\s*(?P<done>\d+)/(?P<total>\d+)")
log = get_logger("engine")
NUM_TAIL_LINES = 20
STOP_S = child_guard.GRACE_S + 10.0
# A server that dies is noticed at once; this is for one that hangs. Large models load from slow disks for long.
START_TIMEOUT_S = 3600.0
FIRST_TOKEN_S = 120.0  # minimum timeout of the first token, which may wait for a compiler on a CPU
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")  # the last line of a traceback
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SEE_PLAN = "treadle plan says what a run needs and what would make it fit"
# (pattern in vLLM's log, fix); the first match counts.
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
        "free some memory, or lower VLLM_CPU_KVCACHE_SPACE (GiB, reserved at the start; 1 unless set), "
        "--max-num-seqs or --max-model-len; " + _SEE_PLAN,
    ),
    (
        r"KV\s+cache is needed|No available memory for the cache|estimated maximum model length",
        "raise --gpu-memory-utilization (on a CPU: VLLM_CPU_KVCACHE_SPACE), or lower --max-model-len; " + _SEE_PLAN,
    ),
    (
        r"out of memory|Free memory on device|less than desired GPU memory utilization",
        "stop what else uses the GPU's memory, or lower --gpu-memory-utilization, --max-num-seqs or --max-model-len; "
        + _SEE_PLAN,
    ),
)


def parse_progress_bar(line: str) -> tuple[str, int, int] | None:
    """(what is counted, done, total) of a progress bar in vLLM's log; None: the line is none.

    >>> parse_progress_bar("(EngineCore pid=8235) Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:07]")
    ('loading safetensors checkpoint shards', 2, 4)
    >>> parse_progress_bar("Capturing CUDA graphs (FULL):  27%|██▋       | 3/11 [00:00<00:01,  6.11it/s]")
    ('capturing CUDA graphs (FULL)', 3, 11)
    """
    found = _BAR.search(line)
    if found is None:
        return None
    what = found["what"]
    return what[0].lower() + what[1:], int(found["done"]), int(found["total"])


class ServerProcess:
    """One vLLM server process. `on_progress(what, done, total)` reports progress of its start."""

    def __init__(
        self, command: ServerCommand, resources: ServerResources, on_progress: OnProgress = lambda *_: None
    ) -> None:
        self.resources = resources
        self._on_progress = on_progress
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._first_error = ""  # later errors are consequences of the first
        self._is_stopping = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(child_guard.__file__)), str(resources.scratch), *command.argv],
            env=dict(command.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which then stops vLLM
        )
        assert self._process.stdout is not None  # noqa: S101 (it is a pipe)
        self._listener = threading.Thread(target=self._read_log, args=(self._process.stdout,), daemon=True)
        self._listener.start()

    @property
    def scratch(self) -> Path:
        return self.resources.scratch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.resources.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.resources.api_key}"}

    def exit_reason(self) -> str | None:
        """None while it runs; else its exit code, first error and the end of its log."""
        code = self._process.poll()
        if code is None:
            return None
        self._listener.join(timeout=2)  # read the rest of its log
        cause = f" ({self._first_error})" if self._first_error else ""
        return f"vLLM ended with exit code {code}{cause}; the end of its log:\n{self._log_tail()}"

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it is healthy and has sampled a first token, because unsupported kernels fail only then.

        On failure the process is stopped. `stop` from another thread ends the wait at once.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        try:
            headers = {"Content-Type": "application/json", **self.headers}
            with BlockingHttpClient(self.url, headers=headers, timeout_s=5.0) as client:
                while not _is_healthy(client):
                    death = self.exit_reason()
                    if death is not None:
                        raise EngineError(death, fix=suggest_fix([self._first_error, *self._tail]))
                    if time.monotonic() > deadline:
                        raise EngineError(
                            f"vLLM was not ready after {timeout_s:.0f} s; the end of its log:\n{self._log_tail()}",
                            fix="see in its log what it waits for",
                        )
                    if self._is_stopping.wait(0.1):
                        raise EngineError("vLLM was stopped while it started", fix="start the engine again")
                self._sample_one_token(client, max(FIRST_TOKEN_S, deadline - time.monotonic()))
        except BaseException:
            if not self._is_stopping.is_set():
                self.stop()
            raise
        log.info("vllm_started", seconds=time.monotonic() - started)

    def stop(self) -> None:
        """Stop the server and all its processes; returns when they have exited."""
        self._is_stopping.set()
        if self._process.stdin is not None:
            self._process.stdin.close()  # tells child_guard.py to end it
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            log.error("vllm_guard_stuck", pid=self._process.pid)
            self._process.kill()
            self._process.wait()

    def _sample_one_token(self, client: BlockingHttpClient, timeout_s: float) -> None:
        order = VllmRequest(MODEL_NAME, [0], {"max_tokens": 1, "logprobs": 0, "detokenize": False}, cache_salt="probe")
        try:
            answer = client.request("POST", GENERATE, body=msgspec.json.encode(order), timeout_s=timeout_s)
            complaint = "" if answer.status == OK else answer.message or f"status {answer.status}"
        except LateAnswer:
            raise EngineError(
                f"vLLM started, but its first token did not come within {timeout_s:.0f} s; the end of its log:\n"
                f"{self._log_tail()}",
                fix="see in its log what it waits for",
            ) from None
        except NoAnswer as error:
            complaint = str(error)
        if complaint:
            cause = self._first_error or complaint
            raise EngineError(f"vLLM started, but cannot generate: {cause}", fix=suggest_fix([cause, *self._tail]))

    def _log_tail(self) -> str:
        return "\n".join(f"  | {line}" for line in self._tail) or "  | (nothing)"

    def _read_log(self, stream: IO[bytes]) -> None:
        # newline=None: each update of a progress bar, which ends with a carriage return, becomes a line.
        for raw in io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline=None):
            line = _COLOURS.sub("", raw).rstrip()
            bar = parse_progress_bar(line)
            if bar is not None:
                self._on_progress(*bar)
            if line and (bar is None or bar[1] == bar[2]):
                self._tail.append(line)
                if not self._first_error and " WARNING " not in line and (error := _ERROR.search(line)):
                    self._first_error = error[0]
                sys.stderr.write(f"vllm | {line}\n")


def _is_healthy(client: BlockingHttpClient) -> bool:
    try:
        return client.request("GET", "/health").status == OK
    except NoAnswer:
        return False


def suggest_fix(tail: list[str]) -> str:
    """What the user can do about a server that did not start.

    >>> suggest_fix(["OSError: [Errno 98] Address already in use"])
    'another program took the port in between: start again'
    """
    text = "\n".join(tail)
    for pattern, fix in _REMEDIES:
        if re.search(pattern, text, re.IGNORECASE):
            return fix
    return "its log, above, says why"


# ---- starting a server for a model


def prepare_server(
    config: EngineConfig, vllm: Installation, folder: Path
) -> Callable[[], tuple[ServerProcess, EngineFacts]]:
    """Check the model and settings while an earlier server still serves; returns the function that starts a new one."""
    check_model_folder(folder)
    check_supported(config, read_checkpoint_facts(folder), vllm)
    return partial(begin_server, config, vllm, folder)


def begin_server(
    config: EngineConfig, vllm: Installation, folder: Path, on_progress: OnProgress = lambda *_: None
) -> tuple[ServerProcess, EngineFacts]:
    """Start a server; returns while it loads."""
    model = read_checkpoint_facts(folder)
    facts = EngineFacts(
        kind="vllm",
        version=vllm.version,
        folder=model.folder,
        device="cpu" if vllm.is_cpu else "cuda" if config.device == "auto" else config.device,
        dtype=serving_dtype(config, model, vllm),
        max_model_len=max_model_len(config, model),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        max_num_seqs=config.max_num_seqs,
        has_lora=config.enable_lora,
        max_lora_rank=lora_rank(config.max_lora_rank) if config.enable_lora else None,
        quantization=config.quantization,
    )
    resources = _allocate_resources(config)
    try:
        command = server_command(config, model, vllm, resources, os.environ)
        return ServerProcess(command, resources, on_progress), facts
    except BaseException:
        shutil.rmtree(resources.scratch, ignore_errors=True)  # otherwise child_guard.py deletes it
        raise


def _allocate_resources(config: EngineConfig) -> ServerResources:
    scratch = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))  # short: a socket's path has at most 107 characters
    if config.vllm_python:
        (scratch / "path").mkdir()
        (scratch / "path" / "treadle").symlink_to(Path(treadle.__file__).parent)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ServerResources(port=port, api_key=secrets.token_urlsafe(32), scratch=scratch, cache=cache_folder() / "vllm")
