"""A process group of two, trainer and engine, for broadcasts of weights from the one to the other.

    trainer: store = host_store(...)    engine: store = visit_store(...)     where each learns of the other
    both:    group = form_group(...)    NCCL between GPUs, else Gloo; ends with a first broadcast, to be sure of it
             group.send(weights)        group.receive(weights)               packed into buckets (buckets.py)

It is built of torch's own parts and is never the default group, which vLLM has for itself. Whatever goes wrong, a peer
that has ended or is silent too, is a SyncError within the group's timeout.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from treadle.errors import SyncError
from treadle.sync.background import in_background
from treadle.sync.buckets import Bucket, plan_buckets
from treadle.wire.bridge import JoinGroup

TRAINER, ENGINE = 0, 1  # ranks
REACH_S = 5.0  # for a first connection between the two machines
NETWORK_FIX = (
    "the two must reach each other on all ports, at the address that --broadcast-host names (NCCL: on the network in "
    "NCCL_SOCKET_IFNAME); or set --weight-bridge-mode reload, with --live-path on a disk that both see"
)
PEER_FIX = "its log says why; start it again, then continue with treadle run --resume"
# A timeout is then an error for whoever waits; without them a thread of torch would end the process, vLLM's too.
NCCL_ERRORS = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}

Store = Any  # torch's: where two processes learn of each other
_dist: Any = torch.distributed  # torch's types leave out what is used here


class BrokenOff(SyncError):
    """The peer has ended, is silent, or cannot be reached: it may know better why."""


class WeightGroup:
    """Formed, of two. `peer` is the other one, as errors name it. After a broadcast that failed it is of no use: close
    it, and the peer, which may wait for more, hears of it at once."""

    def __init__(
        self,
        backend: Any,
        plan: tuple[Bucket, ...],
        *,
        peer: str,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """`backend`: torch's ProcessGroupNCCL or ProcessGroupGloo. `device`: where it takes tensors."""
        self._backend = backend
        self._plan = plan
        self._peer = peer
        self._dtype = dtype
        self._device = device
        self._timeout_s = timeout_s

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """To the engine, in the order that the plan was made in; one after the other is asked for. Bytes sent."""
        coming, flat = iter(weights), torch.empty(0)

        def pack(bucket: Bucket, numbers: Tensor) -> None:
            nonlocal flat
            for piece in bucket.pieces:
                if piece.start == 0:
                    flat = _next_weight(coming, piece.name)
                numbers[piece.place : piece.place + piece.stop - piece.start].copy_(flat[piece.start : piece.stop])

        return self._broadcast_all(before=pack, after=_nothing)

    def receive(self, weights: Mapping[str, Tensor]) -> int:
        """Into `weights`, in place; what has come is in them even when it ends in an error. Bytes received."""

        def unpack(bucket: Bucket, numbers: Tensor) -> None:
            for piece in bucket.pieces:
                flat = weights[piece.name].detach().view(-1)
                flat[piece.start : piece.stop].copy_(numbers[piece.place : piece.place + piece.stop - piece.start])

        num_bytes = self._broadcast_all(before=_nothing, after=unpack)
        for device in {weight.device for weight in weights.values() if weight.is_cuda}:
            torch.cuda.synchronize(device)  # others read them next, on streams of their own
        return num_bytes

    def close(self) -> None:
        """Hang up, whether the peer is there or not."""
        backend, self._backend = self._backend, None  # Gloo closes its connections when nobody has it any more
        with contextlib.suppress(RuntimeError, AttributeError):
            backend.abort()

    @torch.no_grad()
    def _broadcast_all(
        self, *, before: Callable[[Bucket, Tensor], None], after: Callable[[Bucket, Tensor], None]
    ) -> int:
        deadline = time.monotonic() + self._timeout_s
        longest = max((bucket.num_elements for bucket in self._plan), default=0)
        numbers = torch.empty(longest, dtype=self._dtype, device=self._device)
        for bucket in self._plan:
            if time.monotonic() > deadline:
                raise BrokenOff(f"the broadcast with {self._peer} took over {self._timeout_s:.0f} s", fix=PEER_FIX)
            before(bucket, numbers)
            self.broadcast(numbers[: bucket.num_elements])
            after(bucket, numbers)
        return sum(bucket.num_elements for bucket in self._plan) * self._dtype.itemsize

    def broadcast(self, numbers: Tensor) -> None:
        try:
            self._backend.broadcast(numbers.view(torch.uint8), TRAINER).wait()
        except RuntimeError as error:  # torch has no narrower one that both of its backends raise
            reason = first_sentence(error)
            raise BrokenOff(f"the broadcast with {self._peer} broke off: {reason}", fix=PEER_FIX) from error


