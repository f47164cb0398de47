"""Plain values as JSON and back, between an answer and its tests. What is not plain stays where it is: a reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

_LONGEST_MESSAGE = 8 * 2**20
_ATOMS = (bool, int, float, str)
_GROUPS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Subclasses become what they derive from: whoever compares a value compares nothing but the value."""
    if value is None:
        return None
    for atom in _ATOMS:
        if isinstance(value, atom):
            return atom(value)
    for name, group in _GROUPS.items():
        if isinstance(value, group):
            return {name: [encode(member, refer) for member in group(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(held, refer)] for key, held in dict(value).items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    return {"complex": [value.real, value.imag]} if isinstance(value, complex) else {"reference": refer(value)}


def decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _GROUPS:
        return _GROUPS[name](decode(member, resolve) for member in content)
    if name == "dict":
        return {decode(key, resolve): decode(held, resolve) for key, held in content}
    if name == "complex":
        return complex(*content)
    if name in ("bytes", "bytearray"):
        return (bytearray if name == "bytearray" else bytes).fromhex(content)
    return resolve(content)


class Line:
    """Messages to and from another process, one JSON text a line."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._from: BinaryIO = os.fdopen(read_fd, "rb")
        self._write_fd = write_fd
        self.is_closed = False  # by the other process

    def send(self, message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._write_fd, rest) :]
        except BrokenPipeError:
            self.is_closed = True
            raise EOFError("the process of the answer ended") from None

    def receive(self) -> Any:
        """EOFError when the other process is gone, or sends what is no message."""
        line = self._from.readline(_LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            self.is_closed = True
            raise EOFError("the process of the answer ended" if not line else "a value is too large")
        return json.loads(line)
