"""The engine's end of a broadcast: it joins a trainer's group, and takes what is sent into its live weights."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from treadle.errors import RequestError, SyncError
from treadle.log import get_logger
from treadle.sync.process_group import ENGINE, WeightGroup, connect_store, form_group, local_address_towards
from treadle.wire.bridge import JoinGroup, Received

log = get_logger("engine")
SAME_MODEL = "give engine and trainer the same --model"


class Receiver:
    """In the process that has the weights. They are named as a trainer names them, a tied one once."""

    def __init__(self) -> None:
        self._name: str | None = None  # None: in no group
        self._group: WeightGroup | None = None

    def join(self, request: JoinGroup, weights: Mapping[str, Tensor]) -> None:
        device = next(iter(weights.values())).device
        refuse_other_weights(request, weights)
        refuse_other_backend(request, device)
        own_address = local_address_towards(request.host, request.port)
        store = connect_store(request.host, request.port, request.timeout_s)
        peer = f"the trainer at {request.host}"
        group = form_group(request, store, ENGINE, own_address=own_address, peer=peer, device=device)
        self.leave()  # a trainer that could not join has thrown nobody out
        self._group, self._name = group, request.group
        log.info("joined", backend=request.backend, trainer=request.host, weights=len(weights))

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._name = self._group = None

    def refuse_other(self, name: str) -> None:
        """Before anything is written."""
        refuse_other_group(self._name, name)

    def receive(self, name: str, weights: Mapping[str, Tensor]) -> Received:
        """From the group of this name, into `weights`."""
        self.refuse_other(name)
        assert self._group is not None  # noqa: S101 - it has a name
        started = time.monotonic()
        try:
            num_bytes = self._group.receive(weights)
        except SyncError:
            self.leave()
            raise
        return Received(status="received", num_bytes=num_bytes, seconds=time.monotonic() - started)


def refuse_other_group(own: str | None, asked: str) -> None:
    if own != asked:
        raise RequestError(
            "this engine is in no group with this trainer: it was restarted, or another trainer has joined since",
            fix="let one trainer publish to one engine; treadle run --resume joins again",
        )


def refuse_other_weights(request: JoinGroup, weights: Mapping[str, Tensor]) -> None:
    """The trainer's must be the engine's, each once: names, shapes and number format. Nothing is written before."""
    sent = dict(request.weights)
    if len(sent) != len(request.weights):
        raise RequestError("a weight is named twice", fix="name each weight once")
    for name, shape in sent.items():
        own = weights.get(name)
        if own is None:
            raise RequestError(f"the trainer has {name}, which this engine's model does not have", fix=SAME_MODEL)
        if tuple(own.shape) != shape:
            raise RequestError(
                f"{name} is {list(shape)} at the trainer and {list(own.shape)} in this engine", fix=SAME_MODEL
            )
        if not own.is_contiguous():
            raise RequestError(
                f"this engine keeps {name} in an order of its own", fix="set --weight-bridge-mode reload"
            )
        kind = str(own.dtype).removeprefix("torch.")
        if kind != request.dtype:
            raise RequestError(
                f"{name} is {request.dtype} at the trainer and {kind} in this engine", fix="give both the same --dtype"
            )
    missing = next((name for name in weights if name not in sent), None)
    if missing is not None:
        raise RequestError(f"this engine has {missing}, which the trainer does not publish", fix=SAME_MODEL)


def refuse_other_backend(request: JoinGroup, device: torch.device) -> None:
    if request.backend == "nccl" and device.type != "cuda":
        raise RequestError(
            f"NCCL is between GPUs, and this engine's weights are on {device}", fix="set --broadcast-by gloo"
        )
