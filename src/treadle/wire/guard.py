"""Who may call a process of ours over HTTP: tokens, names this machine is called by, and who is its admin.

access = Access.of(Rules(process="hub", host="127.0.0.1", token_variable="TREADLE_HUB_TOKEN"), os.environ)
app = Guard(app, access)
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from treadle.errors import ConfigError
from treadle.log import get_logger

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024  # it travels in the header block, which is limited
NAME_LOOKUP_S = 0.3  # a name server that does not answer must not hold up the start

_CALLER = "treadle.caller"
_PREFIX = b"/t/"
_PROXY_HEADERS = frozenset(
    (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")
)
_REFUSED_METHODS = frozenset(("HEAD", "TRACE", "CONNECT"))  # no GET of ours is free of effects without its answer
_HOST = re.compile(r"(?P<name>\[[0-9a-z:.%]+\]|[^:\[\]/@?#\s]+)(:\d{0,5})?", re.ASCII | re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)
_VISIBLE_ASCII = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Rules:
    """What one process says about who may call it."""

    process: str  # its name, in messages and logs
    host: str
    token_variable: str
    token_file: Path | None = None
    admin_token_variable: str | None = None  # None: there is no admin
    admin_token_file: Path | None = None
    allowed_hosts: str = ""
    open_to_all: Set[tuple[str, str]] = frozenset()  # (method, path) of what needs no token: health checks know none


@dataclass(frozen=True)
class Caller:
    """What the guard found out about the sender of a request."""

    is_admin: bool
    is_loopback: bool  # a process on this machine, not a proxy that speaks for somebody else


def caller_of(scope: Scope) -> Caller | None:
    """Who sent this request; None when no guard has seen it."""
    caller = scope.get(_CALLER)
    return caller if isinstance(caller, Caller) else None


@dataclass(frozen=True)
class Access:
    """Who may call one process. It holds digests of the tokens, so that none can end up in a log or an answer."""

    process: str
    hosts: Set[str]
    open_to_all: Set[tuple[str, str]]
    is_open: bool  # loopback without a token: unmodified clients just work
    token: bytes | None = field(default=None, repr=False)
    admin_token: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, rules: Rules, env: Mapping[str, str]) -> Access:
        """`Access.of(rules, os.environ)`. Makes token files that are not there yet."""
        process, variable = rules.process, rules.token_variable
        token = _token(process, rules.token_file, "--token-file", env, variable)
        admin_token = None
        if rules.admin_token_variable is not None:
            admin = (rules.admin_token_file, "--admin-token-file", env, rules.admin_token_variable)
            admin_token = _token(process, *admin)
        if token is not None and token == admin_token:
            fix = "let one of the two files be made anew: delete it and start again"
            raise ConfigError(
                f"the token and the admin token are the same: every client could reset the {process}", fix=fix
            )
        if token is None and admin_token is None and not _is_loopback_host(rules.host):
            fix = f"add --token-file FILE (made when it is not there), set {variable}, or use --host 127.0.0.1"
            raise ConfigError(f"the {process} listens on {rules.host or 'every address'} and needs a token", fix=fix)
        return cls(
            process=process,
            hosts=_known_names(rules),
            open_to_all=rules.open_to_all,
            is_open=token is None and _is_loopback_host(rules.host),
            token=_digest(token),
            admin_token=_digest(admin_token),
        )

    def holds(self, presented: bytes) -> tuple[bool, bool]:
        """Whether this is one of the tokens, and whether it is the admin's. Takes equally long for every guess."""
        digest = hashlib.sha256(presented).digest()
        is_token = hmac.compare_digest(digest, self.token or b"")
        is_admin = hmac.compare_digest(digest, self.admin_token or b"")
        return is_token or is_admin, is_admin


class Guard:
    """Lets requests through to `app` that may be made, with a `Caller` in their scope; answers the others itself."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        in_path = _take_token_out_of_path(scope)  # before anything could log the path
        refusal = self._wrong_host(scope) or _wrong_method(scope) or self._note_caller(scope, in_path)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif in_path is None:
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, _keeping_prefix(scope, send))

    def _wrong_host(self, scope: Scope) -> JSONResponse | None:
        """A web page whose name was pointed at this machine (DNS rebinding) gives itself away by that name."""
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _host_name(values[0]) if len(values) == 1 else None
        if name is None:
            return _refusal(400, "send exactly one Host header, with the name or address of this machine")
        if _ip(name) is not None or name in self._access.hosts:
            return None
        detail = (
            f"this {self._access.process} is not known as {name[:100]!r}: call it by its address, "
            "or start it with --allowed-hosts NAME"
        )
        return _refusal(403, detail)

    def _note_caller(self, scope: Scope, in_path: bytes | None) -> JSONResponse | None:
        headers = scope["headers"]
        presented = [token for token in (_bearer(headers), in_path) if token is not None]
        found = [self._access.holds(token) for token in presented]
        is_known = any(is_token for is_token, _ in found)
        is_for_all = (scope["method"], scope["path"]) in self._access.open_to_all
        if not (is_known or self._access.is_open or is_for_all):
            process = self._access.process
            problem = f"this is not the {process}'s token" if presented else f"this {process} needs a token"
            way = "send it as `Authorization: Bearer TOKEN` or start every path with /t/TOKEN"
            where = f"it is in the {process}'s --token-file"
            return _refusal(401, f"{problem}: {way}; {where}", {"WWW-Authenticate": "Bearer"})
        is_proxied = any(name in _PROXY_HEADERS for name, _ in headers)
        scope[_CALLER] = Caller(
            is_admin=any(is_admin for _, is_admin in found),
            is_loopback=not is_proxied and _is_loopback_peer(scope.get("client")),
        )
        return None


def _refusal(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


def _wrong_method(scope: Scope) -> JSONResponse | None:
    if scope["method"] not in _REFUSED_METHODS:
        return None
    return _refusal(405, "use GET or POST", {"Allow": "GET, POST"})


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _take_token_out_of_path(scope: Scope) -> bytes | None:
    """Clients that know no tokens get theirs in the base URL. The scope is changed: no one sees the token again."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if not raw.startswith(_PREFIX):
        return None
    token, slash, rest = raw[len(_PREFIX) :].partition(b"/")
    scope["raw_path"] = slash + rest or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))
    return unquote_to_bytes(token)


