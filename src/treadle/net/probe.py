"""Send small requests to a hub or an engine: no proxy is used, and nothing heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from treadle.net.address import connection_to, shown_url
from treadle.net.tokens import bearer_headers

TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ProbeAnswer:
    """`status` 0: no answer, and `trouble` says why."""

    status: int
    body: bytes = b""
    trouble: str = ""
    is_late: bool = False  # the connection was accepted, and no answer came in time

    @property
    def values(self) -> dict[str, Any]:
        """The JSON object in the body; {} for anything else."""
        return _json_object(self.body) or {}

    @property
    def summary(self) -> str:
        """Status and error message, cut to 200 characters."""
        message = self.values.get("detail") or self.values.get("error") or self.body.decode("utf-8", "replace")
        if isinstance(message, dict):  # OpenAI's format
            message = message.get("message") or message
        return f"{self.status}: {str(message)[:200]}" if message else str(self.status)


@dataclass(frozen=True)
class ServerProbe:
    """A server to ask. `token` is sent with every request, and is in no message."""

    kind: str  # "hub" or "engine"
    url: str
    token: str = ""
    token_variable: str = ""
    timeout_s: float = TIMEOUT_S

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> ProbeAnswer:
        """GET, or POST if there is a body."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return _request(self.url, urlsplit(self.url).path.rstrip("/") + path, timeout_s, body, self.token)

    @property
    def shown(self) -> str:
        return shown_url(self.url)


def answers_ok(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether GET `url` answers 200; False if the server cannot be reached."""
    return _get(url, timeout_s).status == 200


def get_json(url: str, *, token: str = "", timeout_s: float = 0.5) -> dict[str, Any] | None:
    """The JSON object that GET `url` answers; None without one."""
    answer = _get(url, timeout_s, token)
    return _json_object(answer.body) if answer.status == 200 else None


def get(url: str, *, timeout_s: float = 0.5) -> bytes | None:
    """The body of GET `url`, whatever its status; None if nothing answered."""
    answer = _get(url, timeout_s)
    return answer.body if answer.status else None


def _get(url: str, timeout_s: float, token: str = "") -> ProbeAnswer:
    return _request(url, urlsplit(url).path or "/", timeout_s, token=token)


def _request(
    url: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None, token: str = ""
) -> ProbeAnswer:
    try:
        connection = connection_to(url, timeout_s)
    except ValueError as error:
        return ProbeAnswer(0, trouble=str(error))
    headers = bearer_headers(token)
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return ProbeAnswer(answer.status, answer.read())
    except TimeoutError:
        return ProbeAnswer(0, trouble=f"no answer within {timeout_s:.0f} s", is_late=True)
    except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: http://a..b is not a host name
        return ProbeAnswer(0, trouble=str(error) or type(error).__name__)
    finally:
        connection.close()


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(body)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
