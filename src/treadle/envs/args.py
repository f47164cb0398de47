"""`--env.args` as a typed value."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.errors import ConfigError

A = TypeVar("A", bound=msgspec.Struct)


def parse_args(config: EnvConfig, kind: type[A]) -> A:
    """`config.args` as a `kind`; an unknown name or a wrong value is told with what may be said."""
    try:
        return msgspec.convert(config.args, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(
            f"--env.args of the environment '{config.own_name}': {error}", fix=f"it knows: {known}"
        ) from None
