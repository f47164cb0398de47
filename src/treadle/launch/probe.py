"""Small questions to our own servers on loopback: no proxy is ever asked, and nothing heavy is imported."""

from __future__ import annotations

import json
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from treadle.net.urls import connection_to


def answers_ok(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether GET `url` answers 200; a server that cannot be reached does not."""
    return _get(url, timeout_s)[0] == 200


def get_json(url: str, *, timeout_s: float = 0.5) -> dict[str, Any] | None:
    """The object that GET `url` answers; None when there is none to be had now."""
    status, body = _get(url, timeout_s)
    if status != 200:
        return None
    try:
        values = json.loads(body)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def get(url: str, *, timeout_s: float = 0.5) -> bytes | None:
    """What GET `url` answers, be it a refusal; None: nothing answered."""
    status, body = _get(url, timeout_s)
    return body if status else None


def _get(url: str, timeout_s: float) -> tuple[int, bytes]:
    connection = connection_to(url, timeout_s)
    try:
        connection.request("GET", urlsplit(url).path or "/")
        response: HTTPResponse = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()
