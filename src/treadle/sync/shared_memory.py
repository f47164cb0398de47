"""Share weights between engine and trainer: in a file that both map, or in the memory of one GPU.

engine:  share_parameters(model, file)   moves its parameters into the file, or exports their GPU memory
trainer: bind_parameters(model, layout)  builds its model on the same bytes

GPU memory is shared by CUDA IPC handles (cudaIpcMemHandle), made by torch as for its multiprocessing and sent as JSON,
not as pickles. Both processes must be on one GPU and in one PID namespace, and the memory must come from cudaMalloc:
vLLM's sleep mode and expandable segments do not work.

The engine also writes the layout with strides and a checksum to vllm_bridge_config.json, when it shares its weights and
after a restart; a trainer with --vllm-config-path reads it. The file is replaced atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from treadle.errors import ConfigError, DiskFull, SyncError
from treadle.log import get_logger
from treadle.sync.gate import PublishGate, gate_beside, this_process
from treadle.sync.layout import CudaStorage, Layout, Placement, plan_layout

FILE_NAME = "vllm_bridge_config.json"
PATH_VARIABLE = "VLLM_BRIDGE_CONFIG_PATH"
FOLDER_VARIABLE = "LOGDIR"
SWITCH_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"  # "1" shares the weights regardless of flags
ASK = "leave --vllm-config-path out to ask the engine itself"
BLOCKED = (
    "PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) without expandable_segments, at the engine and at the trainer"
)
log = get_logger("sync")

# ---- sharing and binding parameters


def share_parameters(model: nn.Module, path: Path, model_folder: str) -> Layout:
    """Give a trainer access to every parameter of `model`.

    Parameters in main memory move into a new shared file at `path`; those on a GPU do not move. The gate at which the
    engine pauses is created beside the file.
    """
    named = dict(model.named_parameters())  # a tied parameter appears once
    dtypes = {str(p.dtype).removeprefix("torch.") for p in named.values()}
    if len(dtypes) != 1:
        raise SyncError(f"shared weights have one number format, this model has {sorted(dtypes)}")
    if all(p.is_cuda for p in named.values()):
        layout = locate_parameters({n: p.data for n, p in named.items()}, model_folder, dtypes.pop())
    else:
        shapes = ((n, tuple(p.shape)) for n, p in named.items())
        layout = plan_layout(str(path.resolve()), model_folder, dtypes.pop(), shapes)
        layout = msgspec.structs.replace(layout, owner=this_process())
        _create(path, layout.num_bytes)
        views = map_weights(layout)
        for name, parameter in named.items():
            views[name].copy_(parameter.data)
            parameter.data = views[name]
    gate = gate_beside(path.resolve())
    PublishGate.create(gate)
    layout = msgspec.structs.replace(layout, gate=str(gate))
    log.info("weights_shared", path=layout.path, megabytes=layout.num_bytes >> 20, parameters=len(named))
    return layout


def bind_parameters(model: nn.Module, layout: Layout) -> None:
    """Put the parameters of `model` (built without weights) onto the bytes of `layout`; names and shapes must match."""
    views = map_weights(layout)
    missing = []
    for name, parameter in list(model.named_parameters()):
        view = views.pop(name, None)
        if view is None or view.shape != parameter.shape:
            missing.append(name)
            continue
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(view))
    if missing or views:
        raise SyncError(
            f"the engine's weights do not fit this model: not found {missing[:3]}, unused {list(views)[:3]}",
            fix="give engine and trainer the same model",
        )
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the weights file of an engine: two engines would overwrite each other's weights. The
    lock ends with its process; files of a killed engine are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    claim = path.with_name(path.name + ".claim")
    with _locked(claim, path):
        try:
            yield
        finally:
            remove_shared_file(path)
            claim.unlink(missing_ok=True)


def _locked(claim: Path, path: Path) -> IO[str]:
    while True:
        file = claim.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SyncError(
                f"another engine shares its weights through {path}", fix="give each engine a --weights-file of its own"
            ) from None
        if claim.exists() and claim.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # its owner ended in between and removed it


def remove_shared_file(path: Path) -> None:
    """Remove the file and its gate."""
    for file in (path, gate_beside(path)):
        with contextlib.suppress(FileNotFoundError):
            file.unlink()


def map_weights(layout: Layout) -> dict[str, torch.Tensor]:
    """The shared parameters, by name, in place."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if layout.storages:
        wholes = [open_storage(storage) for storage in layout.storages]
    else:
        try:
            wholes = [torch.from_file(layout.path, shared=True, size=layout.num_bytes, dtype=torch.uint8)]
        except RuntimeError as error:
            raise SyncError(
                f"cannot map the shared weights {layout.path}: {error}", fix="engine and trainer must be on one machine"
            ) from None
    return {
        p.name: wholes[p.storage][p.offset : p.offset + math.prod(p.shape) * dtype.itemsize].view(dtype).view(p.shape)
        for p in layout.parameters
    }


