"""Encode plain values as JSON and back, between an answer and its tests; other objects become references."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

GONE = "the process of the answer ended"
_LONGEST_MESSAGE = 8 * 2**20
_ATOMS = (bool, int, float, str)
_GROUPS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Encoders and decoders of other values. Their modules are imported on demand, to keep the start fast.
_WRITTEN: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "builtins.bytes": (lambda kind, value: kind.hex(value), lambda kind, text: kind.fromhex(text)),
    "builtins.bytearray": (lambda kind, value: kind.hex(value), lambda kind, text: kind.fromhex(text)),
    "builtins.complex": (lambda kind, value: [value.real, value.imag], lambda kind, parts: kind(*parts)),
    "builtins.range": (lambda kind, value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    "decimal.Decimal": (lambda kind, value: kind.__str__(value), lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda kind, value: kind.__str__(value), lambda kind, text: kind(text)),
    "datetime.datetime": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.date": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.time": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.timedelta": (
        lambda kind, value: [value.days, value.seconds, value.microseconds],
        lambda kind, parts: kind(*parts),
    ),
}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Encode a value. Subclasses become their base type, so that only values are compared."""
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
    if isinstance(value, deque):
        return {"deque": [[encode(member, refer) for member in deque(value)], value.maxlen]}
    return _write(value) or {"reference": refer(value)}


def _write(value: Any) -> dict[str, Any] | None:
    for name, (write, _) in _WRITTEN.items():  # a datetime is a date as well, and comes first
        module, _, kind_name = name.partition(".")
        kind = getattr(
            sys.modules.get(module), kind_name, None
        )  # if the module is not imported, there is no such value
        if isinstance(kind, type) and isinstance(value, kind):
            return {name: write(kind, value)}
    return None


def decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _GROUPS:
        return _GROUPS[name](decode(member, resolve) for member in content)
    if name == "dict":
        return {decode(key, resolve): decode(held, resolve) for key, held in content}
    if name == "deque":
        members, longest = content
        return deque((decode(member, resolve) for member in members), longest)
    if name in _WRITTEN:
        module, _, kind_name = name.partition(".")
        return _WRITTEN[name][1](getattr(import_module(module), kind_name), content)
    return resolve(content)


def replace_content(old: Any, new: Any) -> None:
    """Apply to `old` the change that the other process made to its copy."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)


class JsonPipe:
    """Messages to and from another process, one JSON text per line."""

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
            raise EOFError(GONE) from None

    def receive(self) -> Any:
        """EOFError if the other process is gone or sends no valid message."""
        line = self._from.readline(_LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            self.is_closed = True
            raise EOFError("a value is too large" if line else GONE)
        return json.loads(line)
