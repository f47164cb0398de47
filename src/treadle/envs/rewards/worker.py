"""Reward worker process: calls rewards, so that whatever they do can be killed from outside.

`python -m treadle.envs.rewards.worker FD PARENT_PID`. It starts with a Loaded message, then answers requests (see
worker_handle.py). Rewards run in the main thread; another thread reads requests, and ends the process when the pool is
gone.
"""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from treadle.envs.rewards.addresses import describe
from treadle.envs.rewards.base import CallResult, Reward, call_reward
from treadle.envs.rewards.registry import registry
from treadle.envs.rewards.worker_handle import (
    IN_WORKER,
    INPUTS,
    REQUESTS,
    Load,
    Loaded,
    Setup,
    WorkerReply,
    WorkerRequest,
)
from treadle.errors import TreadleError
from treadle.net.workers import frame, read_frame

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
IS_LINUX = sys.platform == "linux"


def main(fd: int, parent: int) -> None:
    end_with(parent)
    os.environ[IN_WORKER] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes leaves no file behind
    requests: queue.SimpleQueue[WorkerRequest] = queue.SimpleQueue()
    line = socket.socket(fileno=fd)
    threading.Thread(target=_listen, args=(line, requests), daemon=True).start()
    rewards: dict[int, Reward] = {}
    memory_limit_mb = 0
    _answer(line, Loaded())
    while True:
        request = requests.get()
        if isinstance(request, Setup):
            sys.path[:] = request.sys_path
            memory_limit_mb = request.memory_limit_mb
        elif isinstance(request, Load):
            lift_memory_limit()
            _answer(line, _load(request, rewards))
            limit_memory(memory_limit_mb)
        else:
            reward = rewards[request.key]
            for packed in request.calls:
                _answer(line, _call(reward, packed))


def _load(request: Load, rewards: dict[int, Reward]) -> Loaded:
    try:
        reward = registry.create(request.config)
        reward.warm_up()
    except TreadleError as error:
        return Loaded(problem=error.message, fix=error.fix)
    except BaseException as error:  # also SystemExit of the reward's file
        return Loaded(problem=describe(error), fix="correct the reward, or install what it imports")
    rewards[request.key] = reward
    return Loaded()


def _call(reward: Reward, packed: msgspec.Raw) -> CallResult:
    try:
        inputs = INPUTS.decode(packed)
    except msgspec.ValidationError as error:  # for example a text that is not a string
        return CallResult(outcome="raised", detail=describe(error))
    return call_reward(reward, inputs)


def _answer(line: socket.socket, answer: WorkerReply) -> None:
    line.sendall(frame(msgspec.msgpack.encode(answer)))


def _listen(line: socket.socket, requests: queue.SimpleQueue[WorkerRequest]) -> None:
    """Read requests until the pool is gone; then kill this process group, whatever the main thread does."""
    try:
        while True:
            requests.put(REQUESTS.decode(read_frame(line)))
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the worker and everything that its rewards started


def end_with(parent: int) -> None:
    """Die with the parent, also (on Linux) when C code holds the GIL and `_listen` cannot run."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def limit_memory(limit_mb: int) -> None:
    """Let calls allocate `limit_mb` more than the process has now. Linux only; there is no limit elsewhere."""
    if IS_LINUX and limit_mb:
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = data_pages * resource.getpagesize() + limit_mb * 2**20
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def lift_memory_limit() -> None:
    if IS_LINUX:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
