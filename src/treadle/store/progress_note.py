"""How far the queue has come, noted beside it.

SQLite leaves out the damaged or missing end of its log without a word. With the note, a queue that is behind what
was promised is found when it is opened.
"""

from __future__ import annotations

import contextlib
import os

_DIGITS = 20


def write(fd: int, newest_event: int) -> None:
    """To be called once the event is on disk: the note is never ahead of a sound queue.

    It is not synced: a power cut may leave it behind, which says nothing against the queue.
    """
    with contextlib.suppress(OSError):
        os.pwrite(fd, b"%0*d\n" % (_DIGITS, newest_event), 0)


def read(fd: int) -> int:
    text = os.pread(fd, _DIGITS, 0)
    return int(text) if text.isdigit() else 0


def clear(fd: int) -> None:
    os.ftruncate(fd, 0)
