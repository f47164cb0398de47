"""vllm_bridge_config.json: where an engine's weights lie, for a trainer that is told so by a file.

The engine writes it when it shares its weights, and again after a restart; the trainer (--vllm-config-path) reads it.
It is a layout (layout.py) with strides and a checksum. Whole or not at all: it is put in place by a rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from treadle.errors import ConfigError, SyncError
from treadle.sync.layout import Layout

FILE_NAME = "vllm_bridge_config.json"
PATH_VARIABLE = "VLLM_BRIDGE_CONFIG_PATH"
FOLDER_VARIABLE = "LOGDIR"
SWITCH_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"  # share the weights, whatever the flags say
ASK = "leave --vllm-config-path out to ask the engine itself"


class BridgeFile(Layout, frozen=True, kw_only=True):
    """What is in the file."""

    strides: dict[str, tuple[int, ...]]  # in elements; by parameter
    checksum: str = ""  # SHA-256 of all the rest


def is_switched_on(env: Mapping[str, str]) -> bool:
    return env.get(SWITCH_VARIABLE) == "1"


def place_to_write(weights_file: Path, env: Mapping[str, str], here: Path) -> Path:
    """Where an engine writes it: as the environment says, else beside the weights. Into the working folder only for
    those who switched sharing on in Atropos' way; a run of ours leaves nothing there.

    >>> place_to_write(Path("/dev/shm/w"), {"LOGDIR": "logs"}, Path("/here")).as_posix()
    'logs/vllm_bridge_config.json'
    """
    named = _named_places(env)
    if named:
        return named[0]
    return here / FILE_NAME if is_switched_on(env) else beside(weights_file)


def beside(weights_file: Path) -> Path:
    return weights_file.with_name(weights_file.name + ".json")


def find_bridge_file(env: Mapping[str, str], here: Path) -> Path | None:
    """--vllm-config-path auto: the first there is of $VLLM_BRIDGE_CONFIG_PATH, $LOGDIR and the working folder."""
    places = [*_named_places(env), here / FILE_NAME]
    return next((place for place in places if place.is_file()), None)


def write_bridge_file(path: Path, layout: Layout) -> None:
    strides = {p.name: strides_of(p.shape) for p in layout.parameters}
    told = {name: getattr(layout, name) for name in layout.__struct_fields__}
    file = BridgeFile(**told, strides=strides)
    content = msgspec.json.encode(msgspec.structs.replace(file, checksum=_checksum(file)))
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(content)
    staging.replace(path)


def remove_bridge_file(path: Path, layout: Layout) -> None:
    """If it is still the one that was written for `layout`, and not another engine's by now."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if msgspec.json.decode(path.read_bytes(), type=BridgeFile).owner == layout.owner:
            path.unlink()


def read_bridge_file(path: Path) -> Layout:
    """What it says; one that is damaged, or of a process that has ended, is refused."""
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
        if file.strides.get(parameter.name) != strides_of(parameter.shape):
            raise SyncError(f"{path}: the engine keeps {parameter.name} in an order of its own", fix=ASK)
    return Layout(**{name: getattr(file, name) for name in Layout.__struct_fields__})


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of elements that lie row after row.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    strides: tuple[int, ...] = ()
    step = 1
    for size in reversed(shape):
        strides = (step, *strides)
        step *= size
    return strides


def _checksum(file: BridgeFile) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(file, checksum=""))).hexdigest()


def _named_places(env: Mapping[str, str]) -> list[Path]:
    places = [Path(env[PATH_VARIABLE])] if env.get(PATH_VARIABLE) else []
    return [*places, Path(env[FOLDER_VARIABLE]) / FILE_NAME] if env.get(FOLDER_VARIABLE) else places
