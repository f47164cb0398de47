"""Skip tests of the sandbox where this machine cannot sandbox code."""

from __future__ import annotations

import pytest

from treadle.envs.sandbox.execution import SandboxLimits, check_sandbox
from treadle.errors import ConfigError


def lacking() -> str:
    """What is missing, or ""."""
    try:
        check_sandbox(SandboxLimits())
    except ConfigError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(lacking()), reason=lacking())
