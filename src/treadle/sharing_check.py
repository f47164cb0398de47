"""Check with two processes that this machine can share weights. `treadle doctor` starts this program twice.

    python -m treadle.sharing_check own FILE    shares a few weights as an engine does: in FILE, then on a GPU if any
    python -m treadle.sharing_check open        opens them as a trainer does, reads them, writes new values

The doctor passes their lines of JSON between them:

    own -> TorchInfo
    own -> SharingOffer -> open -> SharingReply -> own, which checks its weights and prints the final SharingReply
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import nn

from treadle.errors import TreadleError
from treadle.sync.layout import Layout
from treadle.sync.shared_memory import map_weights, remove_shared_file, share_parameters

OWNER_VALUE, OPENER_VALUE = 1.0, 2.0
NUM_WEIGHTS = 64


class TorchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`driver_cuda`: the newest CUDA of the driver. `trouble`: torch's warnings if it found no GPU."""

    built_for_cuda: str
    driver_cuda: str
    gpus: list[str]
    trouble: str = ""


class SharingReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result on one device; `error` is empty if sharing works."""

    device: str
    error: str = ""
    fix: str = ""


class SharingOffer(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    layout: Layout


def collect_torch_info() -> TorchInfo:
    with warnings.catch_warnings(record=True) as caught:  # torch warns about a driver that is too old
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available()
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if is_usable else []
    return TorchInfo(
        built_for_cuda=torch.version.cuda or "",
        driver_cuda=_driver_cuda(),
        gpus=gpus,
        trouble="" if is_usable else " ".join(str(warning.message) for warning in caught),
    )


def _driver_cuda() -> str:
    """For example "13.0"; "" without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return "" if status != 0 else f"{version.value // 1000}.{version.value % 1000 // 10}"


def own(file: Path, source: IO[str], sink: IO[str]) -> None:
    """Check one device after the other; a device that cannot share memory is reported without an offer."""
    info = collect_torch_info()
    _send(sink, info)
    for device in ("cpu", "cuda") if info.gpus else ("cpu",):
        try:
            model = nn.Linear(NUM_WEIGHTS, 1, bias=False, device=device)
            nn.init.constant_(model.weight, OWNER_VALUE)
            layout = share_parameters(model, file, model_folder="")
        except (TreadleError, RuntimeError, OSError) as error:
            _send(sink, _failed(device, error))
            continue
        _send(sink, SharingOffer(device=device, layout=layout))
        result = msgspec.json.decode(source.readline(), type=SharingReply)
        if not result.error and not bool((model.weight == OPENER_VALUE).all()):
            result = SharingReply(device=device, error="what one process wrote, the other does not see")
        _send(sink, result)
    remove_shared_file(file)


def open_all(source: IO[str], sink: IO[str]) -> None:
    for line in source:
        offer = msgspec.json.decode(line, type=SharingOffer)
        try:
            (weights,) = map_weights(offer.layout).values()
            is_seen = bool((weights == OWNER_VALUE).all())
            weights.fill_(OPENER_VALUE)
            if weights.is_cuda:
                torch.cuda.synchronize(weights.device)
        except (TreadleError, RuntimeError, OSError) as error:
            _send(sink, _failed(offer.device, error))
            continue
        wrong = "" if is_seen else "the memory was opened, but holds other numbers than its owner wrote"
        _send(sink, SharingReply(device=offer.device, error=wrong))


def _failed(device: str, error: Exception) -> SharingReply:
    if isinstance(error, TreadleError):
        return SharingReply(device=device, error=error.message, fix=error.fix)
    return SharingReply(device=device, error=str(error) or type(error).__name__)


def _send(sink: IO[str], message: msgspec.Struct) -> None:
    sink.write(msgspec.json.encode(message).decode() + "\n")
    sink.flush()


if __name__ == "__main__":
    if sys.argv[1] == "own":
        own(Path(sys.argv[2]), sys.stdin, sys.stdout)
    else:
        open_all(sys.stdin, sys.stdout)
