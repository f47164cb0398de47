"""End a process when the launcher that started it is gone, even after kill -9, so that there are no orphans."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_VARIABLE = "TREADLE_PARENT_PID"  # set by the launcher in the processes that it starts


def end_with_parent() -> None:
    """Nothing in a process that no launcher started."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
