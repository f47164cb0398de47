"""Small real child processes for the launcher's tests: Python one-liners with a name, a log and perhaps a port."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.launch.process_spec import ProcessSpec

SpecMaker = Callable[..., ProcessSpec]


@pytest.fixture
def make_spec(tmp_path: Path) -> SpecMaker:
    """`make_spec("env", "print(1)")`: a process that runs this code."""

    def make(name: str, code: str, *, ready_url: str | None = None, ready_timeout_s: float = 20.0) -> ProcessSpec:
        environment = {**os.environ, "TREADLE_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        argv = (sys.executable, "-c", code)
        log_path = tmp_path / "logs" / f"{name}.log"
        return ProcessSpec(name, argv, environment, log_path, ready_url, ready_timeout_s)

    return make


@pytest.fixture
def server_code() -> Callable[[int], str]:
    """Code of a server that answers 200 to every GET on `port`."""

    def code(port: int) -> str:
        return (
            "from http.server import BaseHTTPRequestHandler, HTTPServer\n"
            "class Handler(BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        self.send_response(200)\n"
            "        self.end_headers()\n"
            f"HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
        )

    return code
