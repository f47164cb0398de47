"""Form a process group of the trainer and the workers of engines, and broadcast weights in it.

    trainer: store = host_store(...)    worker: store = connect_store(...)   rendezvous
    all:     group = form_group(...)    NCCL between GPUs, else Gloo; tested with a first broadcast
             group.send(weights)        group.receive(weights)               packed into buckets

All plan the same buckets from the same names and shapes, so only the numbers are sent. Whole weights are sent; each
worker copies its own part out of every bucket (shards.py).

The group is built from torch's parts and is never the default group, which belongs to vLLM. Every failure, including a
peer that ended or is silent, is a SyncError within the group's timeout. Torch does not say which peer: each worker
reports in the store that it has begun to join, and each broadcast that it has ended, and the trainer names the workers
that did not (`silent_ranks`).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from treadle.background import in_background
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.shards import HeldWeight
from treadle.wire.bridge import JoinGroup

BUCKET_BYTES = 256 << 20  # large enough to keep a link busy, small enough for the spare memory of a GPU
TRAINER = 0  # its rank; the workers have the following ones
JOINING = 0  # the step that workers report first; broadcasts are steps 1, 2, ...
REPORT_S = 2.0  # for workers that run to report that a broadcast broke off
_POLL_S = 0.02
_LOOK_S = 0.5  # between two looks whether the group is still wanted
CONNECT_S = 5.0  # for a first connection between the two machines
NETWORK_FIX = (
    "the two must reach each other on all ports, at the address that --broadcast-host names (NCCL: on the network in "
    "NCCL_SOCKET_IFNAME); or set --weight-bridge-mode reload, which only needs the engine's HTTP port"
)
PEER_FIX = "its log says why; start it again, then continue with treadle run --resume"
# Turn a timeout into an error for the caller; otherwise a thread of torch would abort the process, vLLM's too.
NCCL_ERRORS = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}

log = get_logger("sync")
Store = Any  # torch's rendezvous store
_dist: Any = torch.distributed  # torch's type stubs lack what is used here

# ---- buckets (pure)


@dataclass(frozen=True)
class BucketSlice:
    """Elements `start` to `stop` of the flattened weight `name`, at `offset` in their bucket."""

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    num_elements: int
    slices: tuple[BucketSlice, ...]


def plan_buckets(weights: Iterable[tuple[str, Sequence[int]]], elements_per_bucket: int) -> tuple[Bucket, ...]:
    """Lay the weights end to end and cut them into buckets. All but the last are full; a weight may span several.

    >>> [bucket.num_elements for bucket in plan_buckets([("a", (2, 3)), ("b", (5,))], elements_per_bucket=4)]
    [4, 4, 3]
    >>> plan_buckets([("a", (2, 3)), ("b", (5,))], elements_per_bucket=4)[1].slices
    (BucketSlice(name='a', start=4, stop=6, offset=0), BucketSlice(name='b', start=0, stop=2, offset=2))
    """
    buckets: list[Bucket] = []
    slices: list[BucketSlice] = []
    offset = 0
    for name, shape in weights:
        start, size = 0, math.prod(shape)
        while start < size:
            stop = min(size, start + elements_per_bucket - offset)
            slices.append(BucketSlice(name, start, stop, offset))
            offset += stop - start
            start = stop
            if offset == elements_per_bucket:
                buckets.append(Bucket(offset, tuple(slices)))
                slices, offset = [], 0
    if slices:
        buckets.append(Bucket(offset, tuple(slices)))
    return tuple(buckets)


# ---- the group


class PeerLost(SyncError):
    """The peer ended, is silent or unreachable; its own error may be more precise."""


class BroadcastGroup:
    """The trainer and one or more workers; `peer` names the other side in errors. After a failed broadcast it must be
    closed: the others, which may be waiting, then fail at once."""

    def __init__(
        self,
        backend: Any,
        plan: tuple[Bucket, ...],
        *,
        peer: str,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        report: Callable[[int], None],
    ) -> None:
        """`backend`: torch's ProcessGroupNCCL or ProcessGroupGloo. `device`: where it takes tensors. `report`: tells
        the trainer that this process has ended a broadcast, well or not."""
        self._backend = backend
        self._plan = plan
        self._peer = peer
        self._dtype = dtype
        self._device = device
        self._timeout_s = timeout_s
        self._report = report
        self.num_broadcasts = 0
        self._num_bytes = sum(bucket.num_elements for bucket in plan) * dtype.itemsize

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Send to the engines, in the order of the plan, one weight at a time. Returns the bytes sent to each."""
        self.num_broadcasts += 1
        remaining, flat = iter(weights), torch.empty(0)
        try:
            for bucket, numbers in self._buffers():
                for part in bucket.slices:
                    if part.start == 0:
                        flat = _next_weight(remaining, part.name)
                    numbers[part.offset : part.offset + part.stop - part.start].copy_(flat[part.start : part.stop])
                self.broadcast(numbers)
        finally:
            deque(remaining, maxlen=0)  # other trainer ranks gather all of them
        return self._num_bytes

    @torch.no_grad()
    def receive(self, weights: Mapping[str, HeldWeight]) -> int:
        """Receive into `weights`, in place; after an error they are partly overwritten. Returns the bytes received."""
        self.num_broadcasts += 1
        try:
            for bucket, numbers in self._buffers():
                self.broadcast(numbers)
                for part in bucket.slices:
                    run = numbers[part.offset : part.offset + part.stop - part.start]
                    weights[part.name].write_run(part.start, part.stop, run)
            for device in {held.tensor.device for held in weights.values() if held.tensor.is_cuda}:
                torch.cuda.synchronize(device)  # they are read next on other streams
        finally:
            self._report(self.num_broadcasts)
        return self._num_bytes

    def close(self) -> None:
        """Close the connection, whether or not the peer is alive."""
        backend, self._backend = self._backend, None  # Gloo closes its connections when the last reference is gone
        with contextlib.suppress(RuntimeError, AttributeError):
            backend.abort()

    def _buffers(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with a buffer of its size, which all share; raises PeerLost after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        longest = max((bucket.num_elements for bucket in self._plan), default=0)
        numbers = torch.empty(longest, dtype=self._dtype, device=self._device)
        for bucket in self._plan:
            if time.monotonic() > deadline:
                raise PeerLost(f"the broadcast with {self._peer} took over {self._timeout_s:.0f} s", fix=PEER_FIX)
            yield bucket, numbers[: bucket.num_elements]

    def broadcast(self, numbers: Tensor) -> None:
        backend = self._backend
        if backend is None:
            raise PeerLost(f"the broadcast with {self._peer} was ended", fix=PEER_FIX)
        try:
            backend.broadcast(numbers.view(torch.uint8), TRAINER).wait()
        except RuntimeError as error:  # the narrowest class that both of torch's backends raise
            reason = first_sentence(error)
            raise PeerLost(f"the broadcast with {self._peer} broke off: {reason}", fix=PEER_FIX) from error


def host_store(address: str, timeout_s: float, port: int = 0) -> Store:
    """Create the trainer's store; it listens on this address only, on `port`, or a free one if that is in use or 0."""
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        try:
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            log.warning("port_in_use", variable="MASTER_PORT", port=port, instead="a free one")
            listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise SyncError(
            f"cannot listen on {address}: {error.strerror or error}",
            fix="--broadcast-host (or MASTER_ADDR) takes a name or address of this machine",
        ) from None
    port = listener.getsockname()[1]
    return _dist.TCPStore(
        address, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect the engine to the trainer's store. The first call of a store has no deadline: a silent port hangs."""

    def connect() -> Store:
        return _dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)

    try:
        return in_background("connect-store", connect).result(timeout_s)
    except (RuntimeError, TimeoutError) as error:
        reason = first_sentence(error) if str(error) else f"nothing came within {timeout_s:.0f} s"
        raise SyncError(f"cannot reach the trainer at {host}:{port}: {reason}", fix=NETWORK_FIX) from None


def local_address_towards(host: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Address of this machine on the network of `host`."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = getattr(error, "strerror", None) or error
        raise SyncError(f"cannot reach {host}:{port}: {reason}", fix=NETWORK_FIX) from None


def report(store: Store, group: str, rank: int, step: int) -> None:
    """Tell the trainer that this rank has ended this step. A trainer that is gone needs no report."""
    with contextlib.suppress(RuntimeError):
        store.set(_report_key(group, rank, step), "")


def _report_key(group: str, rank: int, step: int) -> str:
    return f"reports/{group}/{step}/{rank}"  # torch's own keys begin with the group's name


def silent_ranks(store: Store, request: JoinGroup, step: int, wait_s: float = REPORT_S) -> list[int]:
    """Workers that have not reported this step within `wait_s`. `store`: the trainer's own."""
    with contextlib.suppress(SyncError):
        # A connection of its own: the other one is locked while it waits for a rank.
        reader = connect_store(request.host, store.port, CONNECT_S)
        deadline = time.monotonic() + wait_s
        while True:
            ranks = range(TRAINER + 1, request.num_ranks)
            silent = [rank for rank in ranks if not reader.check([_report_key(request.group, rank, step)])]
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(_POLL_S)
    return []


def abandon(request: JoinGroup, store: Store) -> None:
    """Tell all that join this group that it will not form. `store`: the trainer's own."""
    with contextlib.suppress(SyncError, RuntimeError):
        # A connection of its own: the other one is locked while it waits for a rank.
        connect_store(request.host, store.port, CONNECT_S).set(_abandoned_key(request.group), "")


def _abandoned_key(group: str) -> str:
    return f"abandoned/{group}"


def form_group(
    request: JoinGroup, store: Store, rank: int, *, own_address: str, peer: str, device: torch.device
) -> BroadcastGroup:
    """Wait for all ranks, at most `request.timeout_s`. `device`: of the weights."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    bucket_device = device if request.backend == "nccl" else torch.device("cpu")

    def form() -> BroadcastGroup:
        own_store = _dist.PrefixStore(request.group, store)
        build = _nccl if request.backend == "nccl" else _gloo
        group = BroadcastGroup(
            build(own_store, rank, request.num_ranks, own_address, timedelta(seconds=request.timeout_s)),
            plan_buckets(request.weights, request.bucket_bytes // dtype.itemsize),
            peer=peer,
            dtype=dtype,
            device=bucket_device,
            timeout_s=request.timeout_s,
            report=partial(report, store, request.group, rank),
        )
        try:
            group.broadcast(torch.zeros(1, device=bucket_device))  # NCCL connects at the first broadcast
        except SyncError:
            group.close()
            raise
        return group

    report(store, request.group, rank, JOINING)
    forming = in_background("form-group", form)
    deadline = time.monotonic() + request.timeout_s
    try:
        watcher = None
        while not wait((forming,), _LOOK_S).done:
            watcher = watcher or connect_store(request.host, store.port, CONNECT_S)
            if watcher.check([_abandoned_key(request.group)]):
                raise TimeoutError("another process cannot join")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came within {request.timeout_s:.0f} s")
        return forming.result()
    except (RuntimeError, SyncError, TimeoutError) as error:
        reason = first_sentence(error)
    raise PeerLost(f"no {request.backend} group with {peer} for the broadcast of weights: {reason}", fix=NETWORK_FIX)


def first_sentence(error: Exception) -> str:
    """The message of a torch error, without the source location.

    >>> first_sentence(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:91. Check the logs."))
    'Connection closed by peer [::1]:91'
    """
    text = str(error) or repr(error)
    return re.sub(r"^\[\S*\] ", "", text).splitlines()[0].split(". ")[0]


def _gloo(store: Store, rank: int, num_ranks: int, own_address: str, timeout: timedelta) -> Any:
    """Use the address on the shared network; by default Gloo would use the one that this host name resolves to."""
    kind = _dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=own_address)]
    options._threads = 1
    options._timeout = timeout
    return kind(store, rank, num_ranks, options)


def _nccl(store: Store, rank: int, num_ranks: int, _own_address: str, timeout: timedelta) -> Any:
    kind = _dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    before = {name: os.environ.get(name) for name in NCCL_ERRORS}
    os.environ.update(NCCL_ERRORS)  # read once, by the constructor; other groups of this process are not affected
    try:
        return kind(store, rank, num_ranks, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _next_weight(remaining: Iterator[tuple[str, Tensor]], name: str) -> Tensor:
    found, weight = next((pair for pair in remaining if pair[1].numel()), ("nothing", torch.empty(0)))
    if found != name:
        raise SyncError(f"{found} is to be sent where {name} was agreed on", fix="this is a bug in treadle: report it")
    return weight.detach().reshape(-1)
