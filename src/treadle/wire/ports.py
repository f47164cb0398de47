"""Listening: one way to take a port, with a clear sentence when it is taken."""

from __future__ import annotations

import errno
import socket

from treadle.errors import ConfigError, PortInUse


def take_port(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done: a second process ends having touched nothing."""
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
