"""URLs: as they may be shown, and a plain connection to one."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit


def shown_url(url: str) -> str:
    """Without the token that a URL may carry (http://HOST:PORT/t/TOKEN, http://USER:TOKEN@HOST): logs are passed on."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def connection_to(url: str, timeout_s: float) -> HTTPConnection:
    """For small questions: no proxy is asked, nothing heavy is imported. ValueError for a port that is none."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
