"""Decide who may call a process over HTTP: tokens and their roles, the names of this machine, no web pages.

access = Access.of(AccessRules(process="hub", host="127.0.0.1", token_variable="TREADLE_HUB_TOKEN"), os.environ)
app = AccessMiddleware(app, access)
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
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
from treadle.net.access_tokens import CLIENT_ROLES, Role, read_secret, role_token
from treadle.net.address import Address, is_loopback_address, is_loopback_host, parse_address, plain_address

NAME_LOOKUP_S = 0.3  # a name server that does not answer must not hold up the start
CLIENTS: frozenset[Role] = frozenset(CLIENT_ROLES)
ADMIN: frozenset[Role] = frozenset({"admin"})
EVERYBODY: frozenset[Role] = CLIENTS | ADMIN

_ROLES = "treadle.roles"  # in a request's scope: the roles of its sender, a frozenset
_PREFIX = b"/t/"
_PROXY_HEADERS = frozenset(
    (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip", b"via")
)
_REFUSED_METHODS = frozenset(("HEAD", "TRACE", "CONNECT"))  # a HEAD would have the effects of its GET
_HOST = re.compile(r"(?P<name>\[[0-9a-z:.%]+\]|[^:\[\]/@?#\s]+)(:\d{0,5})?", re.ASCII | re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)
_LOOPBACK_V6 = ipaddress.IPv6Address("::1")


@dataclass(frozen=True)
class AccessRules:
    """What one process says about who may call it."""

    process: str  # its name, in messages and logs
    host: str
    token_variable: str
    token_file: Path | None = None
    admin_token_variable: str | None = None  # None: there is no admin
    admin_token_file: Path | None = None
    allowed_hosts: str = ""
    open_to_all: Set[tuple[str, str]] = frozenset()  # (method, path) of what needs no token: health checks know none


def why_refused(scope: Scope, roles: Set[Role]) -> str | None:
    """Why the sender may not use a route that is for `roles`, in a sentence; None: it may.

    A GET that observers may not use has effects. A web page needs only an <img> to make a browser send it, and to some
    names of this machine it is sent without Origin and Sec-Fetch-Site. So no browser may send it at all.
    """
    found = scope.get(_ROLES)  # missing where no guard has seen the request
    held: frozenset[Role] = found if isinstance(found, frozenset) else frozenset()
    call = f"{scope['method']} {scope['path']}"
    if not held & roles:
        if roles == ADMIN:
            return f"only this machine or the admin token may use {call}; the token of a single role may not"
        own = f"this token is for: {', '.join(sorted(held))}" if held else "there is none"
        return f"{call} needs a token for: {', '.join(sorted(roles))}; {own} (`treadle token ROLE` prints others)"
    if scope["method"] == "GET" and "observer" not in roles:
        header = _browser_header(scope["headers"])
        if header is not None:
            return f"{call} changes something and is refused to browsers, as the header {header} shows: use a program"
    return None


@dataclass(frozen=True)
class Access:
    """Who may call one process. It holds digests of the tokens, so that none can end up in a log or an answer."""

    process: str
    hosts: Set[str]
    open_to_all: Set[tuple[str, str]]
    is_open: bool  # loopback without a token: unmodified clients just work
    secret: bytes | None = field(default=None, repr=False)  # digest of the token that has all roles but the admin's
    further: Mapping[bytes, frozenset[Role]] = field(default_factory=dict, repr=False)  # digest -> roles

    @classmethod
    def of(cls, rules: AccessRules, env: Mapping[str, str]) -> Access:
        """`Access.of(rules, os.environ)`. Makes token files that are not there yet."""
        process, variable = rules.process, rules.token_variable
        secret = read_secret(process, rules.token_file, "--token-file", env, variable)
        admin_token = None
        if rules.admin_token_variable is not None:
            admin = (rules.admin_token_file, "--admin-token-file", env, rules.admin_token_variable)
            admin_token = read_secret(process, *admin)
        if secret is not None and secret == admin_token:
            fix = "delete one of the two files and start again: it is then created"
            raise ConfigError(
                f"the token and the admin token are the same: every client could reset the {process}", fix=fix
            )
        if secret is None and admin_token is None and not is_loopback_host(rules.host):
            fix = f"add --token-file FILE (made when it is not there), set {variable}, or use --host 127.0.0.1"
            raise ConfigError(f"the {process} listens on {rules.host or 'every address'} and needs a token", fix=fix)
        further: dict[bytes, frozenset[Role]] = {}
        if secret is not None:
            further = {_digest(role_token(secret, role)): frozenset((role, "observer")) for role in CLIENT_ROLES}
        if admin_token is not None:
            further[_digest(admin_token)] = EVERYBODY
        return cls(
            process=process,
            hosts=_known_names(rules),
            open_to_all=rules.open_to_all,
            is_open=secret is None and is_loopback_host(rules.host),
            secret=None if secret is None else _digest(secret),
            further=further,
        )

    def roles_of(self, presented: bytes, *, is_local: bool) -> frozenset[Role]:
        """The roles of a token; none for a wrong one. `is_local`: a process on this machine sent it."""
        digest = hashlib.sha256(presented).digest()
        if hmac.compare_digest(digest, self.secret or b""):
            return EVERYBODY if is_local else CLIENTS
        return self.further.get(digest, frozenset())  # a digest that was looked up tells nothing about the token


class AccessMiddleware:
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
        refusal = (
            _from_foreign_page(scope)
            or self._wrong_host(scope)
            or _wrong_method(scope)
            or self._note_caller(scope, in_path)
        )
        if refusal is not None:
            await refusal(scope, receive, send)
        elif in_path is None:
            await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, _keeping_prefix(scope, send))

    def _wrong_host(self, scope: Scope) -> JSONResponse | None:
        """A web page whose name was pointed at this machine (DNS rebinding) gives itself away by that name.

        So does one that calls http://0.0.0.0, which leads here too: browsers leave Sec-Fetch-Site out there.
        """
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name = _host_name(values[0]) if len(values) == 1 else None
        if name is None:
            return _refusal(400, "send exactly one Host header, with the name or address of this machine")
        if name in self._access.hosts or self._is_own_address(parse_address(name), scope):
            return None
        detail = (
            f"this {self._access.process} is not known as {name[:100]!r}: call it by the address that it listens on, "
            "or start it with --allowed-hosts NAME"
        )
        return _refusal(403, detail)

    def _is_own_address(self, address: Address | None, scope: Scope) -> bool:
        """Loopback, or the address that this connection came in on; the latter never without a token."""
        if address is None:
            return False
        if address == _LOOPBACK_V6 or (address.version == 4 and address.is_loopback):
            return True
        server = scope.get("server")
        local = parse_address(str(server[0])) if server else None
        return not self._access.is_open and local is not None and plain_address(local) == plain_address(address)

    def _note_caller(self, scope: Scope, in_path: bytes | None) -> JSONResponse | None:
        headers = scope["headers"]
        is_proxied = any(name in _PROXY_HEADERS for name, _ in headers)
        is_local = not is_proxied and _is_loopback_peer(scope.get("client"))
        presented = [token for token in (_bearer(headers), in_path) if token is not None]
        roles = frozenset[Role]().union(*(self._access.roles_of(token, is_local=is_local) for token in presented))
        if self._access.is_open and not roles:
            roles = EVERYBODY if is_local else CLIENTS
        elif not roles and (scope["method"], scope["path"]) in self._access.open_to_all:
            roles = frozenset({"observer"})
        if not roles:
            process = self._access.process
            problem = f"this is not the {process}'s token" if presented else f"this {process} needs a token"
            way = "send it as `Authorization: Bearer TOKEN` or start every path with /t/TOKEN"
            where = f"it is in the {process}'s --token-file"
            return _refusal(401, f"{problem}: {way}; {where}", {"WWW-Authenticate": "Bearer"})
        scope[_ROLES] = roles
        return None


def _refusal(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


def _from_foreign_page(scope: Scope) -> JSONResponse | None:
    """Refuse what a foreign web page sends: opening one must not read, wipe or pause a run.

    Browsers mark the requests of pages with Sec-Fetch-Site, Origin or Referer; our clients, curl and Atropos' send none
    of them. A page that a person typed the address of comes with "none". A page of our own may read (its scripts come
    with an Origin, which is the name it was asked for by), and nothing else.
    """
    headers = dict(scope["headers"])
    origin, referer = headers.get(b"origin"), headers.get(b"referer")
    host = headers.get(b"host", b"")
    own = (b"http://" + host, b"https://" + host)  # there is no TLS here, but there may be a proxy that has it
    if (
        (origin is not None and not (scope["method"] == "GET" and origin in own))
        or (referer is not None and b"/".join(referer.split(b"/")[:3]) not in own)
        or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
    ):
        return _refusal(403, "requests of web pages are refused: call from a program, or open the address itself")
    return None


def _browser_header(headers: list[tuple[bytes, bytes]]) -> str | None:
    """A header that only browsers send, and that no page can keep them from sending."""
    for name, value in headers:
        is_mark = name in (b"origin", b"referer", b"accept-language") or name.startswith(b"sec-fetch-")
        if is_mark or (name == b"user-agent" and value.startswith(b"Mozilla/")):
            return name.decode("latin-1")
    return None


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
    address = parse_address(client[0]) if client else None
    return address is not None and is_loopback_address(address)


@lru_cache(maxsize=256)
def _host_name(header: str) -> str | None:
    """The name in a Host header: lower case, without port, brackets and the dot that ends a full name."""
    found = _HOST.fullmatch(header.strip())
    return _canonical(found["name"].strip("[]")) or None if found else None


def _canonical(name: str) -> str:
    address = parse_address(name)
    return name.removesuffix(".").lower() if address is None else str(address)


def _known_names(rules: AccessRules) -> Set[str]:
    further = [name.strip().strip("[]") for name in rules.allowed_hosts.split(",") if name.strip()]
    for name in further:
        if not _PLAIN_NAME.fullmatch(name) and parse_address(name) is None:
            fix = f"write names without scheme and port: --allowed-hosts {rules.process}.example.org,{rules.process}"
            raise ConfigError(f"{name!r} in --allowed-hosts is not a host name", fix=fix)
    names = _own_names()
    for name in ("localhost", rules.host, *further):
        address = parse_address(name)
        # Web pages can call 0.0.0.0 and [::] without being marked as such, and no client has to: they mean any address.
        if name and not (address is not None and plain_address(address).is_unspecified):
            names.add(_canonical(name))
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


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
