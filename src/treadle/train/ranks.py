"""Join several trainer processes (ranks), and exchange messages, numbers and stops among them.

    rank 0   leases ──batch──> all      each: own micros ──> gradients, summed over ranks while backward runs (FSDP2,
             sharding.py) ──> optimizer step on its own rows ──> rank 0 publishes, one whole weight at a time

The loop is the same on every rank; rank 0 alone talks to hub, engine and trackers.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from treadle.config import TrainConfig
from treadle.errors import ConfigError, ProcessDied
from treadle.log import get_logger
from treadle.sync.process_group import first_sentence
from treadle.sync.variables import unused_variables
from treadle.train.loss import LossStats
from treadle.train.stop import StopRequested

log = get_logger("ranks")

HEARTBEAT_S = 10.0  # while the others wait for rank 0, it sends a message this often, and notices a lost rank
HEARTBEATS_PER_TIMEOUT = 4  # at least
ENDING_S = 2.0  # until a process whose connections closed has ended
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")
USE_TORCHRUN = "start the trainer with torchrun --nproc-per-node N -m treadle train ..."


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices of items by rank, about equal in cost, and in number except for one. Deterministic. Pure.

    Ranks compute layers together, so a rank with fewer micros has to wait for the others in any case. Greedy: the most
    expensive item first, each to the rank with the lowest total among those that have space.

    >>> balance([4.0, 3.0, 3.0, 2.0], 2), balance([5.0], 3)
    ([[0, 3], [1, 2]], [[0], [], []])
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    space = -(-len(costs) // num_ranks)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        open_ranks = [rank for rank in range(num_ranks) if len(shares[rank]) < space]
        cheapest = min(open_ranks, key=lambda rank: totals[rank])
        shares[cheapest].append(index)
        totals[cheapest] += costs[index]
    return [sorted(share) for share in shares]


class _SentStats(msgspec.Struct, frozen=True):
    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums: list[float]
    maxima: list[float]


class Ranks:
    """This process among all ranks. `Ranks()` is a single process, for which exchanges change nothing.

    With several ranks the caller has opened torch.distributed's process group with `timeout_s`. GPU tensors use NCCL,
    messages in host memory Gloo, which does not wait for the GPU.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout_s: float = math.inf) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.heartbeat_s = min(HEARTBEAT_S, timeout_s / HEARTBEATS_PER_TIMEOUT)
        self.leads = rank == 0  # it talks to hub, engine and trackers, and writes the model
        self._processes: list[tuple[str, int]] = []  # (host, pid) by rank

    def turns(self, costs: Sequence[float], group_size: int = 1) -> list[int | None]:
        """Indices assigned to this rank, balanced by cost, and None for turns in which only other ranks have one: all
        ranks take the same number of turns. All must pass the same costs. Groups of `group_size` consecutive ranks get
        the same indices."""
        shares = balance(costs, self.size // group_size)
        own = shares[self.rank // group_size]
        return [*own, *[None] * (max(map(len, shares)) - len(own))]

    def check_stop(self, check_stop: Callable[[], None]) -> None:
        """`check_stop` on every rank: StopRequested is raised on all of them or on none."""
        wants_to_stop = False
        try:
            check_stop()
        except StopRequested:
            wants_to_stop = True
        if self.reduce(float(wants_to_stop), "max", "agreeing whether to stop"):
            raise StopRequested

    def total(self, stats: LossStats) -> LossStats:
        """LossStats of all ranks together."""
        if self.size == 1:
            return stats
        own = _SentStats(stats.sum_names, stats.maximum_names, stats.sums.tolist(), stats.maxima.tolist())
        added = LossStats()
        for packed in self.gather("adding up the metrics", msgspec.msgpack.encode(own)):
            sent = msgspec.msgpack.decode(packed, type=_SentStats)
            sums, maxima = (torch.tensor(values, dtype=torch.float64) for values in (sent.sums, sent.maxima))
            added = added.add(LossStats(sent.sum_names, sent.maximum_names, sums, maxima))
        return added

    def reduce(self, number: float, how: Literal["sum", "max"], phase: str = "agreeing on a number") -> float:
        """The sum or the largest of the numbers of all ranks; `phase` names the work in errors."""
        if self.size == 1:
            return number
        value = torch.tensor([number], dtype=torch.float64)
        with self.during(phase):
            dist.all_reduce(value, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        return float(value)

    def barrier(self, phase: str) -> None:
        """Wait for all ranks; `phase` names the work in errors."""
        self.gather(phase, b"")

    def broadcast(self, phase: str, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank; the argument of other ranks is ignored."""
        if self.size == 1:
            return message
        length = torch.tensor([len(message)])
        with self.during(phase):
            dist.broadcast(length, src=0)
            content = bytearray(message) if self.leads else bytearray(int(length))
            if content:
                dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
        return bytes(content)

    def lead(self, phase: str, act: Callable[[], T]) -> T | None:
        """`act` on rank 0, while the others wait for it: it may take longer than `timeout_s`. Returns its result on
        rank 0, None on the others."""
        if self.size == 1:
            return act()
        if not self.leads:
            while self.broadcast(phase) != b"done":
                pass
            return None
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(act())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name=phase, daemon=True).start()
        while not wait([result], timeout=self.heartbeat_s).done:
            self.broadcast(phase, b"waiting")
        outcome = result.result()  # an error ends this rank, which ends the others
        self.broadcast(phase, b"done")
        return outcome

    def gather(self, phase: str, message: bytes) -> list[bytes]:
        """The messages of all ranks in order, on every rank."""
        if self.size == 1:
            return [message]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self.during(phase):
            dist.all_gather(lengths, torch.tensor([len(message)]))
            longest = max(map(int, lengths))
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            if longest:  # all_gather needs rows of equal length
                row = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
                dist.all_gather(rows, row)
        return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """Wait for the others at the end of a successful run."""
        if self.size > 1:
            self.barrier("ending")
            dist.destroy_process_group()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A lost rank ends the others here: at once when its connections close, else after `timeout_s`."""
        try:
            yield
        except RuntimeError as error:  # the narrowest class that both of torch's backends raise
            if self.size == 1 or not _is_lost_connection(error):
                raise
            raise ProcessDied(
                f"rank {self.rank} of {self.size} lost {self._lost_ranks()} while {phase}: {first_sentence(error)}",
                fix="the rank that ended first says why in its log; fix that and start all of them again. If none "
                f"ended, one was silent for {self.timeout_s:g} s: give --ranks-timeout-s more",
            ) from error

    def introduce(self) -> None:
        """Tell all ranks which process this is, so that errors can name those that end."""
        own = msgspec.json.encode((socket.gethostname(), os.getpid()))
        self._processes = [msgspec.json.decode(place) for place in self.gather("finding the others", own)]

    def _lost_ranks(self) -> str:
        """The ranks on this machine that have ended; a process ends shortly after its connections."""
        here = {rank: pid for rank, (host, pid) in enumerate(self._processes) if host == socket.gethostname()}
        deadline = time.monotonic() + ENDING_S
        while not (ended := [f"rank {rank} (process {pid})" for rank, pid in here.items() if not _is_alive(pid)]):
            if time.monotonic() > deadline:
                return "the others"
            time.sleep(0.05)
        return ", ".join(ended)


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error comes from torch's collectives; Gloo has no class of its own, but names its source file."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ALONE = Ranks()


def join_ranks(config: TrainConfig) -> Ranks:
    """Join the other ranks, as set by torchrun or by --trainer-rank and --ranks; `ALONE` without others."""
    rank, size, local_rank = _rank_and_size(config)
    if rank == 0:
        for note in unused_variables(config, os.environ, size):
            log.warning("variable_without_effect", note=note)
    config.check_ranks(size)
    if size == 1:
        return ALONE
    if not 0 <= rank < size:
        raise ConfigError(f"there is no rank {rank} among {size}", fix=f"number the ranks from 0 to {size - 1}")
    device = choose_rank_device(config.device, local_rank)
    if config.offload_weights and device.type == "cpu":
        raise ConfigError(
            "train.offload_weights copies layers from host memory to a GPU, and the ranks compute on a CPU",
            fix="leave --train.offload-weights out: on a CPU the weights are in host memory",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises an error instead of aborting
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=config.init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.ranks_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessDied(
            f"rank {rank} of {size} did not find the others: {first_sentence(error)}", fix=USE_TORCHRUN
        ) from error
    if rank > 0:
        logging.getLogger("treadle").setLevel(logging.ERROR)  # rank 0 logs for all
    ranks = Ranks(rank, size, config.ranks_timeout_s)
    ranks.introduce()
    _check_same_settings(config, ranks)
    log.info("ranks", size=size, backend=backend, timeout_s=config.ranks_timeout_s)
    return ranks


def choose_rank_device(wanted: str, local_rank: int) -> torch.device:
    """Each rank of a machine uses the GPU with its local rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if wanted not in ("auto", "cuda"):
        raise ConfigError(f"several ranks cannot all use {wanted}", fix="--device cuda, or CUDA_VISIBLE_DEVICES")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}",
            fix=f"torchrun --nproc-per-node {max(1, torch.cuda.device_count())}",
        )
    return torch.device("cuda", local_rank)


def _check_same_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Ranks that split the same batch differently would silently train on nonsense."""
    own = config.model_dump(mode="json", exclude={"trainer_rank"})
    leaders = msgspec.json.decode(ranks.broadcast("comparing the settings", msgspec.json.encode(own)))
    different = sorted(name for name in own if own[name] != leaders[name])
    if different:
        raise ConfigError(
            f"rank {ranks.rank} has another {', '.join(different)} than rank 0", fix="give all ranks the same flags"
        )


def _rank_and_size(config: TrainConfig) -> tuple[int, int, int]:
    """(rank, number of ranks, rank on this machine)"""
    if config.ranks > 1:
        return config.trainer_rank, config.ranks, int(os.environ.get("LOCAL_RANK", config.trainer_rank))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, 0
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set and {', '.join(missing)} is not", fix=USE_TORCHRUN)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
