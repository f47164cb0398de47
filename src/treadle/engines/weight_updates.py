"""Load new weights into a serving engine: from files, or by a trainer's broadcast.

WeightUpdateState   tracks an update; the engine may not resume while its weights are partial or have no version
BroadcastReceiver   joins the trainer's process group and receives into the live weights
read_weights, write_weights   all weights of a folder, only those that changed, or only changed elements
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.errors import EngineError, RequestError
from treadle.log import get_logger
from treadle.sync.delta import DELTA_FROM, WeightUpdate, from_tensors, set_weight
from treadle.sync.process_group import BroadcastGroup, connect_store, form_group, local_address_towards
from treadle.sync.shards import HeldWeight, as_held, part_index
from treadle.wire.bridge import JoinGroup, Received

Weights = Mapping[str, Tensor | HeldWeight]  # by the trainer's names; a tensor is a whole weight
REPUBLISH_FIX = "let the trainer publish again (treadle run --resume), or POST /bridge/restart"
log = get_logger("engine")
SAME_MODEL = "give engine and trainer the same --model"


class WeightUpdateState:
    """State of a weight update while the engine is held.

    begin(), received(), finish(): being written, complete, served under a version. After fail() the weights are a
    mixture of versions, which only a complete update or a restart repairs.
    """

    def __init__(self) -> None:
        self._problem: str | None = None  # why the weights belong to no version; None: they belong to one
        self._is_complete = True

    @property
    def is_consistent(self) -> bool:
        """Whether the weights are those of the served version; if not, only a complete set of weights repairs them."""
        return self._problem is None

    def begin(self) -> None:
        self._problem, self._is_complete = "a transfer is in progress", False

    def fail(self, reason: str) -> None:
        self._problem, self._is_complete = reason, False

    def received(self) -> None:
        self._problem, self._is_complete = "they are complete, but no policy version was given", True

    def finish(self) -> None:
        """The weights have a version now. Also called when nothing was written, or after a restart."""
        self._problem, self._is_complete = None, True

    def check_can_resume(self, policy_version: int | None) -> None:
        """Complete weights may be served once they have a version; a mixture, never."""
        if self._problem is None or (self._is_complete and policy_version is not None):
            return
        raise EngineError(
            f"new weights came in part, and nothing may be sampled from a mixture: {self._problem}"
            if not self._is_complete
            else f"new weights wait for their version: {self._problem}",
            fix=REPUBLISH_FIX,
        )


class BroadcastReceiver:
    """Receives a trainer's broadcast in a process that has the weights, or a part of each: it keeps its own of all
    numbers.

    `weights` are keyed by the trainer's parameter names, tied ones once.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the group; None: in none
        self._group: BroadcastGroup | None = None

    def join(self, request: JoinGroup, weights: Weights, *, worker: int = 0) -> None:
        """`worker`: rank of this process among those of its engine."""
        held, rank = as_held(weights), request.first_rank + worker
        device = next(iter(held.values())).tensor.device
        check_same_weights(request, held)
        if rank >= request.num_ranks:
            raise RequestError(
                f"the trainer's group has {request.num_ranks} ranks, and this process would be rank {rank}",
                fix="start the trainer again: the engine has more workers than when it attached",
            )
        if request.backend == "nccl" and device.type != "cuda":
            raise RequestError(
                f"NCCL is between GPUs, and this engine's weights are on {device}", fix="set --broadcast-by gloo"
            )
        own_address = local_address_towards(request.host, request.port)
        store = connect_store(request.host, request.port, request.timeout_s)
        peer = f"the trainer at {request.host}"
        group = form_group(request, store, rank, own_address=own_address, peer=peer, device=device)
        self.leave()  # only now: a trainer that fails to join must not end the present group
        self._group, self.name = group, request.group
        log.info("joined", backend=request.backend, trainer=request.host, weights=len(weights), rank=rank)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self.name = self._group = None

    def receive(self, name: str, weights: Weights) -> Received:
        """Receive a broadcast of the group `name` into `weights`."""
        check_group(self.name, name)
        assert self._group is not None  # noqa: S101 - set together with the name
        started = time.monotonic()
        try:
            num_bytes = self._group.receive(as_held(weights))
        except BaseException:
            self.leave()  # the trainer, which waits for this process in the middle of a send, then fails at once
            raise
        return Received(status="received", num_bytes=num_bytes, seconds=time.monotonic() - started)


def check_group(own: str | None, asked: str) -> None:
    """Refuse a trainer of another group; call this before anything is written."""
    if own != asked:
        raise RequestError(
            "this engine is in no group with this trainer: it was restarted, or another trainer has joined since",
            fix="let one trainer publish to one engine; treadle run --resume joins again",
        )


