"""Call one server (hub or engine) from an environment, with retries while it is unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from treadle.errors import ConfigError, TreadleError
from treadle.log import get_logger
from treadle.net.access_tokens import bearer_headers
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import Failure, HttpAnswer, HttpClient, NoAnswer, PooledHttpClient, Retries, RetryPolicy
from treadle.watch.waits import Waits, WaitSpec

log = get_logger("env")
T = TypeVar("T")


@dataclass(frozen=True)
class PeerResponse:
    """The response to a call, with the call's method and path."""

    method: str
    path: str
    http: HttpAnswer


class Peer:
    """One server: `Peer("hub", "http://127.0.0.1:8000", error=HubError, timeout_s=30)`."""

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

    async def close(self) -> None:
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
        """Repeat the call as `retry_policy` says; raises the peer's error when the retries are used up."""
        content_type = {"Content-Type": "application/json"} if body is not None else {}
        sent = {**self._headers, **content_type, **(headers or {})}

        async def call() -> HttpAnswer | Failure:
            try:
                outcome: HttpAnswer | NoAnswer = await self._client.request(method, path, body=body, headers=sent)
            except NoAnswer as error:
                outcome = error
            return retry_policy.check(outcome, self.name)

        outcome = await call()
        if isinstance(outcome, HttpAnswer):
            return PeerResponse(method, path, outcome)
        with self._waits.waiting(self._wanted) as wait:
            retries = Retries(retry_policy)
            while isinstance(outcome, Failure):
                pause_s = retries.pause_s(outcome)
                if pause_s is None:
                    raise self._away(
                        f"{method} {path} at the {self.name} ({shown_url(self.url)}) failed {retries.num_failures} "
                        f"times: {outcome.problem}",
                        fix=f"see whether the {self.name} runs and listens at {shown_url(self.url)}",
                    )
                log.debug("call_failed", peer=self.name, path=path, problem=outcome.problem, again_in_s=pause_s)
                wait.problem = outcome.problem
                wait.fix = f"the log of the {self.name} says more" if outcome.is_answer else self._wanted.fix
                await asyncio.sleep(pause_s)
                outcome = await call()
        return PeerResponse(method, path, outcome)

    def read(self, answer: PeerResponse, kind: type[T]) -> T:
        """Decode the body as `kind`; a refusal (4xx) or an invalid body raises the peer's error."""
        http = answer.http
        if http.status >= 300:
            raise self._error(
                f"the {self.name} refused {answer.method} {answer.path} with status {http.status}: {http.message}"
            )
        try:
            return msgspec.json.decode(http.content, type=kind)
        except msgspec.DecodeError as error:
            raise self._error(
                f"the answer of the {self.name} to {answer.path} cannot be read: {error}",
                fix=f"see whether {shown_url(self.url)} is really a {self.name}",
            ) from None


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
