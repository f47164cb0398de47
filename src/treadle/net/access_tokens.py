"""Read, make and derive the tokens that hub, engine and recorder ask their callers for.

The token of --token-file or of the environment variable opens every route except those of the admin. From it the token
of each role is derived (HMAC-SHA256), which opens only what that role needs and does not reveal the token itself:

role_token(secret, "trainer") -> "trainer.x1YH..."
"""

from __future__ import annotations

import base64
import errno
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from treadle.errors import ConfigError
from treadle.log import get_logger

ClientRole = Literal["environment", "trainer", "engine", "observer"]
Role = ClientRole | Literal["admin"]
CLIENT_ROLES: tuple[ClientRole, ...] = get_args(ClientRole)

HUB_TOKEN_VARIABLE = "TREADLE_HUB_TOKEN"  # noqa: S105 - a variable's name
HUB_ADMIN_TOKEN_VARIABLE = "TREADLE_HUB_ADMIN_TOKEN"  # noqa: S105
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 1024  # it travels in the header block, which is limited

_VISIBLE_ASCII = re.compile(r"[!-~]+")
_ROLE_TOKEN = re.compile(rf"({'|'.join(CLIENT_ROLES)})\.[\w-]{{43}}", re.ASCII)


def role_token(secret: str, role: ClientRole) -> str:
    digest = hmac.digest(secret.encode(), f"treadle role {role}".encode(), "sha256")
    return f"{role}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def bearer_headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def read_secret(process: str, path: Path | None, flag: str, env: Mapping[str, str], variable: str) -> str | None:
    """The token that `flag` or `variable` names; a file that does not exist yet is made. None: neither is given."""
    from_env = env.get(variable)
    if from_env is not None:
        from_env = _checked(from_env, f"the variable {variable}", f"unset {variable}, or give it a longer value")
    if path is None:
        return from_env
    from_file = _read_or_make(process, path, flag)
    if from_env is not None and from_env != from_file:
        raise ConfigError(
            f"{flag} {path} and {variable} name different tokens", fix=f"unset {variable}, or drop {flag}"
        )
    return from_file


def client_token(path: Path | None, role: ClientRole, given: str) -> str:
    """A client's token for a server with this token file, which is only read; without a file, the token `given`."""
    if path is None:
        return given
    try:
        return role_token(_checked(_read_private(path), str(path), "restart the server"), role)
    except OSError as error:
        raise _unreadable(path, error, "restore it, or restart the server") from None


def _checked(text: str, place: str, fix: str) -> str:
    token = text.strip()
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(f"the token in {place} is shorter than {MIN_TOKEN_CHARS} characters", fix=fix)
    if len(token) > MAX_TOKEN_CHARS or not _VISIBLE_ASCII.fullmatch(token):
        what = f"must be one line of at most {MAX_TOKEN_CHARS} visible ASCII characters without blanks"
        raise ConfigError(f"the token in {place} {what}", fix=fix)
    if (found := _ROLE_TOKEN.fullmatch(token)) is not None:
        what = f"is the token of the role {found[1]}, which only clients use"
        raise ConfigError(f"the token in {place} {what}", fix="give the server the token that it was derived from")
    return token


def _read_or_make(process: str, path: Path, flag: str) -> str:
    try:
        real = path.expanduser().resolve()  # a link may lead to a file that is not there yet
        if not real.exists():
            _make(process, real)
        text = _read_private(real)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        fix = f"choose a file in a folder that exists and that you may write to: {flag} FILE"
        raise _unreadable(path, error, fix) from None
    return _checked(text, str(path), f"delete {path}: the {process} makes a new one")


def _unreadable(path: Path, error: OSError | RuntimeError, fix: str) -> ConfigError:
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return ConfigError(f"the token file {path} cannot be read or made: {reason}", fix=fix)


def _make(process: str, path: Path) -> None:
    """Write the file under another name first: a process that starts at the same time reads all of it or none."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".token.") as file:  # mode 0600
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(file.name, path)
        except FileExistsError:
            return  # another process was first
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
