"""How much one client may ask of a server of ours, and how many may ask at once."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from treadle.log import get_logger

RESERVED_FILES = 128  # for connections that are being refused, and for what the process opens later
FEWEST_CONNECTIONS = 8
ENOUGH = 0.9  # of the connections that a server wants: with fewer it logs a warning

log = get_logger("http")


@dataclass(frozen=True)
class HttpLimits:
    """`HttpLimits(max_connections=200)`. The defaults suit every client that we know of."""

    max_connections: int = 1000  # one more is answered 503 with Retry-After
    read_timeout_s: float = 30.0  # from the first byte of a request to the end of its headers
    min_body_bytes_per_s: int = 16 * 1024  # over every read_timeout_s of a body; a slower one is answered 408
    max_body_bytes_in_flight: int = 2**30  # of all requests that are not answered yet; more is answered 503
    idle_s: float = 75.0  # between two requests of a connection that is kept
    write_timeout_s: float = 60.0  # a client that takes nothing of its answer for so long is cut off
    max_head_bytes: int = 16 * 1024  # request line and headers together
    max_headers: int = 100
    max_pipelined: int = 32  # requests sent ahead, without waiting for answers
    linger_s: float = 1.0  # after a refusal we go on reading, or the client would lose the answer to a reset
    max_parting: int = 64  # connections that linger at once; more are closed at once
    sweep_s: float = 0.5  # how often the time limits are looked at


def connections_that_fit(wanted: int) -> int:
    """How many connections the limit on open files leaves room for. Raises the limit when that is allowed."""
    in_use = _open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + in_use + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    room = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - in_use - RESERVED_FILES)
    room = max(room, FEWEST_CONNECTIONS)
    if room < ENOUGH * wanted:
        log.warning(
            "fewer_connections", wanted=wanted, room=room, fix=f"raise the limit on open files: ulimit -n {needed}"
        )
    return room


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64
