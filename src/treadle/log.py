"""Structured logs: an event name and fields, one line each.

log = get_logger("engine")
log.info("published", version=3, seconds=0.21)
# 2026-01-02T03:04:05.678 INFO  engine published version=3 seconds=0.21
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_FIELDS = "treadle_fields"


class Logger:
    """A thin front of `logging` that takes fields instead of format strings."""

    def __init__(self, inner: logging.Logger) -> None:
        self._inner = inner

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, *, exc_info: bool = False, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields, exc_info)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        self._inner.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info)


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = getattr(record, _FIELDS, {})
        tail = "".join(f" {key}={_show(value)}" for key, value in fields.items())
        name = record.name.removeprefix("treadle.")
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {name} {_escape(record.getMessage())}{tail}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(f"treadle.{name}"))


def set_up_logging(level: str = "INFO") -> None:
    """Send our logs, and warnings of libraries, to standard error; called once by each process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("treadle").setLevel(level.upper())


class _StderrHandler(logging.Handler):
    """Writes to what is standard error at that moment: a notebook gives every cell its own."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")


def show_warnings() -> None:
    """Send our warnings to standard error, with their fields, in a program that has set up no logging of its own."""
    logger = logging.getLogger("treadle")
    if not logger.hasHandlers():
        handler = _StderrHandler(logging.WARNING)
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and value and not any(c in value for c in ' "=') and value.isprintable():
        return value
    return json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, int) else str(value)


def _escape(text: str) -> str:
    """Control characters from outside must not forge log lines."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
