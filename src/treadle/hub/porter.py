"""A porter: a process that checks posted groups, so that the hub's own process never stops to read one.

It reads frames from a socket and answers each: `python -m treadle.hub.porter FD`. An empty frame says that it is there,
or that it has begun to read the next order; so the hub knows what it was at when it dies. A body that takes too much
CPU time ends the process with SIGPROF: nothing inside of it could stop a decoder that is written in C.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

from treadle.hub.door import Admitted, Order, admit
from treadle.hub.refusals import Refused
from treadle.wire.frames import LENGTH, read_exactly, read_length

EMPTY = LENGTH.pack(0)


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The groups, or why not."""

    admitted: Admitted | None = None
    status: int = 0
    detail: Any = None
    reason: str = ""
    env_id: int | None = None  # of the group that was refused, when it is an environment's


ORDERS = msgspec.msgpack.Decoder(Order)
VERDICTS = msgspec.msgpack.Decoder(Verdict)


def judge(body: bytes | bytearray, order: Order) -> Verdict:
    try:
        return Verdict(admitted=admit(body, order))
    except Refused as refused:
        return Verdict(status=refused.status, detail=refused.detail, reason=refused.reason, env_id=refused.env_id)
    except MemoryError:
        return Verdict(status=413, detail="the body takes more memory than there is", reason="too_large")
    except Exception:  # the boundary of the process: one body that was not foreseen must not end it
        traceback.print_exc()
        return Verdict(status=500, detail="internal error", reason="internal_error")


def main(fd: int) -> None:
    with socket.socket(fileno=fd) as line:
        line.sendall(EMPTY)
        with contextlib.suppress(EOFError):  # the hub is gone
            while True:
                order_bytes, body_bytes = read_length(line), read_length(line)
                order = ORDERS.decode(read_exactly(line, order_bytes))
                body = read_exactly(line, body_bytes)
                line.sendall(EMPTY)
                signal.setitimer(signal.ITIMER_PROF, order.max_cpu_s)
                verdict = msgspec.msgpack.encode(judge(body, order))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                line.sendall(LENGTH.pack(len(verdict)))
                line.sendall(verdict)


if __name__ == "__main__":
    main(int(sys.argv[1]))