def host_store(address: str, timeout_s: float) -> Store:
    """The trainer's: listens on this address alone, on a port that is free."""
    try:
        listener = socket.create_server((address, 0), family=_family_of(address))
    except OSError as error:
        raise SyncError(
            f"cannot listen on {address}: {error.strerror or error}",
            fix="--broadcast-host takes a name or address of this machine",
        ) from None
    port = listener.getsockname()[1]
    return _dist.TCPStore(
        address, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def visit_store(host: str, port: int, timeout_s: float) -> Store:
    """The engine's. A store's first call has no deadline of its own: somebody may listen there and say nothing."""

    def visit() -> Store:
        return _dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)

    try:
        return in_background("visit-store", visit).result(timeout_s)
    except (RuntimeError, TimeoutError) as error:
        reason = first_sentence(error) if str(error) else f"nothing came within {timeout_s:.0f} s"
        raise SyncError(f"cannot reach the trainer at {host}:{port}: {reason}", fix=NETWORK_FIX) from None


def own_address_towards(host: str, port: int, timeout_s: float = REACH_S) -> str:
    """Of this machine, on the network that `host` is on."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except (OSError, UnicodeError) as error:  # a name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise SyncError(f"cannot reach {host}:{port}: {reason}", fix=NETWORK_FIX) from None


def form_group(
    request: JoinGroup, store: Store, rank: int, *, own_address: str, peer: str, device: torch.device
) -> WeightGroup:
    """Waits for the other one, for `request.timeout_s` at most. `device` is that of the weights."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    bucket_device = device if request.backend == "nccl" else torch.device("cpu")

    def form() -> WeightGroup:
        own_store = _dist.PrefixStore(request.group, store)
        build = _nccl if request.backend == "nccl" else _gloo
        group = WeightGroup(
            build(own_store, rank, own_address, timedelta(seconds=request.timeout_s)),
            plan_buckets(request.weights, request.bucket_bytes // dtype.itemsize),
            peer=peer,
            dtype=dtype,
            device=bucket_device,
            timeout_s=request.timeout_s,
        )
        try:
            group.broadcast(torch.zeros(1, device=bucket_device))  # NCCL meets at the first one, not before
        except SyncError:
            group.close()
            raise
        return group

    try:
        return in_background("form-group", form).result(request.timeout_s)
    except TimeoutError:
        reason = f"nothing came within {request.timeout_s:.0f} s"
    except (RuntimeError, SyncError) as error:
        reason = first_sentence(error)
    raise BrokenOff(f"no {request.backend} group with {peer} for the broadcast of weights: {reason}", fix=NETWORK_FIX)


def first_sentence(error: Exception) -> str:
    """What torch says, without where in its source it says so.

    >>> first_sentence(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:91. Check the logs."))
    'Connection closed by peer [::1]:91'
    """
    text = str(error) or repr(error)
    return re.sub(r"^\[\S*\] ", "", text).splitlines()[0].split(". ")[0]


def _gloo(store: Store, rank: int, own_address: str, timeout: timedelta) -> Any:
    """On the network that the two share; by itself Gloo would take the one that this machine's name stands for."""
    kind = _dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=own_address)]
    options._threads = 1
    options._timeout = timeout
    return kind(store, rank, 2, options)


def _nccl(store: Store, rank: int, _own_address: str, timeout: timedelta) -> Any:
    kind = _dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timeout
    with _environment(NCCL_ERRORS):  # it is read here, once
        return kind(store, rank, 2, options)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These only here: other groups of this process are made as it was told to."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _next_weight(coming: Iterator[tuple[str, Tensor]], name: str) -> Tensor:
    found, weight = next((pair for pair in coming if pair[1].numel()), ("nothing", torch.empty(0)))
    if found != name:
        raise SyncError(f"{found} is to be sent where {name} was agreed on", fix="this is a bug in treadle: report it")
    return weight.detach().reshape(-1)


def _nothing(_bucket: Bucket, _numbers: Tensor) -> None:
    pass


def _family_of(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
