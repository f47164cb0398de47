"""Who may call the hub, and who may wipe its queue."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

from treadle.config.schema import HubConfig
from treadle.wire.guard import Access, Rules, caller_of

TOKEN_VARIABLE = "TREADLE_HUB_TOKEN"  # noqa: S105 - a variable's name
ADMIN_TOKEN_VARIABLE = "TREADLE_HUB_ADMIN_TOKEN"  # noqa: S105


def access_of(config: HubConfig, env: Mapping[str, str]) -> Access:
    """`access_of(config, os.environ)`. Makes token files that are not there yet."""
    rules = Rules(
        process="hub",
        host=config.host,
        token_variable=TOKEN_VARIABLE,
        token_file=config.token_file,
        admin_token_variable=ADMIN_TOKEN_VARIABLE,
        admin_token_file=config.admin_token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/healthz")}),
    )
    return Access.of(rules, env)


def may_reset(scope: Scope) -> bool:
    """Whether this request may wipe the queue. A request that no guard has seen may not."""
    caller = caller_of(scope)
    return caller is not None and (caller.is_admin or caller.is_loopback)
