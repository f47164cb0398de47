"""Handle URLs and addresses: show them without secrets, connect to them, tell which are loopback."""

from __future__ import annotations

import ipaddress
import re
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_TOKEN_IN_URL = re.compile(r"/t/[^/]+/?$")


def shown_url(url: str) -> str:
    """Without the token that a URL may carry (http://HOST:PORT/t/TOKEN, http://USER:TOKEN@HOST): logs are passed on."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def without_token(url: str) -> str:
    """`http://HOST:PORT/t/TOKEN` -> `http://HOST:PORT`."""
    return _TOKEN_IN_URL.sub("", url)


def url_to(host: str, port: int) -> str:
    """Where to call a server that listens on `host`; one that listens on every address is called on loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def connection_to(url: str, timeout_s: float) -> HTTPConnection:
    """For small questions: no proxy is asked, nothing heavy is imported. ValueError for a port that is none."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


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


def parse_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
