"""Whether two processes of this machine can share weights, tried for real: `treadle doctor` runs this program twice.

    python -m treadle.sync.trial own FILE    offers a few weights as an engine does: in FILE, then on the GPU if any
    python -m treadle.sync.trial open        opens them as a trainer does, reads them, writes others

Whoever starts both carries their lines of JSON to and fro:

    own -> Sight, which GPUs torch sees
    own -> Offer -> open -> Trial -> own, which looks at its own weights and tells in another Trial what it sees
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
from treadle.sync.weights_file import map_weights, remove_shared_file, share_parameters

OWNERS, OPENERS = 1.0, 2.0  # what each of the two writes
NUM_WEIGHTS = 64


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """`driver_cuda`: the newest CUDA that the driver speaks. `trouble`: what torch said when it found no GPU."""

    built_for_cuda: str
    driver_cuda: str
    gpus: list[str]
    trouble: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it on one device; `error` is empty where the weights are shared."""

    device: str
    error: str = ""
    fix: str = ""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    layout: Layout


def look() -> Sight:
    with warnings.catch_warnings(record=True) as said:  # torch warns of a driver that is too old, and finds no GPU
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available()
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if is_usable else []
    return Sight(
        built_for_cuda=torch.version.cuda or "",
        driver_cuda=_driver_cuda(),
        gpus=gpus,
        trouble="" if is_usable else " ".join(str(warning.message) for warning in said),
    )


def _driver_cuda() -> str:
    """ "13.0"; "" without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return "" if status != 0 else f"{version.value // 1000}.{version.value % 1000 // 10}"


def own(file: Path, heard: IO[str], told: IO[str]) -> None:
    """One trial after the other; a device whose memory cannot be shared at all ends its own without an offer."""
    sight = look()
    _tell(told, sight)
    for device in ("cpu", "cuda") if sight.gpus else ("cpu",):
        try:
            model = nn.Linear(NUM_WEIGHTS, 1, bias=False, device=device)
            nn.init.constant_(model.weight, OWNERS)
            layout = share_parameters(model, file, model_folder="")
        except (TreadleError, RuntimeError, OSError) as error:
            _tell(told, _failed(device, error))
            continue
        _tell(told, Offer(device=device, layout=layout))
        trial = msgspec.json.decode(heard.readline(), type=Trial)
        if not trial.error and not bool((model.weight == OPENERS).all()):
            trial = Trial(device=device, error="what one process wrote, the other does not see")
        _tell(told, trial)
    remove_shared_file(file)


def open_all(heard: IO[str], told: IO[str]) -> None:
    for line in heard:
        offer = msgspec.json.decode(line, type=Offer)
        try:
            (weights,) = map_weights(offer.layout).values()
            is_seen = bool((weights == OWNERS).all())
            weights.fill_(OPENERS)
            if weights.is_cuda:
                torch.cuda.synchronize(weights.device)
        except (TreadleError, RuntimeError, OSError) as error:
            _tell(told, _failed(offer.device, error))
            continue
        wrong = "" if is_seen else "the memory was opened, but holds other numbers than its owner wrote"
        _tell(told, Trial(device=offer.device, error=wrong))


def _failed(device: str, error: Exception) -> Trial:
    if isinstance(error, TreadleError):
        return Trial(device=device, error=error.message, fix=error.fix)
    return Trial(device=device, error=str(error) or type(error).__name__)


def _tell(told: IO[str], message: msgspec.Struct) -> None:
    told.write(msgspec.json.encode(message).decode() + "\n")
    told.flush()


if __name__ == "__main__":
    if sys.argv[1] == "own":
        own(Path(sys.argv[2]), sys.stdin, sys.stdout)
    else:
        open_all(sys.stdin, sys.stdout)
