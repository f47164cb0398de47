"""Read what W&B wrote in offline mode: its file is LevelDB's log format, with one protocol buffer per record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _FIRST = 32768, 7, 7
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), _FIRST, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left  # the rest of a block that is too short for a header is padding
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""