def check_same_weights(request: JoinGroup, weights: Mapping[str, HeldWeight]) -> None:
    """Check that names, shapes and dtype of the trainer's weights match this engine's, before anything is written."""
    sent = dict(request.weights)
    if len(sent) != len(request.weights):
        raise RequestError("a weight is named twice", fix="name each weight once")
    for name, shape in sent.items():
        own = weights.get(name)
        if own is None:
            raise RequestError(f"the trainer has {name}, which this engine's model does not have", fix=SAME_MODEL)
        if own.shape != shape:
            raise RequestError(
                f"{name} is {list(shape)} at the trainer and {list(own.shape)} in this engine", fix=SAME_MODEL
            )
        if not own.tensor.is_contiguous():
            raise RequestError(
                f"this engine keeps {name} in an order of its own", fix="set --weight-bridge-mode reload"
            )
        dtype = str(own.tensor.dtype).removeprefix("torch.")
        if dtype != request.dtype:
            raise RequestError(
                f"{name} is {request.dtype} at the trainer and {dtype} in this engine", fix="give both the same --dtype"
            )
    missing = next((name for name in weights if name not in sent), None)
    if missing is not None:
        raise RequestError(f"this engine has {missing}, which the trainer does not publish", fix=SAME_MODEL)


def read_weights(
    folder: Path, weights: Weights, policy_version: int, *, must_be_all: bool = False
) -> dict[str, WeightUpdate]:
    """Read the safetensors files of `folder` and match them to `weights`, which are of `policy_version`. Of weights
    that this process holds in part, only the part is read and returned.

    Refuses, by name, tensors that `weights` does not have, and a delta to another version. `must_be_all`: refuse a
    partial set, because the present weights are a mixture that only a complete set repairs.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{folder} holds no *.safetensors", fix="save the weights there first")
    held = as_held(weights)
    tensors: dict[str, Tensor] = {}
    is_delta = False
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                base = (opened.metadata() or {}).get(DELTA_FROM)
                if base not in (None, str(policy_version)):
                    raise RequestError(
                        f"{file} holds what changed since version {base}, and the engine has version {policy_version}",
                        fix="send all weights; a trainer that is started again (treadle run --resume) does",
                    )
                is_delta = is_delta or base is not None
                tensors |= {name: _read(opened, name, folder, held) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{file} cannot be read: {error}", fix="save it again") from None
    if not tensors and not is_delta:  # a step that changed nothing is a delta without weights
        raise RequestError(f"the files in {folder} hold no weights", fix="save the weights there first")
    found = _checked(tensors, folder, held)
    if must_be_all:
        _check_complete(found, folder, held)
    return found


def write_weights(found: Mapping[str, WeightUpdate], weights: Weights) -> None:
    """Write what `read_weights` returned, in place."""
    held = as_held({name: weights[name] for name in found})
    for name, update in found.items():
        set_weight(held[name].tensor, update)


def _read(opened: Any, name: str, folder: Path, weights: Mapping[str, HeldWeight]) -> Tensor:
    """A tensor of a file; of a weight that is held in part, the part."""
    held = weights.get(name)
    if held is None or held.is_whole:
        return cast(Tensor, opened.get_tensor(name))
    saved = opened.get_slice(name)
    if tuple(saved.get_shape()) != held.shape:
        raise _does_not_fit(name, folder, f"it is {saved.get_shape()}, the engine's is {list(held.shape)}")
    if not held.part.length:
        return torch.empty_like(held.tensor)
    return cast(Tensor, saved[part_index(held.part)])


def _checked(tensors: Mapping[str, Tensor], folder: Path, weights: Mapping[str, HeldWeight]) -> dict[str, WeightUpdate]:
    try:
        updates = from_tensors(tensors)
    except ValueError as error:
        raise RequestError(f"in {folder} {error}", fix="save the weights again") from None
    found: dict[str, WeightUpdate] = {}
    for name, update in updates.items():
        held = weights.get(name)
        if held is None:
            raise RequestError(f"{folder} holds {name}, which this model does not have", fix="use the engine's model")
        reason = held.misfit(update)
        if reason is not None:
            raise _does_not_fit(name, folder, reason)
        found[name] = held.own_update(update)
    return found


def _does_not_fit(name: str, folder: Path, reason: str) -> RequestError:
    return RequestError(f"{name} in {folder} does not fit: {reason}", fix="use the engine's model")


def _check_complete(found: Mapping[str, WeightUpdate], folder: Path, weights: Mapping[str, HeldWeight]) -> None:
    """Check that every weight is given in full. A tied weight has several names; one of them is enough."""
    given = {weights[name].tensor.data_ptr() for name, update in found.items() if isinstance(update, Tensor)}
    missing = (name for name, held in weights.items() if held.tensor.numel() and held.tensor.data_ptr() not in given)
    if (name := next(missing, None)) is not None:
        raise RequestError(
            f"the engine's weights are a mixture since a publish broke off, and {folder} has not all of {name}",
            fix="load all weights, or POST /bridge/restart",
        )


@functools.cache
def empty_model(folder: Path) -> Any:
    """The model as transformers builds it, with names and shapes but without weights (meta device)."""
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import, and rarely needed

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
