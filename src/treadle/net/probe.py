"""Send small requests without retries to a hub or an engine, for launcher, doctor and page. No proxy is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.net.access_tokens import bearer_headers
from treadle.net.address import shown_url
from treadle.net.client import OK, BlockingHttpClient, HttpAnswer, LateAnswer, NoAnswer


@dataclass(frozen=True)
class ProbeAnswer(HttpAnswer):
    """`status` 0: no answer, and `trouble` says why."""

    trouble: str = ""
    is_late: bool = False  # the connection was accepted, and no answer came in time

    @property
    def summary(self) -> str:
        """Status and error message, cut to 200 characters."""
        return f"{self.status}: {self.message[:200]}" if self.message else str(self.status)


@dataclass(frozen=True)
class ServerProbe:
    """A server to ask. `token` is sent with every request, and is in no message."""

    kind: str  # "hub" or "engine"
    url: str
    token: str = ""
    token_variable: str = ""
    timeout_s: float = 5.0

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> ProbeAnswer:
        """GET, or POST if there is a body."""
        return _request(self.url, path, self.timeout_s if timeout_s is None else timeout_s, body, self.token)

    @property
    def shown(self) -> str:
        return shown_url(self.url)


def answers_ok(url: str, *, timeout_s: float = 2.0) -> bool:
    """Whether GET `url` answers 200; False if the server cannot be reached."""
    return _request(url, "", timeout_s).status == OK


def get_json(url: str, *, token: str = "", timeout_s: float = 0.5) -> dict[str, Any] | None:
    """The JSON object that GET `url` answers; None without one."""
    answer = _request(url, "", timeout_s, token=token)
    return answer.values or None if answer.status == OK else None


def get(url: str, *, timeout_s: float = 0.5) -> bytes | None:
    """The body of GET `url`, whatever its status; None if nothing answered."""
    answer = _request(url, "", timeout_s)
    return answer.content if answer.status else None


def _request(
    url: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None, token: str = ""
) -> ProbeAnswer:
    """`path` "": the path of `url`."""
    headers = bearer_headers(token)
    if body is not None:
        headers["Content-Type"] = "application/json"
    content = None if body is None else json.dumps(body).encode()
    with BlockingHttpClient(url, headers=headers, timeout_s=timeout_s) as client:
        try:
            answer = client.request("GET" if body is None else "POST", path, body=content)
        except NoAnswer as error:
            return ProbeAnswer(0, b"", trouble=str(error), is_late=isinstance(error, LateAnswer))
    return ProbeAnswer(answer.status, answer.content, answer.headers)
