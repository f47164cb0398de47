"""The addresses of a run: taken before anything else is done, and handed to the servers that listen there.

A port that was only looked at can be another program's a moment later; the run would then talk to a stranger's engine.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from treadle.errors import PortInUse
from treadle.net.listening import take_port

ANY_FREE = 0
Listeners = Mapping[str, socket.socket]


@contextmanager
def held_ports(wished: Mapping[str, tuple[str, int]], explicit: frozenset[str] = frozenset()) -> Iterator[Listeners]:
    """A listening socket by name, for {"hub": ("127.0.0.1", 8000)}, until the block ends or it is handed over.

    A default port is a wish and gives way when it is busy; one that the user chose ("hub.port" in `explicit`) does not.
    """
    chosen = {name: address for name, address in wished.items() if f"{name}.port" in explicit}
    _refuse_one_for_two(chosen)
    in_order = {**chosen, **wished}  # the chosen ones first: a default gives way to them
    with ExitStack() as stack:
        taken = {
            name: stack.enter_context(_hold(name, host, port, is_chosen=name in chosen))
            for name, (host, port) in in_order.items()
        }
        yield {name: taken[name] for name in wished}


def _refuse_one_for_two(chosen: Mapping[str, tuple[str, int]]) -> None:
    """Refuse one port for two servers. Hosts are not compared: one host may have several names."""
    owners: dict[int, str] = {}
    for name, (_, port) in chosen.items():
        other = owners.setdefault(port, name)
        if other != name and port != ANY_FREE:
            raise PortInUse(
                f"--{other}.port and --{name}.port are both {port}: two servers cannot share a port",
                fix=f"choose another --{name}.port",
            )


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
