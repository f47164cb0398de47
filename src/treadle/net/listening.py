"""Take a listening port, or one that the launcher or systemd hands over. The launcher uses it: no web server here."""

from __future__ import annotations

import errno
import os
import socket

from treadle.errors import ConfigError, PortInUse
from treadle.net.urls import is_loopback_host

# Our launcher names the descriptor of the socket that it holds for a child.
HANDED_FD = "TREADLE_LISTEN_FD"
_FIRST_FD_OF_SYSTEMD = 3


def take_port(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done: a second process ends having touched nothing.

    The launcher may hand one over, or a service manager (LISTEN_FDS, as systemd does). There it stays open while this
    process restarts: clients which give up quickly, as Atropos' environments do, wait in line and notice nothing.
    """
    handed = os.environ.pop(HANDED_FD, None)
    if handed is not None:
        os.set_inheritable(int(handed), False)  # our children listen elsewhere
        return socket.socket(fileno=int(handed))
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        listener = socket.socket(fileno=_FIRST_FD_OF_SYSTEMD)
        _refuse_wider(listener, host)
        return listener
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once; without it each waits 40 ms (Nagle).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            fix = "stop the program that listens there, or choose another port with --port"
            raise PortInUse(f"port {port} on {host} is in use", fix=fix) from None
        fix = "choose another with --host or --port; ports below 1024 need privileges"
        raise ConfigError(f"cannot listen on {host} port {port}", fix=fix) from error
    return listener


def _refuse_wider(listener: socket.socket, host: str) -> None:
    """Refuse a socket that other machines can reach when `host` is loopback: no token was required then."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or not is_loopback_host(host):
        return
    address = listener.getsockname()[0]
    if not is_loopback_host(address):
        raise ConfigError(
            f"the socket that was handed over listens on {address}, and --host says {host}",
            fix=f"add --host {address} and --token-file FILE, or let the service manager listen on {host}",
        )
