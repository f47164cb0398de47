"""A hub under a service manager that holds its socket: while it restarts, clients wait and are not refused."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.processes import environment


def start(listener: socket.socket, database: Path) -> subprocess.Popen[bytes]:
    """As systemd does it: the socket is descriptor 3, and the variables name the process that is to take it."""
    hand_over = f'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@" 3<&{listener.fileno()}'
    hub = [sys.executable, "-m", "treadle", "hub", "--database", str(database), "--port", "1"]
    return subprocess.Popen(["bash", "-c", hand_over, "bash", *hub], pass_fds=[listener.fileno()], env=environment())


def test_a_call_during_a_restart_is_answered_after_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/status"
        hub = start(listener, tmp_path / "q.sqlite")
        try:
            assert httpx.get(url, timeout=20).status_code == 200
            hub.kill()
            hub.wait()
            waiting = pool.submit(httpx.get, url, timeout=20)
            time.sleep(0.3)
            assert not waiting.done()
            hub = start(listener, tmp_path / "q.sqlite")
            assert waiting.result().json() == {"current_step": 0, "queue_size": 0}
        finally:
            hub.kill()
            hub.wait()


def test_a_socket_that_others_can_reach_is_not_served_without_a_token(tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        hub = start(listener, tmp_path / "q.sqlite")
        try:
            assert hub.wait(60) == 2
        finally:
            hub.kill()
            hub.wait()
