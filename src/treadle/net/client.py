"""Call HTTP servers: a blocking client, one for asyncio, and the retry policy of both.

BlockingHttpClient   on http.client, for any thread: trainer, weight sync, watchdog, launcher, doctor
PooledHttpClient     on aiohttp, for hundreds of calls in flight in one event loop: environments, vLLM, start page
RetryPolicy          which failed calls are repeated, after which pauses, and for how long

The launcher imports this module, so aiohttp is imported when a PooledHttpClient is first used. (httpx would do for
both, but it searches all of its connections for every call: with 512 calls in flight a call took 8 ms of a core, with
aiohttp 0.3 ms; and each of its clients reads all certificates, 57 ms.)
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import select
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import SplitResult, unquote, urlsplit

from treadle.background import awake_s
from treadle.errors import DiskFull
from treadle.net.address import is_loopback

if TYPE_CHECKING:
    import aiohttp

OK = 200
KEEP_ALIVE_S = 3.0  # servers hang up after 5 s: a call must not take a connection that is just being closed
LONGEST_LINE = 2**22  # of a stream; with alternatives and logprobs, lines are long
_MAX_MESSAGE_CHARS = 500
_LONGEST_RETRY_AFTER_S = 60.0
_DISK_FULL = 507


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

    @property
    def values(self) -> dict[str, Any]:
        """The JSON object in the body; {} for anything else."""
        try:
            parsed = json.loads(self.content)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def message(self) -> str:
        """The error message: {"detail": ...}, {"error": ...}, OpenAI's {"error": {"message": ...}}, or the text."""
        said: Any = self.values or self.text
        for key in ("detail", "error", "message"):
            if isinstance(said, dict) and said.get(key):
                said = said[key]
        return (said if isinstance(said, str) else json.dumps(said))[:_MAX_MESSAGE_CHARS]


class NoAnswer(Exception):
    """The server could not be reached, hung up, or took too long."""


class LateAnswer(NoAnswer):
    """The server accepted the connection and did not answer in time."""


class BadStatus(Exception):
    """A stream that did not begin: what was answered instead."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


# ---- retries


@dataclass(frozen=True)
class Failure:
    """A failed call that is to be repeated."""

    problem: str
    retry_after_s: float = 0.0  # what the server asked for
    is_answer: bool = False  # the server answered, with an error
    is_late: bool = False  # the server accepted the connection and did not answer


@dataclass(frozen=True)
class RetryPolicy:
    """Calls without an answer, or with 429 or 5xx, are repeated for `give_up_after_s` (None: forever).

    The pause doubles from `first_pause_s` to `longest_pause_s`. Up to half of it is taken off at random, so that the
    clients of a server that restarts do not all call at the same moment. A longer Retry-After is obeyed.
    """

    give_up_after_s: float | None
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    statuses: Container[int] = frozenset({429, *range(500, 600)})

    def is_over(self, seconds: float) -> bool:
        return self.give_up_after_s is not None and seconds > self.give_up_after_s

    def check(self, outcome: HttpAnswer | NoAnswer, server: str) -> HttpAnswer | Failure:
        """The answer, or why the call is to be repeated. A full disk is an error: repeating does not help."""
        if isinstance(outcome, NoAnswer):
            return Failure(str(outcome), is_late=isinstance(outcome, LateAnswer))
        if outcome.status == _DISK_FULL:
            raise DiskFull(f"the disk of the {server} is full", fix="free some space and continue with --resume")
        if outcome.status not in self.statuses:
            return outcome
        try:
            asked_s = float(outcome.header("Retry-After") or "0")
        except ValueError:  # a date
            asked_s = 0.0
        problem = f"status {outcome.status}: {outcome.message}"
        return Failure(problem, min(max(asked_s, 0.0), _LONGEST_RETRY_AFTER_S), is_answer=True)


class Retries:
    """Counts the failures of one call and says when to repeat it. Pauses of this process take nothing of the time."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._began_s = awake_s()
        self.num_failures = 0

    def pause_s(self, failure: Failure) -> float | None:
        """Seconds to wait after this failure; None: give up."""
        self.num_failures += 1
        policy = self._policy
        longest_s = min(policy.first_pause_s * 2.0 ** min(self.num_failures - 1, 30), policy.longest_pause_s)
        pause_s = max(longest_s * random.uniform(0.5, 1.0), failure.retry_after_s)  # noqa: S311
        return None if policy.is_over(awake_s() + pause_s - self._began_s) else pause_s


# ---- blocking


