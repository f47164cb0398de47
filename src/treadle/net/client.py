"""HTTP client for many concurrent calls to one server: an environment has hundreds in flight for a long time.

httpx searches all of its connections for every call, so its cost grows with the number in flight: with 512 of them a
call took 8 ms of a core, with aiohttp 0.3 ms.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

OK = 200
KEEP_ALIVE_S = 3.0  # servers hang up after 5 s: a call must not take a connection that is just being closed
LONGEST_LINE = 2**22  # of a stream; with alternatives and logprobs, lines are long


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # names in any case: ask with `header`

    def header(self, name: str) -> str:
        """ "" when it is not there."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), "")

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class BadStatus(Exception):
    """A stream that did not begin: what was answered instead."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class NoAnswer(Exception):
    """The server could not be reached, hung up, or took too long."""


class HttpClient(Protocol):
    async def request(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer: ...

    async def close(self) -> None: ...


class PooledHttpClient:
    """Connections are opened as they are needed and kept. Made anywhere, used in one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None,
        connect_timeout_s: float = 10.0,
        trust_env: bool,
    ) -> None:
        """`timeout_s`: the longest silence of the server; None: for ever. `trust_env`: proxies of the environment."""
        self._base_url = base_url.rstrip("/")
        self._settings: dict[str, Any] = {
            "headers": dict(headers or {}),
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=timeout_s),
            "trust_env": trust_env,
            "auto_decompress": True,
        }
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """`timeout_s`: for the whole of this call, where given."""
        limit: dict[str, Any] = {} if timeout_s is None else {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        try:
            async with self._opened().request(
                method, self._base_url + path, data=body, headers=dict(headers or {}), allow_redirects=False, **limit
            ) as answer:
                return HttpAnswer(answer.status, await answer.read(), dict(answer.headers))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    async def stream_lines(self, path: str, *, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """POST, and the lines of the answer as they come. Another status than 200: `BadStatus`."""
        try:
            async with self._opened().post(self._base_url + path, data=body, headers=dict(headers)) as answer:
                if answer.status != OK:
                    raise BadStatus(HttpAnswer(answer.status, await answer.read(), dict(answer.headers)))
                async for line in answer.content:
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: a line too long to hold
            raise NoAnswer(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No bound: an engine holds the requests of a wave until all are there, so one would be a deadlock.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=LONGEST_LINE, **self._settings)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
