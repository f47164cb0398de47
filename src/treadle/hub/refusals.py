"""Answers other than 200, raised from wherever they are found out. No web framework here: porters use it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Refused(Exception):
    """`detail` goes to the client; `reason` is the word under which it is counted, for `env_id` where that is known."""

    def __init__(
        self,
        status: int,
        detail: Any,
        headers: Mapping[str, str] | None = None,
        *,
        reason: str = "refused",
        env_id: int | None = None,
    ) -> None:
        super().__init__(status)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.reason = reason
        self.env_id = env_id


def unprocessable(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> Refused:
    """422 in the form that clients of FastAPI servers know."""
    return Refused(422, [problem(kind, loc, msg, value)], reason=kind)


def problem(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", *loc], "msg": msg, "input": value}


def word(refusal: Exception) -> str:
    """What an exception is counted under: QueueFull -> queue_full"""
    name = type(refusal).__name__
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
