"""A user's program as a process that can be ended, with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from treadle.errors import ConfigError

TAIL_BYTES = 2000  # of what it printed, to be shown when it fails


@dataclass(frozen=True)
class Ended:
    exit_code: int | None  # None: it was ended because its time was up
    tail: str


async def run_program(
    command: Sequence[str], *, stdin: bytes, environment: Mapping[str, str], time_limit_s: float
) -> Ended:
    """Run it to its end, or for so long. Whatever it left running is ended with it."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:  # files: nothing can block on them
        given.write(stdin)
        given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=printed,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # a group of its own, to be ended as a whole
            )
        except OSError as error:
            raise ConfigError(
                f"cannot start '{command[0]}': {error.strerror}", fix="check the agent's command"
            ) from None
        exit_code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                exit_code = await asyncio.wait_for(process.wait(), time_limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return Ended(exit_code, _tail(printed))


def _tail(printed: IO[bytes]) -> str:
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - TAIL_BYTES))
    return printed.read().decode(errors="replace").strip()
