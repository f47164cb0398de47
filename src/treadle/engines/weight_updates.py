"""Load new weights into a serving engine: from files, or by a trainer's broadcast.

WeightUpdate        tracks an update; the engine may not resume while its weights are partial or have no version
BroadcastReceiver   joins the trainer's process group and receives into the live weights
read_weights, write_weights   all weights of a folder, only those that changed, or only changed elements
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from treadle.errors import EngineError, RequestError, SyncError
from treadle.log import get_logger
from treadle.sync.changes import DELTA_FROM, Sent, from_tensors, misfit, set_weight
from treadle.sync.process_group import ENGINE, WeightGroup, form_group, own_address_towards, visit_store
from treadle.wire.bridge import JoinGroup, Received

REPUBLISH_FIX = "let the trainer publish again (treadle run --resume), or POST /bridge/restart"
log = get_logger("engine")
SAME_MODEL = "give engine and trainer the same --model"


class Arrival:
    """begin ──> came ──> named          as it should be: on their way, whole, served under a version
    ──> broke_off                     a mixture now; the next that comes whole mends it, or a restart
    """

    def __init__(self) -> None:
        self._problem: str | None = None  # why the weights are no version's; None: they are one's
        self._are_whole = True

    @property
    def is_settled(self) -> bool:
        """Whether the weights are those of the version that is served; else only all of them, anew, can mend that."""
        return self._problem is None

    def begin(self) -> None:
        self._problem, self._are_whole = "they are on their way", False

    def broke_off(self, reason: str) -> None:
        self._problem, self._are_whole = reason, False

    def came(self) -> None:
        self._problem, self._are_whole = "they have come, and nobody has said which version they are", True

    def named(self) -> None:
        """Or there are none any more: nothing was written, or the engine begins anew."""
        self._problem, self._are_whole = None, True

    def refuse_going_on(self, policy_version: int | None) -> None:
        """Whole weights may be served under a version that is named; a mixture, never."""
        if self._problem is None or (self._are_whole and policy_version is not None):
            return
        raise EngineError(
            f"new weights came in part, and nothing may be sampled from a mixture: {self._problem}"
            if not self._are_whole
            else f"new weights wait for their version: {self._problem}",
            fix=REPUBLISH_FIX,
        )


class Receiver:
    """In the process that has the weights. They are named as a trainer names them, a tied one once."""

    def __init__(self) -> None:
        self._name: str | None = None  # None: in no group
        self._group: WeightGroup | None = None

    def join(self, request: JoinGroup, weights: Mapping[str, Tensor]) -> None:
        device = next(iter(weights.values())).device
        refuse_other_weights(request, weights)
        refuse_other_backend(request, device)
        own_address = own_address_towards(request.host, request.port)
        store = visit_store(request.host, request.port, request.timeout_s)
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


def read_weights(
    folder: Path, weights: Mapping[str, Tensor], policy_version: int, *, must_be_all: bool = False
) -> dict[str, Sent]:
    """What `folder` holds, each of which has its place in `weights`, which are of this version; anything that has no
    place, or that is the difference to another version, is refused by name. `must_be_all`: the weights there are a
    mixture, which nothing less can mend."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{folder} holds no *.safetensors", fix="save the weights there first")
    tensors: dict[str, Tensor] = {}
    is_delta = False
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                base = (opened.metadata() or {}).get(DELTA_FROM)
            if base is not None:
                _refuse_other_base(file, base, policy_version)
                is_delta = True
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{file} cannot be read: {error}", fix="save it again") from None
    if not tensors and not is_delta:  # a step that changed nothing is a delta without weights
        raise RequestError(f"the files in {folder} hold no weights", fix="save the weights there first")
    found = _checked(tensors, folder, weights)
    if must_be_all:
        _refuse_part(found, folder, weights)
    return found


def write_weights(found: Mapping[str, Sent], weights: Mapping[str, Tensor]) -> None:
    for name, sent in found.items():
        set_weight(weights[name], sent)


def _checked(tensors: Mapping[str, Tensor], folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Sent]:
    try:
        found = from_tensors(tensors)
    except ValueError as error:
        raise RequestError(f"in {folder} {error}", fix="save the weights again") from None
    for name, sent in found.items():
        known = weights.get(name)
        if known is None:
            raise RequestError(f"{folder} holds {name}, which this model does not have", fix="use the engine's model")
        reason = misfit(sent, known)
        if reason is not None:
            raise RequestError(f"{name} in {folder} does not fit: {reason}", fix="use the engine's model")
    return found


def _refuse_part(found: Mapping[str, Sent], folder: Path, weights: Mapping[str, Tensor]) -> None:
    """A tied weight has several names; one of them is enough."""
    given = {weights[name].data_ptr() for name, sent in found.items() if isinstance(sent, Tensor)}
    missing = next((name for name, weight in weights.items() if weight.data_ptr() not in given), None)
    if missing is not None:
        raise RequestError(
            f"the engine's weights are a mixture since a publish broke off, and {folder} has not all of {missing}",
            fix="load all weights, or POST /bridge/restart",
        )


def _refuse_other_base(file: Path, base: str, policy_version: int) -> None:
    if base != str(policy_version):
        raise RequestError(
            f"{file} holds what changed since version {base}, and the engine has version {policy_version}",
            fix="send all weights; a trainer that is started again (treadle run --resume) does",
        )


@functools.cache
def empty_model(folder: Path) -> Any:
    """The model as transformers builds it, with names and shapes but without weights (meta device)."""
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import, and rarely needed

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
