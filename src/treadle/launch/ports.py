"""The addresses of a run: taken before anything else is done, and handed to the servers that listen there.

A port that was only looked at can be another program's a moment later; the run would then talk to a stranger's engine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from treadle.errors import PortInUse
from treadle.wire.listening import take_port

ANY_FREE = 0
Listeners = Mapping[str, socket.socket]


@contextmanager
def held_ports(wished: Mapping[str, tuple[str, int]], explicit: frozenset[str] = frozenset()) -> Iterator[Listeners]:
    """A listening socket by name, for {"hub": ("127.0.0.1", 8000)}, until the block ends or it is handed over.

    A default port is a wish and gives way when it is busy; one that the user chose ("hub.port" in `explicit`) does not.
    """
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(_hold(name, host, port, is_chosen=f"{name}.port" in explicit))
            for name, (host, port) in wished.items()
        }


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _hold(name: str, host: str, port: int, *, is_chosen: bool) -> socket.socket:
    try:
        return take_port(host, port)
    except PortInUse:
        if is_chosen:
            message = f"port {port}, asked for by --{name}.port, is in use"
            raise PortInUse(message, fix=f"choose another --{name}.port") from None
        return take_port(host, ANY_FREE)
