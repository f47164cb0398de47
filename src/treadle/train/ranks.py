"""Several trainer processes that act as one: each takes its part of the micros and keeps its part of the optimizer.

    rank 0   leases ──batch──> all      each: own micros ──> gradients ──sum──> owner of each parameter
                                        owner: clip, step ──> its live weights ──> all ──> rank 0 publishes

Every parameter has one owner, which alone keeps its master and moments (the first stage of ZeRO). Weights and gradients
are whole on every rank. `Ranks` is a trainer that runs alone; `Together` is one of several. The loop knows neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from treadle.errors import ProcessDied
from treadle.sync.process_group import first_sentence
from treadle.train.loss_stats import Stats
from treadle.train.partition import deal
from treadle.train.stop import StopRequested


class Ranks:
    """A trainer that runs alone: everything is its own, and there is nobody to agree with."""

    rank: int = 0
    size: int = 1
    timeout_s: float = math.inf

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks to the hub, the engine and the sinks, and writes the model."""
        return self.rank == 0

    def own(self, costs: Sequence[float]) -> list[int]:
        """The places of this rank's share of things that cost so much; all ranks must ask about the same things."""
        return deal(costs, self.size)[self.rank]

    def owners(self, live: Mapping[str, Tensor]) -> dict[str, int]:
        """The rank that keeps each parameter's optimizer state, such that all keep about as much."""
        names = list(live)
        hands = deal([float(live[name].numel()) for name in names], self.size)
        return {names[place]: rank for rank, hand in enumerate(hands) for place in hand}

    def owned(self, live: Mapping[str, Tensor]) -> set[str]:
        return {name for name, rank in self.owners(live).items() if rank == self.rank}

    def agreeing(self, check_stop: Callable[[], None]) -> AbstractContextManager[None]:
        """Around work that a request to stop may interrupt: it then ends in StopRequested on all ranks or on none."""
        return nullcontext()

    def total(self, stats: Stats) -> Stats:
        """Those of all ranks, as if one had trained on everything."""
        return stats

    def total_number(self, number: float) -> float:
        return number

    def total_norm(self, norm: float) -> float:
        """The norm of everything, from that of each rank's part."""
        return norm

    def largest_number(self, number: float) -> float:
        return number

    def sum_to_owners(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up each gradient over the ranks at its parameter's owner; elsewhere it becomes zero."""

    def hand_out(self, live: Mapping[str, Tensor]) -> None:
        """Every owner's weights to all ranks."""

    def meet(self, phase: str) -> None:
        """Wait until all ranks are here; `phase` says what they are doing, should one not come."""

    def tell(self, phase: str, message: bytes = b"") -> bytes:
        """Rank 0's message, on every rank; what the others pass is not looked at."""
        return message

    def gather(self, phase: str, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of ranks, on every rank."""
        return [message]

    def leave(self) -> None:
        """At the end of a run that went well: waits for the others."""


ALONE = Ranks()


class _SentStats(msgspec.Struct, frozen=True):
    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums: list[float]
    maxima: list[float]


class Together(Ranks):
    """One rank of several, over torch.distributed, whose process group the caller has opened with `timeout_s`.

    Tensors on a GPU go through NCCL; what is in host memory (messages, the gradients of adamw_cpu) goes through Gloo,
    where waiting for it does not wait for the GPU.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s

    @contextmanager
    def agreeing(self, check_stop: Callable[[], None]) -> Iterator[None]:
        wants_to_stop = False
        try:
            yield
            check_stop()  # a rank without any work of its own may be the one that was asked
        except StopRequested:
            wants_to_stop = True
        if self._reduce("agreeing whether to stop", float(wants_to_stop), dist.ReduceOp.MAX):
            raise StopRequested

    def total(self, stats: Stats) -> Stats:
        own = _SentStats(stats.sum_names, stats.maximum_names, stats.sums.tolist(), stats.maxima.tolist())
        added = Stats()
        for packed in self.gather("adding up the metrics", msgspec.msgpack.encode(own)):
            sent = msgspec.msgpack.decode(packed, type=_SentStats)
            sums, maxima = (torch.tensor(values, dtype=torch.float64) for values in (sent.sums, sent.maxima))
            added = added.add(Stats(sent.sum_names, sent.maximum_names, sums, maxima))
        return added

    def total_number(self, number: float) -> float:
        return self._reduce("agreeing on a number", number, dist.ReduceOp.SUM)

    def total_norm(self, norm: float) -> float:
        return math.sqrt(self.total_number(norm**2))

    def largest_number(self, number: float) -> float:
        return self._reduce("agreeing on a number", number, dist.ReduceOp.MAX)

    @torch.no_grad()
    def sum_to_owners(self, gradients: Mapping[str, Tensor]) -> None:
        owners = self.owners(gradients)
        with self._during("adding up the gradients"):
            started = [dist.reduce(g, dst=owners[name], async_op=True) for name, g in gradients.items()]
            for work in started:
                work.wait()
        for name, gradient in gradients.items():
            if owners[name] != self.rank:
                gradient.zero_()  # sums of some ranks may have been left there

    @torch.no_grad()
    def hand_out(self, live: Mapping[str, Tensor]) -> None:
        owners = self.owners(live)
        with self._during("handing out the new weights"):
            started = [dist.broadcast(p.detach(), src=owners[name], async_op=True) for name, p in live.items()]
            for work in started:
                work.wait()

    def meet(self, phase: str) -> None:
        self.gather(phase, b"")

    def tell(self, phase: str, message: bytes = b"") -> bytes:
        length = torch.tensor([len(message)])
        with self._during(phase):
            dist.broadcast(length, src=0)
            content = _as_tensor(message) if self.leads else torch.empty(int(length), dtype=torch.uint8)
            if len(content):
                dist.broadcast(content, src=0)
        return message if self.leads else content.numpy().tobytes()

    def gather(self, phase: str, message: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._during(phase):
            dist.all_gather(lengths, torch.tensor([len(message)]))
            longest = max(map(int, lengths))
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            if longest:  # rows of one length is what all_gather takes
                dist.all_gather(rows, _as_tensor(message.ljust(longest, b"\0")))
        return [row.numpy().tobytes()[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def leave(self) -> None:
        self.meet("ending")
        dist.destroy_process_group()

    def _reduce(self, phase: str, number: float, operation: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor([number], dtype=torch.float64)
        with self._during(phase):
            dist.all_reduce(value, op=operation)
        return float(value)

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """Whatever ends a rank ends the others here: at once when its connections close, else after `timeout_s`."""
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one that both of its backends raise
            raise ProcessDied(
                f"rank {self.rank} of {self.size} lost the others while {phase}: {first_sentence(error)}",
                fix="the rank that ended first says why in its log; mend that and start all of them again. If none "
                f"ended, one was silent for {self.timeout_s:g} s: give --ranks-timeout-s more",
            ) from error


def _as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
