"""Checks of `treadle doctor` (the findings of `treadle env NAME validate`), and their JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from treadle.envs.checking.findings import Finding as Check
from treadle.envs.checking.findings import Verdict, problems, show

__all__ = ["Check", "Verdict", "as_json", "is_well", "show"]


def is_well(checks: Sequence[Check]) -> bool:
    return not problems(checks)


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": is_well(checks), "checks": [asdict(check) for check in checks]}
