"""Write folders of models and adapters atomically, with everything needed to load them elsewhere.

.step_25.partial/   being written, or half deleted       .step_25.old/   being replaced
step_25/            complete: every file synced, then the folder renamed, then its parent synced
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treadle.errors import DiskFull

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_OS_ERROR_FULL = re.compile(rf"\(os error ({errno.ENOSPC}|{errno.EDQUOT})\)")
SMALL_BYTES = 1 << 20
SHARD_BYTES = 128 << 20  # a file is copied in memory while it is written, so state is written in shards
SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip

# ---- atomic folders


def write_folder(root: Path, name: str, fill: Callable[[Path], None], *, is_durable: bool = True) -> Path:
    """Let `fill` write the files of a folder, then rename it to `root/name`, replacing an existing one.
    `is_durable`: it survives a power failure. It survives the end of this process in any case.

    If `fill` fails, its files are removed and nothing has changed; a full disk raises DiskFull.
    """
    staging, target, old = staging_folder(root, name), root / name, root / f".{name}.old"
    shutil.rmtree(staging, ignore_errors=True)
    with detect_full_disk(target):
        try:
            staging.mkdir()
            fill(staging)
            if is_durable:
                for file in staging.iterdir():
                    _sync(file)
                _sync(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        staging.rename(target)
        if is_durable:
            _sync(root)
    shutil.rmtree(old, ignore_errors=True)
    return target


def staging_folder(root: Path, name: str) -> Path:
    """Where the files of `root/name` are written before the rename."""
    return root / f".{name}.partial"


def remove_folder(folder: Path) -> None:
    """Delete a folder so that it is never seen half deleted."""
    doomed = staging_folder(folder.parent, folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> None:
    """Clean up after a killed process: delete partial folders; restore a replaced one if its replacement is missing."""
    for half in root.glob(".*.partial"):
        shutil.rmtree(half)
    for old in root.glob(".*.old"):
        target = root / old.name.removeprefix(".").removesuffix(".old")
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    found = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(found | _small_on_host(found), file, metadata={"format": "pt", **(metadata or {})})


def stream_tensors(tensors: Iterable[tuple[str, Tensor]], like: Mapping[str, Tensor], file: Path) -> None:
    """Write the tensors that `like` describes as they come, in any order: they need not exist at the same time. The
    order in the file is that of safetensors' own writer, in which all are aligned."""
    names = sorted(like, key=lambda name: (-like[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        starts[name], end = end, end + like[name].numel() * like[name].dtype.itemsize
        kind, shape = SAFETENSORS_NAMES[like[name].dtype], list(like[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for some in shards((name, tensor.detach().contiguous()) for name, tensor in tensors):
            for name, tensor in (some | _small_on_host(some)).items():
                if (tensor.shape, tensor.dtype) != (like[name].shape, like[name].dtype):
                    raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, not as described")
                stream.seek(8 + len(text) + starts.pop(name))
                stream.write(tensor.view(-1).view(torch.uint8).cpu().numpy().data)
    if starts:
        raise ValueError(f"{min(starts)} was described and not written")


def _small_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Small ones are copied to the host together: with other users of the GPU, one wait is cheaper than many."""
    return host_copies({name: t for name, t in tensors.items() if t.is_cuda and t.nbytes <= SMALL_BYTES})


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of one device and dtype to the host together.
    >>> host_copies({"a": torch.ones(2, 2), "b": torch.zeros(3)})["a"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    found: dict[str, Tensor] = {}
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors.values()}:
        same = {name: tensor for name, tensor in tensors.items() if (tensor.device, tensor.dtype) == kind}
        together = torch.cat([tensor.view(-1) for tensor in same.values()]).cpu()
        parts = together.split([tensor.numel() for tensor in same.values()])
        found |= {name: part.view(same[name].shape) for name, part in zip(same, parts, strict=True)}
    return found


def shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, in dicts of about SHARD_BYTES."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read when it is used: no rank needs memory for all of them."""

    def __init__(self, state_files: Iterable[Path], weights_file: Path, live: Collection[str]) -> None:
        """`live`: names of the weights that are trained, which are found as `live.<name>`."""
        self._places: dict[str, tuple[Any, str]] = {}
        for file in state_files:
            opened = safe_open(file, framework="pt")
            self._places |= {key: (opened, key) for key in opened.keys()}  # noqa: SIM118
        opened = safe_open(weights_file, framework="pt")
        self._places |= {f"live.{key}": (opened, key) for key in opened.keys() if key in live}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        opened, key = self._places[name]
        tensor: Tensor = opened.get_tensor(key)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        opened, key = self._places[name]
        return tuple(opened.get_slice(key).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def shape_in(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return tensors.shape(name) if isinstance(tensors, SavedTensors) else tuple(tensors[name].shape)


def sync_and_hash(path: Path) -> str:
    """Make a written file durable; returns its sha256."""
    _sync(path)
    return sha256(path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def detect_full_disk(folder: Path) -> Iterator[None]:
    """Turn the errors of a full disk or quota into DiskFull."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the operating system's errors: "... No space left on device (os error 28)"
        is_full = error.errno in FULL_DISK if isinstance(error, OSError) else _OS_ERROR_FULL.search(str(error))
        if not is_full:
            raise
        raise DiskFull(
            f"the disk is full while writing {folder}; the checkpoint before it is kept",
            fix="free some space and continue with treadle run --resume",
        ) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- models and adapters


@dataclass(frozen=True)
class FolderKind:
    """File names of a full model or of an adapter."""

    prefix: str
    final: str
    weights: str
    copied: tuple[str, ...]  # from the folder of the starting model


FULL = FolderKind("step_", "final_model", "model.safetensors", MODEL_FILES + TOKENIZER_FILES)
# PEFT finds the model by adapter_config.json; with a config.json the folder would look like a full model.
ADAPTER = FolderKind("adapter_step_", "final_adapter", "adapter_model.safetensors", TOKENIZER_FILES)


def write_model(folder: Path, weights: Iterable[tuple[str, Tensor]], like: Mapping[str, Tensor], base: Path) -> None:
    """`weights` are written one after the other; `like` has their shapes and formats. `base`: the folder of the
    starting model."""
    stream_tensors(weights, like, folder / FULL.weights)
    _copy(FULL, base, folder)


def write_adapter(folder: Path, adapter: Any, live: Mapping[str, Tensor], base: Path | None = None) -> None:
    """`adapter`: PEFT's model. `live`: its trained parameters by PEFT's names. `base`: its tokenizer is copied; not
    needed by an engine, which has it."""
    write_tensors(live, folder / ADAPTER.weights)
    config = copy.copy(adapter.active_peft_config)
    config.inference_mode = True  # PEFT's default for loading
    config.save_pretrained(folder)
    if base is not None:
        _copy(ADAPTER, base, folder)


def _copy(kind: FolderKind, base: Path, folder: Path) -> None:
    for name in kind.copied:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
