"""How a process is started: its command line, its environment variables, and the tokens that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from treadle.background import PARENT_VARIABLE
from treadle.config.files import VARIABLE as SETTINGS_VARIABLE
from treadle.launch.machine import MachineFacts
from treadle.net.access_tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, ClientRole, role_token
from treadle.net.address import url_to
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN_VARIABLE

HOST_FLAG = "--host"
PORT_FLAG = "--port"
# Unless the user set them. glibc gives each thread a heap of its own, and keeps what is freed in it: with one heap, the
# engine of the default job needs 1.75 GB instead of 2.17 (x86, float32).
_PRESET_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
# Idle worker threads must sleep: with few cores, spinning threads slow down other processes.
_CHILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
# The role of each process at hub and engine; it gets only the token of this role.
_ROLES: Mapping[str, ClientRole] = {"env": "environment", "trainer": "trainer"}
_HUB_ROLES: Mapping[str, ClientRole] = {"engine": "engine", "router": "observer", **_ROLES}
_ENGINE_ROLES: Mapping[str, ClientRole] = {"hub": "observer", "router": "environment", **_ROLES}
_TOKEN_VARIABLES = (HUB_TOKEN_VARIABLE, HUB_ADMIN_TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)


@dataclass(frozen=True)
class AccessTokens:
    """The tokens that hub and engine require; None: no token."""

    hub: str | None = field(default=None, repr=False)
    hub_admin: str | None = field(default=None, repr=False)
    engine: str | None = field(default=None, repr=False)

    def variables_of(self, kind: str) -> dict[str, str]:
        """As environment variables of a process, because other users can read its command line."""
        admin = self.hub_admin if kind == "hub" else None
        hub = _token_for(self.hub, _HUB_ROLES.get(kind))
        engine = _token_for(self.engine, _ENGINE_ROLES.get(kind))
        given = zip(_TOKEN_VARIABLES, (hub, admin, engine), strict=True)
        return {variable: token for variable, token in given if token is not None}


def _token_for(secret: str | None, role: ClientRole | None) -> str | None:
    """The server itself has no role: it gets the secret from which the tokens of roles are derived."""
    return secret if secret is None or role is None else role_token(secret, role)


NO_TOKENS = AccessTokens()


@dataclass(frozen=True)
class ProcessSpec:
    """How to start a process, and when it is ready: `ready_url` answers 200."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # contains tokens
    log_path: Path
    ready_url: str | None = None
    ready_timeout_s: float = 120.0
    node: int = 0  # of the machines of the run
    may_move: bool = False  # nobody depends on its address: it reports its URL to the hub
    first_flags: tuple[str, ...] = ()  # at the end of `argv`: left out once it has been ready

    def at_port(self, port: int) -> ProcessSpec:
        """The same server at another port of its machine."""
        return self._with_flag(PORT_FLAG, str(port), urlsplit(self.ready_url or "").hostname or "", port)

    def at_host(self, host: str, node: int) -> ProcessSpec:
        """The same server on another machine."""
        port = urlsplit(self.ready_url or "").port or 0
        return replace(self._with_flag(HOST_FLAG, host, host, port), node=node)

    def _with_flag(self, flag: str, value: str, host: str, port: int) -> ProcessSpec:
        argv = self.argv
        if flag in argv:
            place = argv.index(flag)
            argv = (*argv[:place], *argv[place + 2 :])
        path = urlsplit(self.ready_url or "").path
        return replace(self, argv=(*argv, flag, value), ready_url=f"{url_to(host, port)}{path}")

    @property
    def kind(self) -> str:
        """ "trainer" of "trainer-1", "env" of "env-gsm8k"."""
        return self.name.partition("-")[0]

    @property
    def serves(self) -> bool:
        """A server runs until it is stopped; if it ends by itself, that is an error."""
        return self.ready_url is not None

    def without_first_flags(self) -> ProcessSpec:
        return replace(self, argv=self.argv[: len(self.argv) - len(self.first_flags)], first_flags=())


def child_environment(facts: MachineFacts, *, threads: int, is_offline: bool) -> dict[str, str]:
    left_out = ("PYTHONDONTWRITEBYTECODE", SETTINGS_VARIABLE, *_TOKEN_VARIABLES)
    inherited = {k: v for k, v in facts.environment.items() if k not in left_out}
    return {
        **_PRESET_ENVIRONMENT,
        **inherited,
        **_CHILD_ENVIRONMENT,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        PARENT_VARIABLE: str(facts.launcher_pid),
        **({"HF_HUB_OFFLINE": "1"} if is_offline else {}),
    }
