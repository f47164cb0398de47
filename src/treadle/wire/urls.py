"""URLs, as they may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit


def shown_url(url: str) -> str:
    """Without the token that a URL may carry (http://HOST:PORT/t/TOKEN, http://USER:TOKEN@HOST): logs are passed on."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
