"""The publish gate, and deadlines that leave out the time in which a process was stopped."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from treadle.errors import SyncError
from treadle.sync.gate import PublishGate, gate_beside, wait_for_trainer

PUBLISH_IDS = itertools.count(1)

TRAINER_THAT_ENDS = """
import sys, time
from pathlib import Path
from treadle.sync.gate import PublishGate
with PublishGate(Path(sys.argv[1])).publishing(int(sys.argv[2])):
    print("publishing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    path = gate_beside(tmp_path / "m.weights")
    PublishGate.create(path)
    return path


def test_weights_written_during_a_pause_are_visible_after_it(path):
    written, seen = [], []
    number = next(PUBLISH_IDS)
    trainer, engine = PublishGate(path), PublishGate(path)  # two mappings, as two processes have

    def stand():
        seen.append((engine.wait_for_write(number), list(written)))

    worker = threading.Thread(target=stand)
    worker.start()
    assert trainer.wait_until_paused(number, is_over=lambda: False)
    time.sleep(0.05)
    written.append("weights")
    trainer.mark_written(number)
    worker.join(30)
    ((seconds, then),) = seen
    assert then == ["weights"]
    assert 0.05 <= seconds < 30


def test_leftovers_of_an_earlier_publish_have_no_effect(path):
    trainer, engine = PublishGate(path), PublishGate(path)
    first, second = next(PUBLISH_IDS), next(PUBLISH_IDS)
    trainer.mark_written(first)
    engine.wait_for_write(first)
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(engine.wait_for_write, second)
        time.sleep(0.1)
        assert not pausing.done()
        trainer.mark_written(second)
        pausing.result(30)


def test_a_trainer_notices_an_engine_that_does_not_pause(path):
    assert not PublishGate(path).wait_until_paused(next(PUBLISH_IDS), is_over=lambda: True)


def test_abandoning_a_publish_ends_the_pause_with_an_error(path):
    engine, number = PublishGate(path), next(PUBLISH_IDS)
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(engine.wait_for_write, number)
        PublishGate(path).abandon(number)
        with pytest.raises(SyncError, match="did not finish writing") as error:
            pausing.result(5)
    assert "--resume" in error.value.fix


def test_two_trainers_do_not_publish_at_once(path):
    first, second = next(PUBLISH_IDS), next(PUBLISH_IDS)
    with PublishGate(path).publishing(first):
        with pytest.raises(SyncError, match="another trainer publishes"), PublishGate(path).publishing(second):
            pass
        assert PublishGate(path).is_publishing(first)
        assert not PublishGate(path).is_publishing(second)
    assert not PublishGate(path).is_publishing(first)
    with PublishGate(path).publishing(second):
        assert not PublishGate(path).is_publishing(first)


def test_a_trainer_that_died_is_not_taken_for_the_next_one(path):
    async def look():
        pausing = asyncio.get_running_loop().create_future()
        return await wait_for_trainer(pausing, PublishGate(path), next(PUBLISH_IDS), timeout_s=30)

    with PublishGate(path).publishing(next(PUBLISH_IDS)):
        started = time.monotonic()
        assert not asyncio.run(look())
    assert time.monotonic() - started < 5


def test_the_death_of_a_trainer_is_noticed_at_once(path):
    number = next(PUBLISH_IDS)
    words = [sys.executable, "-c", TRAINER_THAT_ENDS, str(path), str(number)]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout
        assert trainer.stdout.readline() == "publishing\n"

        async def look():
            pausing = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.7, trainer.kill)
            started = time.monotonic()
            written = await wait_for_trainer(pausing, PublishGate(path), number, timeout_s=30)
            return written, time.monotonic() - started

        written, seconds = asyncio.run(look())
        assert not written
        assert 0.6 < seconds < 5
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trainer_may_leave_before_the_engine_has_resumed(path):
    number = next(PUBLISH_IDS)

    async def look():
        pausing = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.2, pausing.set_result, 0.1)  # longer than it takes to look twice
        return await wait_for_trainer(pausing, PublishGate(path), number, timeout_s=30)

    with PublishGate(path).publishing(number):
        PublishGate(path).mark_written(number)
    assert asyncio.run(look())


def test_a_trainer_that_takes_too_long_is_abandoned(path):
    number = next(PUBLISH_IDS)

    async def look():
        started = time.monotonic()
        pausing = asyncio.get_running_loop().create_future()
        written = await wait_for_trainer(pausing, PublishGate(path), number, timeout_s=0.6)
        return written, time.monotonic() - started

    with PublishGate(path).publishing(number):
        written, seconds = asyncio.run(look())
    assert not written
    assert seconds > 0.6


def test_the_error_names_a_missing_gate(tmp_path):
    with pytest.raises(SyncError, match="cannot map the engine's gate"):
        PublishGate(tmp_path / "no.gate")


TIMEOUT_S = 4.0
STOPPED_S = 5.0
NUMBER = 7
# Both waits of one process: that of a trainer for an engine that loads, and that of an engine for a trainer's write.
WAITS = f"""
import asyncio, sys
from pathlib import Path
from treadle.sync.protocol import EngineLink
from treadle.sync.gate import PublishGate, wait_for_trainer

async def main(url, file):
    gate = PublishGate(Path(file))
    pausing = asyncio.ensure_future(asyncio.to_thread(gate.wait_for_write, {NUMBER}))
    loading = asyncio.to_thread(EngineLink(url, 5.0).wait_for, "/health", dict, {TIMEOUT_S})
    both = asyncio.gather(wait_for_trainer(pausing, gate, {NUMBER}, {TIMEOUT_S}), loading, return_exceptions=True)
    await asyncio.sleep(0.5)
    print("waits", flush=True)
    print(await both, flush=True)
    gate.abandon({NUMBER})

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


def test_time_in_which_a_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    PublishGate.create(tmp_path / "gate")
    engine = ThreadingHTTPServer(("127.0.0.1", 0), LoadingEngine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    words = [sys.executable, "-c", WAITS, f"http://127.0.0.1:{engine.server_port}", str(tmp_path / "gate")]
    trainer = PublishGate(tmp_path / "gate")
    with trainer.publishing(NUMBER), subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)  # it looks twice, and nothing has come
        trainer.mark_written(NUMBER)
        LoadingEngine.is_loaded.set()
        assert process.stdout.readline() == "[True, {'error': 'it loads'}]\n"
    engine.shutdown()
    engine.server_close()