class BlockingHttpClient:
    """Calls one server from any thread; connections are kept for `KEEP_ALIVE_S`. Redirects are not followed."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        trust_env: bool = False,
    ) -> None:
        """`timeout_s`: the longest silence of the server. `trust_env`: proxies of the environment."""
        self._url = base_url
        # On one machine, compression costs more than copying.
        self._headers = {"Accept-Encoding": "identity" if is_loopback(base_url) else "gzip", **(headers or {})}
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._trust_env = trust_env
        self._idle: deque[tuple[float, HTTPConnection]] = deque()  # since when, connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """`timeout_s`: instead of the client's, for this call. `NoAnswer` if there is none."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        connection = None
        try:
            url = urlsplit(self._url)
            proxy = _proxy_of(url) if self._trust_env else None
            target = (url.path.rstrip("/") + path if path else url.path) or "/"
            sent = {**_basic_auth(url, "Authorization"), **self._headers, **(headers or {})}
            if proxy is not None and url.scheme == "http":
                target = f"http://{url.netloc.rpartition('@')[2]}{target}"
                sent |= _basic_auth(proxy, "Proxy-Authorization")
            connection = self._kept() or _connect(url, proxy, min(self._connect_timeout_s, limit_s))
            connection.sock.settimeout(limit_s)
            connection.request(method, target, body, sent)
            answer = connection.getresponse()
            content = answer.read()
            if answer.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
        except TimeoutError as error:
            raise LateAnswer(f"no answer within {limit_s:g} s") from error
        except (OSError, HTTPException, EOFError, zlib.error, ValueError) as error:  # ValueError: a bad URL or header
            raise NoAnswer(str(error) or type(error).__name__) from error
        else:
            if connection.sock is not None:  # the server keeps it open
                self._idle.append((time.monotonic(), connection))
                connection = None
            return HttpAnswer(answer.status, content, dict(answer.getheaders()))
        finally:
            if connection is not None:
                connection.close()

    def _kept(self) -> HTTPConnection | None:
        """A connection of an earlier call that the server has not closed."""
        while True:
            try:
                since, connection = self._idle.pop()
            except IndexError:
                return None
            readable = select.poll()  # unlike select(), with any number of open files
            readable.register(connection.sock, select.POLLIN)
            if time.monotonic() - since < KEEP_ALIVE_S and not readable.poll(0):  # readable: closed by the server
                return connection
            connection.close()


def _connect(url: SplitResult, proxy: SplitResult | None, timeout_s: float) -> HTTPConnection:
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    host, port = url.hostname or "127.0.0.1", url.port
    if proxy is None:
        connection = kind(host, port, timeout=timeout_s)
    else:
        connection = kind(proxy.hostname or "127.0.0.1", proxy.port or 80, timeout=timeout_s)
        if url.scheme == "https":
            connection.set_tunnel(host, port, headers=_basic_auth(proxy, "Proxy-Authorization"))
    try:
        connection.connect()
    except TimeoutError:
        raise NoAnswer(f"no connection within {timeout_s:g} s") from None
    return connection


def _proxy_of(url: SplitResult) -> SplitResult | None:
    from urllib.request import getproxies, proxy_bypass

    known = getproxies()
    proxy = known.get(url.scheme) or known.get("all")
    if not proxy or proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _basic_auth(url: SplitResult, header: str) -> dict[str, str]:
    """The header for the user and password that a URL carries."""
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {header: f"Basic {base64.b64encode(pair.encode()).decode()}"}


# ---- asyncio


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
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._trust_env = trust_env
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
        async with self.stream(method, path, body=body, headers=headers, timeout_s=timeout_s) as answer:
            return HttpAnswer(answer.status, await answer.read(), dict(answer.headers))

    async def stream_lines(self, path: str, *, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[str, None]:
        """POST, and the lines of the answer as they come. Another status than 200: `BadStatus`."""
        async with self.stream("POST", path, body=body, headers=headers) as answer:
            if answer.status != OK:
                raise BadStatus(HttpAnswer(answer.status, await answer.read(), dict(answer.headers)))
            async for line in answer.content:
                yield line.decode("utf-8", "replace").rstrip("\r\n")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer before its body is read. Errors of the server inside the block are `NoAnswer` too."""
        import aiohttp

        limit: dict[str, Any] = {} if timeout_s is None else {"timeout": aiohttp.ClientTimeout(total=timeout_s)}
        try:
            async with self._opened().request(
                method, self._base_url + path, data=body, headers=dict(headers or {}), allow_redirects=False, **limit
            ) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: a line too long to hold
            raise NoAnswer(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # No bound: an engine holds the requests of a wave until all are there, so one would be a deadlock.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=self._connect_timeout_s, sock_read=self._timeout_s
                ),
                trust_env=self._trust_env,
                read_bufsize=LONGEST_LINE,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
