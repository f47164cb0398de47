"""HTTP client of environments: a connection pool to one server, with retries while it is unreachable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from treadle.background import awake_s
from treadle.errors import ConfigError, DiskFull, TreadleError
from treadle.log import get_logger
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import HttpAnswer, HttpClient, NoAnswer, PooledHttpClient
from treadle.net.tokens import bearer_headers
from treadle.watch.waits import Waits, WaitSpec

log = get_logger("env")
T = TypeVar("T")

_LONGEST_RETRY_AFTER_S = 60.0
_TOO_MANY_REQUESTS = 429
_DISK_FULL = 507  # repeating does not help


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff until `give_up_after_s` (None: forever)."""

    give_up_after_s: float | None
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0

    def pause_s(self, num_failures: int) -> float:
        return min(self.first_pause_s * 2.0 ** min(num_failures - 1, 30), self.longest_pause_s)

    def is_over(self, seconds: float) -> bool:
        return self.give_up_after_s is not None and seconds > self.give_up_after_s


@dataclass(frozen=True)
class PeerResponse:
    """The response to a call, with the call's method and path."""

    method: str
    path: str
    http: HttpAnswer


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class _Failure:
    """A failed call that can be retried."""

    problem: str
    wait_s: float = 0.0  # from the Retry-After header
    is_answer: bool = False  # the server answered with an error


class Peer:
    """One server: `Peer("hub", "http://127.0.0.1:8000", error=HubError, timeout_s=30)`.

    Connection errors, 5xx and 429 are retried with a `RetryPolicy`; all other responses go to the caller.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        error: type[TreadleError],
        away: type[TreadleError] | None = None,
        timeout_s: float,
        api_key: str = "",
        transport: HttpClient | None = None,
        waits: Waits | None = None,
        how_to_start: str = "",
    ) -> None:
        self.name = name
        self.url = _checked_url(name, base_url)
        self._error = error
        self._away = away or error  # raised when the retries are used up
        self._waits = waits or Waits()
        self._wanted = WaitSpec(
            f"the {name} at {shown_url(self.url)}", fix=how_to_start or f"see whether the {name} runs", of=name
        )
        self._headers = bearer_headers(api_key)
        self._client: HttpClient = transport or PooledHttpClient(
            self.url,
            timeout_s=timeout_s,
            connect_timeout_s=min(timeout_s, 10.0),
            trust_env=not is_loopback(self.url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(
        self,
        method: str,
        path: str,
        *,
        retry_policy: RetryPolicy,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> PeerResponse:
        """Retry until the response is not 5xx or 429; raises the peer's error when the retries are used up."""
        content_type = {"Content-Type": "application/json"} if body is not None else {}
        call = _Call(method, path, body, {**self._headers, **content_type, **(headers or {})})
        outcome = await self._try(call)
        if isinstance(outcome, PeerResponse):
            return outcome
        with self._waits.waiting(self._wanted) as wait:
            began, num_failures = awake_s(), 0
            while isinstance(outcome, _Failure):
                num_failures += 1
                pause_s = max(retry_policy.pause_s(num_failures), outcome.wait_s)
                if retry_policy.is_over(awake_s() + pause_s - began):
                    raise self._away(
                        f"{method} {path} at the {self.name} ({shown_url(self.url)}) failed {num_failures} times: "
                        f"{outcome.problem}",
                        fix=f"see whether the {self.name} runs and listens at {shown_url(self.url)}",
                    )
                log.debug("call_failed", peer=self.name, path=path, problem=outcome.problem, again_in_s=pause_s)
                wait.problem = outcome.problem
                wait.fix = f"the log of the {self.name} says more" if outcome.is_answer else self._wanted.fix
                await asyncio.sleep(pause_s)
                outcome = await self._try(call)
        return outcome

    async def _try(self, call: _Call) -> PeerResponse | _Failure:
        try:
            http = await self._client.request(call.method, call.path, body=call.body, headers=call.headers)
        except NoAnswer as error:
            return _Failure(str(error))
        if http.status < 500 and http.status != _TOO_MANY_REQUESTS:
            return PeerResponse(call.method, call.path, http)
        if http.status == _DISK_FULL:
            raise DiskFull(f"the disk of the {self.name} is full", fix="free some space and continue with --resume")
        return _Failure(f"status {http.status}: {message_of(http)}", _retry_after_s(http), is_answer=True)

    def read(self, answer: PeerResponse, kind: type[T]) -> T:
        """Decode the body as `kind`; a refusal (4xx) or an invalid body raises the peer's error."""
        http = answer.http
        if http.status >= 300:
            raise self._error(
                f"the {self.name} refused {answer.method} {answer.path} with status {http.status}: {message_of(http)}"
            )
        try:
            return msgspec.json.decode(http.content, type=kind)
        except msgspec.DecodeError as error:
            raise self._error(
                f"the answer of the {self.name} to {answer.path} cannot be read: {error}",
                fix=f"see whether {shown_url(self.url)} is really a {self.name}",
            ) from None


def message_of(response: HttpAnswer) -> str:
    """The error message of a response, in any of the usual formats."""
    try:
        body: Any = json.loads(response.content)
    except ValueError:
        return response.text[:500]
    if isinstance(body, dict):
        for key in ("detail", "error", "message"):
            if key in body:
                said = body[key]
                return (said if isinstance(said, str) else json.dumps(said))[:500]
    return json.dumps(body)[:500]


def _retry_after_s(response: HttpAnswer) -> float:
    """Seconds of the Retry-After header; 0 for a date or an invalid value."""
    try:
        return min(max(float(response.header("Retry-After") or "0"), 0.0), _LONGEST_RETRY_AFTER_S)
    except ValueError:
        return 0.0


def _checked_url(name: str, base_url: str) -> str:
    """The URL without its last slash. An invalid one is refused here: later it would look like a connection error."""
    try:
        url = urlsplit(base_url)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"'{base_url}' is not the URL of a {name}", fix="write it as http://HOST:PORT")
    return base_url.rstrip("/")
