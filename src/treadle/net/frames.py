"""Frames on a socket between a process and its workers: eight bytes of length, then the content."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("<Q")


def read_length(line: socket.socket) -> int:
    (length,) = LENGTH.unpack(read_exactly(line, LENGTH.size))
    return int(length)


def read_exactly(line: socket.socket, num_bytes: int) -> bytearray:
    """Straight into the place where it is decoded: a body may have tens of megabytes. EOFError: the other side left."""
    content = bytearray(num_bytes)
    rest = memoryview(content)
    while rest:
        num_read = line.recv_into(rest)
        if num_read == 0:
            raise EOFError
        rest = rest[num_read:]
    return content