def _keeping_prefix(scope: Scope, send: Send) -> Send:
    """Redirects (a slash too many) become relative ones: the prefix is kept, and the token not repeated."""
    depth = scope["raw_path"].count(b"/") - 1

    async def send_relative(message: Message) -> None:
        if message["type"] == "http.response.start" and 300 <= message["status"] < 400:
            headers = [
                (name, _relative(value, depth) if name.lower() == b"location" else value)
                for name, value in message["headers"]
            ]
            message = {**message, "headers": headers}
        await send(message)

    return send_relative


def _relative(location: bytes, depth: int) -> bytes:
    target = urlsplit(location.decode("latin-1"))
    relative = ("../" * depth or "./") + target.path.lstrip("/")
    return (f"{relative}?{target.query}" if target.query else relative).encode("latin-1")


def _is_loopback_peer(client: Any) -> bool:
    address = _ip(client[0]) if client else None
    return address is not None and _is_loopback_ip(address)


def _is_loopback_host(host: str) -> bool:
    address = _ip(host.strip("[]"))
    return host.lower() == "localhost" if address is None else _is_loopback_ip(address)


def _is_loopback_ip(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (inner or address).is_loopback  # ::ffff:127.0.0.1 is how a socket for both kinds shows the old one


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@lru_cache(maxsize=256)
def _host_name(header: str) -> str | None:
    """The name in a Host header: lower case, without port, brackets and the dot that ends a full name."""
    found = _HOST.fullmatch(header.strip())
    return found["name"].strip("[]").removesuffix(".").lower() or None if found else None


def _known_names(rules: Rules) -> Set[str]:
    further = [name.strip() for name in rules.allowed_hosts.split(",") if name.strip()]
    for name in further:
        if not _PLAIN_NAME.fullmatch(name):
            fix = f"write names without scheme and port: --allowed-hosts {rules.process}.example.org,{rules.process}"
            raise ConfigError(f"{name!r} in --allowed-hosts is not a host name", fix=fix)
    names = _own_names()
    names.update(name.removesuffix(".").lower() for name in ("localhost", rules.host, *further) if name)
    return names


def _own_names() -> set[str]:
    """What this machine calls itself. The full name may come later than we wait for: it is added then."""
    names = {socket.gethostname().lower()}
    lookup = threading.Thread(target=lambda: names.add(_full_name()), name="own-name", daemon=True)
    lookup.start()
    lookup.join(NAME_LOOKUP_S)
    return names


@cache
def _full_name() -> str:
    return socket.getfqdn().removesuffix(".").lower()


def _digest(token: str | None) -> bytes | None:
    return None if token is None else hashlib.sha256(token.encode()).digest()


def _token(process: str, path: Path | None, flag: str, env: Mapping[str, str], variable: str) -> str | None:
    from_env = env.get(variable)
    if from_env is not None:
        from_env = _checked(from_env, f"the variable {variable}", f"unset {variable}, or give it a longer value")
    if path is None:
        return from_env
    from_file = _read_or_make(process, path.expanduser(), flag)
    if from_env is not None and from_env != from_file:
        raise ConfigError(
            f"{flag} {path} and {variable} name different tokens", fix=f"unset {variable}, or drop {flag}"
        )
    return from_file


def _checked(text: str, place: str, fix: str) -> str:
    token = text.strip()
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the token in {place} is shorter than {MIN_TOKEN_CHARS} characters", fix=fix)
    if len(token) > MAX_TOKEN_CHARS or not _VISIBLE_ASCII.fullmatch(token):
        what = f"must be one line of at most {MAX_TOKEN_CHARS} visible ASCII characters without blanks"
        raise ConfigError(f"the token in {place} {what}", fix=fix)
    return token


def _read_or_make(process: str, path: Path, flag: str) -> str:
    try:
        real = path.resolve()  # a link may lead to a file that is not there yet
        if not real.exists():
            _make(process, real)
        text = _read_private(real)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "links go in a circle"
        fix = f"choose a file in a folder that exists and that you may write to: {flag} FILE"
        raise ConfigError(f"the token file {path} cannot be read or made: {reason}", fix=fix) from None
    return _checked(text, str(path), f"delete {path}: the {process} makes a new one")


def _make(process: str, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return  # another process was first
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(descriptor)
    get_logger(process).info("token_made", file=str(path))


def _read_private(path: Path) -> str:
    """The file's text, when no other user of this machine can read or change it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not keep us waiting
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a plain file")
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(f"other users can read or change the token file {path}", fix=f"chmod 600 {path}")
        return file.read(4 * MAX_TOKEN_CHARS).decode("latin-1")
