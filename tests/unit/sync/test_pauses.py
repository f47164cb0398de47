"""Deadlines of trainer and engine leave out the time in which their own process was stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from treadle.sync.gate import Gate

TIMEOUT_S = 4.0
STOPPED_S = 5.0
NUMBER = 7
# Both waits of one process: that of a trainer for an engine that loads, and that of an engine for a trainer's write.
WAITS = f"""
import asyncio, sys
from pathlib import Path
from treadle.sync.engine_link import EngineLink
from treadle.sync.gate import Gate, is_written

async def main(url, file):
    gate = Gate(Path(file))
    standing = asyncio.ensure_future(asyncio.to_thread(gate.stand_still, {NUMBER}))
    loading = asyncio.to_thread(EngineLink(url, 5.0).wait_for, "/health", dict, {TIMEOUT_S})
    both = asyncio.gather(is_written(standing, gate, {NUMBER}, {TIMEOUT_S}), loading, return_exceptions=True)
    await asyncio.sleep(0.5)
    print("waits", flush=True)
    print(await both, flush=True)
    gate.give_up({NUMBER})

asyncio.run(main(*sys.argv[1:]))
"""


class LoadingEngine(BaseHTTPRequestHandler):
    is_loaded = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200 if self.is_loaded.is_set() else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"error": "it loads"}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_process_that_was_stopped_gives_nobody_up(tmp_path: Path) -> None:
    Gate.create(tmp_path / "gate")
    engine = ThreadingHTTPServer(("127.0.0.1", 0), LoadingEngine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    words = [sys.executable, "-c", WAITS, f"http://127.0.0.1:{engine.server_port}", str(tmp_path / "gate")]
    trainer = Gate(tmp_path / "gate")
    with trainer.publishing(), subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)  # it looks twice, and nothing has come
        trainer.go_on(NUMBER)
        LoadingEngine.is_loaded.set()
        assert process.stdout.readline() == "[True, {'error': 'it loads'}]\n"
    engine.shutdown()
    engine.server_close()
