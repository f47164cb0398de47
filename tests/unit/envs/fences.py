"""Whether this machine can fence in code that a model wrote; where it cannot, there is nothing to test."""

from __future__ import annotations

import pytest

from treadle.envs.sandbox.runs import Limits, check_fences
from treadle.errors import ConfigError


def lacking() -> str:
    """What is missing, or ""."""
    try:
        check_fences(Limits())
    except ConfigError as error:
        return str(error)
    return ""


needs_fences = pytest.mark.skipif(bool(lacking()), reason=lacking())
