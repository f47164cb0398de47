"""Weights on one GPU that two processes see: the engine hands out where they lie, the trainer opens them in place.

    engine:  locate_parameters(named) -> Layout      JSON, no pickle
    trainer: open_storage(CudaStorage) -> its bytes  the same memory, nothing copied

The handles are CUDA's own (cudaIpcMemHandle), as torch makes them for its multiprocessing. They need both processes on
one card and in one PID namespace, and memory from cudaMalloc: not vLLM's sleep mode, not expandable segments.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from treadle.errors import SyncError
from treadle.sync.layout import CudaStorage, Layout, Placement
from treadle.sync.owner import this_process

BLOCKED = (
    "PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) without expandable_segments, at the engine and at the trainer"
)


def export_storage(tensor: Tensor) -> CudaStorage:
    """The storage of `tensor`; it must live as long as anybody uses it."""
    try:
        shared = tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise SyncError(f"CUDA does not share these weights: {error}", fix=BLOCKED) from None
    device, handle, num_bytes, offset, counter_handle, counter_offset, event_handle, needs_event = shared
    return CudaStorage(
        device_uuid=_uuid(device), handle=_text(handle), num_bytes=num_bytes, offset=offset,
        counter_handle=_text(counter_handle), counter_offset=counter_offset, event_handle=_text(event_handle),
        needs_event=needs_event,
    )  # fmt: skip


def locate_parameters(named: Mapping[str, Tensor], model: str, dtype: str) -> Layout:
    """Where parameters lie on their GPU, for another process to open; nothing moves."""
    storages = {p.untyped_storage().data_ptr(): p for p in named.values()}  # several may lie in one
    numbers = {address: number for number, address in enumerate(storages)}
    exported = tuple(export_storage(p) for p in storages.values())
    return Layout(
        path="",
        model=model,
        dtype=dtype,
        num_bytes=sum(storage.num_bytes for storage in exported),
        parameters=tuple(
            Placement(
                name=name,
                shape=tuple(p.shape),
                offset=int(p.storage_offset()) * p.element_size(),
                storage=numbers[p.untyped_storage().data_ptr()],
            )
            for name, p in named.items()
        ),
        storages=exported,
        owner=this_process(),
    )


def open_storage(storage: CudaStorage) -> Tensor:
    """Its bytes, in place."""
    device = find_device(storage.device_uuid)
    try:
        return rebuild_cuda_tensor(
            Tensor, (storage.num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, device.index,
            _raw(storage.handle), storage.num_bytes, storage.offset, False, _raw(storage.counter_handle),
            storage.counter_offset, _raw(storage.event_handle), storage.needs_event,
        )  # fmt: skip
    except RuntimeError as error:
        raise SyncError(
            f"cannot open the engine's weights on {device}: {error}",
            fix=f"engine and trainer must run in one container (one PID and IPC namespace), with {BLOCKED}",
        ) from None


def find_device(uuid: str) -> torch.device:
    """The engine's card, whatever number it has in this process."""
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid:
            return torch.device("cuda", index)
    raise SyncError(
        "the engine's weights are on a GPU that this process does not see",
        fix="single copy is for one card: the same CUDA_VISIBLE_DEVICES for both; or --use-shared-memory: two copies",
    )


def card_of(device: torch.device) -> str | None:
    """The same name for a card in every process; None: it is no GPU."""
    if device.type != "cuda":
        return None
    return _uuid(torch.cuda.current_device() if device.index is None else device.index)


def _uuid(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