def _create(path: Path, num_bytes: int) -> None:
    """Create a file of full size. Space is checked first: a write to a full memory disk is a bus error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_shared_file(path)
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes:
        raise DiskFull(
            f"{path.parent} has {free >> 20} MB free, the shared weights need {num_bytes >> 20} MB",
            fix="free some space there, or name another place with --weights-file",
        )
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(handle, num_bytes)
    finally:
        os.close(handle)


# ---- memory of one GPU
def export_storage(tensor: Tensor) -> CudaStorage:
    """Export the storage of `tensor`, which must stay alive while it is used."""
    try:
        shared = tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise SyncError(f"CUDA does not share these weights: {error}", fix=BLOCKED) from None
    device, handle, num_bytes, offset, counter_handle, counter_offset, event_handle, needs_event = shared
    return CudaStorage(
        device_uuid=_uuid(device), handle=handle, num_bytes=num_bytes, offset=offset,
        counter_handle=counter_handle, counter_offset=counter_offset, event_handle=event_handle,
        needs_event=needs_event,
    )  # fmt: skip


def locate_parameters(named: Mapping[str, Tensor], model: str, dtype: str) -> Layout:
    """Where parameters are on their GPU, for another process to open; nothing moves."""
    storages = {p.untyped_storage().data_ptr(): p for p in named.values()}  # parameters may share one
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
    """The bytes of the storage, without a copy."""
    device = find_device(storage.device_uuid)
    try:
        return rebuild_cuda_tensor(
            Tensor, (storage.num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, device.index,
            storage.handle, storage.num_bytes, storage.offset, False, storage.counter_handle,
            storage.counter_offset, storage.event_handle, storage.needs_event,
        )  # fmt: skip
    except RuntimeError as error:
        raise SyncError(
            f"cannot open the engine's weights on {device}: {error}",
            fix=f"engine and trainer must run in one container (one PID and IPC namespace), with {BLOCKED}",
        ) from None


def find_device(uuid: str) -> torch.device:
    """The device with this UUID; its index differs between processes."""
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid:
            return torch.device("cuda", index)
    raise SyncError(
        "the engine's weights are on a GPU that this process does not see",
        fix="single copy is for one card: the same CUDA_VISIBLE_DEVICES for both; or --use-shared-memory: two copies",
    )


def gpu_uuid(device: torch.device) -> str | None:
    """The same for a GPU in every process; None for other devices."""
    if device.type != "cuda":
        return None
    return _uuid(torch.cuda.current_device() if device.index is None else device.index)


def _uuid(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid)


# ---- vllm_bridge_config.json
class BridgeFile(Layout, frozen=True, kw_only=True):
    """The content of the file."""

    strides: dict[str, tuple[int, ...]]  # in elements, by parameter
    checksum: str = ""  # SHA-256 of all other fields


def is_switched_on(env: Mapping[str, str]) -> bool:
    return env.get(SWITCH_VARIABLE) == "1"


def bridge_file_path(weights_file: Path, env: Mapping[str, str], here: Path) -> Path:
    """Where an engine writes the file: as the environment says, else beside the weights. The working folder `here` is
    used only if sharing was switched on by the variable, as Atropos does.

    >>> bridge_file_path(Path("/dev/shm/w"), {"LOGDIR": "logs"}, Path("/here")).as_posix()
    'logs/vllm_bridge_config.json'
    """
    named = _paths_from(env)
    if named:
        return named[0]
    return here / FILE_NAME if is_switched_on(env) else weights_file.with_name(weights_file.name + ".json")


def find_bridge_file(env: Mapping[str, str], here: Path) -> Path | None:
    """For --vllm-config-path auto: the first existing of $VLLM_BRIDGE_CONFIG_PATH, $LOGDIR and the working folder."""
    paths = [*_paths_from(env), here / FILE_NAME]
    return next((path for path in paths if path.is_file()), None)


def write_bridge_file(path: Path, layout: Layout) -> None:
    strides = {p.name: torch.empty(p.shape, device="meta").stride() for p in layout.parameters}
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__}
    file = BridgeFile(**fields, strides=strides)
    content = msgspec.json.encode(msgspec.structs.replace(file, checksum=_checksum(file)))
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)
    staging.replace(path)


def remove_bridge_file(path: Path, layout: Layout) -> None:
    """Remove the file if it was written for `layout`, and not replaced by another engine."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if msgspec.json.decode(path.read_bytes(), type=BridgeFile).owner == layout.owner:
            path.unlink()


def read_bridge_file(path: Path) -> Layout:
    """Read and validate the file; a damaged file, or one of a process that has ended, raises."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=BridgeFile)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", fix=f"correct --vllm-config-path, or {ASK}"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not say where weights lie: {error}", fix=ASK) from None
    if file.checksum != _checksum(file):
        raise ConfigError(f"{path} was changed after it was written: its checksum is another", fix=ASK)
    if file.owner is not None and not file.owner.is_alive:
        raise SyncError(
            f"{path} was left by process {file.owner.pid}, which has ended: nobody serves the weights it names",
            fix=f"delete the file, and start the engine again or {ASK}",
        )
    for parameter in file.parameters:
        if file.strides.get(parameter.name) != torch.empty(parameter.shape, device="meta").stride():
            raise SyncError(f"{path}: the engine keeps {parameter.name} in an order of its own", fix=ASK)
    return Layout(**{name: getattr(file, name) for name in Layout.__struct_fields__})


def _checksum(file: BridgeFile) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(file, checksum=""))).hexdigest()


def _paths_from(env: Mapping[str, str]) -> list[Path]:
    paths = [Path(env[PATH_VARIABLE])] if env.get(PATH_VARIABLE) else []
    return [*paths, Path(env[FOLDER_VARIABLE]) / FILE_NAME] if env.get(FOLDER_VARIABLE) else paths
