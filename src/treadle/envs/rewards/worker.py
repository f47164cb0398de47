"""A worker: a process that calls rewards, so that whatever they do can be ended from outside.

`python -m treadle.envs.rewards.worker FD PARENT_PID`. It greets with Loaded, then answers orders (messages.py). Rewards
run in its main thread; another thread listens, and ends the process when the pool is gone.
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

from treadle.envs.rewards.base import Reward
from treadle.envs.rewards.calls import describe, judge
from treadle.envs.rewards.messages import IN_WORKER, INPUTS, ORDERS, Answer, Load, Loaded, Order, Setup, frame
from treadle.envs.rewards.outcome import CallResult
from treadle.envs.rewards.registry import registry
from treadle.errors import TreadleError
from treadle.net.frames import read_exactly, read_length

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
IS_LINUX = sys.platform == "linux"


def main(fd: int, parent: int) -> None:
    end_with(parent)
    os.environ[IN_WORKER] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward that crashes leaves no file behind
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    line = socket.socket(fileno=fd)
    threading.Thread(target=_listen, args=(line, orders), daemon=True).start()
    rewards: dict[int, Reward] = {}
    memory_limit_mb = 0
    _answer(line, Loaded())
    while True:
        order = orders.get()
        if isinstance(order, Setup):
            sys.path[:] = order.sys_path
            memory_limit_mb = order.memory_limit_mb
        elif isinstance(order, Load):
            lift_memory_limit()
            _answer(line, _load(order, rewards))
            limit_memory(memory_limit_mb)
        else:
            reward = rewards[order.key]
            for packed in order.calls:
                _answer(line, _judge(reward, packed))


def _load(order: Load, rewards: dict[int, Reward]) -> Loaded:
    try:
        reward = registry.create(order.config)
        reward.warm_up()
    except TreadleError as error:
        return Loaded(problem=error.message, fix=error.fix)
    except BaseException as error:  # it is the reward's file that fails, not this process
        return Loaded(problem=describe(error), fix="correct the reward, or install what it imports")
    rewards[order.key] = reward
    return Loaded()


def _judge(reward: Reward, packed: msgspec.Raw) -> CallResult:
    try:
        inputs = INPUTS.decode(packed)
    except msgspec.ValidationError as error:  # a text that is none, for example
        return CallResult(outcome="raised", detail=describe(error))
    return judge(reward, inputs)


def _answer(line: socket.socket, answer: Answer) -> None:
    line.sendall(frame(answer))


def _listen(line: socket.socket, orders: queue.SimpleQueue[Order]) -> None:
    """Take orders until the pool is gone; then end everything here, whatever the main thread is at."""
    try:
        while True:
            orders.put(ORDERS.decode(read_exactly(line, read_length(line))))
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # our own group: the worker and what its rewards started


def end_with(parent: int) -> None:
    """Be killed with the parent, where the system can: C code that holds the interpreter keeps `_listen` waiting."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def limit_memory(limit_mb: int) -> None:
    """Let calls take `limit_mb` beyond what the process has now. Linux only; elsewhere this limit does not hold."""
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
