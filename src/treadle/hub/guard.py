"""Decide who may call the hub, and which role each route is for."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.config.schema import HubConfig
from treadle.wire import guard
from treadle.wire.guard import Access, Rules
from treadle.wire.tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, Role

# The roles that may use a route.
OBSERVER = guard.EVERYBODY  # every token may read
ADMIN = guard.ADMIN
ENVIRONMENT: frozenset[Role] = frozenset({"environment"})
TRAINER: frozenset[Role] = frozenset({"trainer"})
ENGINE: frozenset[Role] = frozenset({"engine"})
REPORTER = ENVIRONMENT | TRAINER | ENGINE


def access_of(config: HubConfig, env: Mapping[str, str]) -> Access:
    """`access_of(config, os.environ)`. Makes token files that are not there yet."""
    rules = Rules(
        process="hub",
        host=config.host,
        token_variable=HUB_TOKEN_VARIABLE,
        token_file=config.token_file,
        admin_token_variable=HUB_ADMIN_TOKEN_VARIABLE,
        admin_token_file=config.admin_token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/healthz")}),
    )
    return Access.of(rules, env)
