"""Handle URLs and addresses: show URLs without secrets, tell which are loopback, take a listening port.

The launcher imports this module: it must not import a web server.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from urllib.parse import urlsplit

from treadle.errors import ConfigError, PortInUse

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TOKEN_IN_URL = re.compile(r"/t/[^/]+/?$")


def shown_url(url: str) -> str:
    """Without the token that a URL may carry (http://HOST:PORT/t/TOKEN, http://USER:TOKEN@HOST): logs are passed on."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def shown_store(url: str) -> str:
    """`postgresql://hub:secret@db.example/run?sslmode=require` -> `postgresql://db.example/run`."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def without_token(url: str) -> str:
    """`http://HOST:PORT/t/TOKEN` -> `http://HOST:PORT`."""
    return _TOKEN_IN_URL.sub("", url)


def url_to(host: str, port: int) -> str:
    """Where to call a server that listens on `host`; one that listens on every address is called on loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine: a proxy meant for the internet must not swallow calls to it."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def is_loopback_host(host: str) -> bool:
    address = parse_address(host.strip("[]"))
    return host.lower() == "localhost" if address is None else is_loopback_address(address)


def is_loopback_address(address: Address) -> bool:
    return plain_address(address).is_loopback


def plain_address(address: Address) -> Address:
    """Without a zone, and ::ffff:10.0.0.5, which is how a dual-stack socket shows an IPv4 peer, as 10.0.0.5."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return address.ipv4_mapped or ipaddress.IPv6Address(int(address))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`; OSError if there is no way. Nothing is sent: connecting a UDP socket
    only chooses a route."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def parse_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


# ---- listening

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
