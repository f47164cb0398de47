"""Signals that arrive while the trainer computes or saves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import time
from treadle.train.stop import StopRequested, StopSwitch

stop = StopSwitch(grace_s=0.5)
stop.install()
print("ready", flush=True)
{work}
try:
    stop.check()
except StopRequested:
    print("stopped in order", flush=True)
"""
COMPUTING = """
with stop.computing():
    time.sleep(600)
"""
SAVING = """
with stop.computing():
    pass
time.sleep(1.5)
print("saved", flush=True)
"""


def end(work: str, number: signal.Signals) -> tuple[float, int, str]:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(work=work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        asked = time.monotonic()
        program.send_signal(number)
        output, _ = program.communicate(timeout=60)
    return time.monotonic() - asked, program.returncode, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_computation_without_an_end_does_not_hold_up_a_stop(number: signal.Signals) -> None:
    seconds, code, output = end(COMPUTING, number)
    assert (code, output) == (0, "")
    assert 0.4 < seconds < 30


def test_what_is_being_saved_is_saved_however_long_it_takes() -> None:
    seconds, code, output = end(SAVING, signal.SIGTERM)
    assert (code, output) == (0, "saved\nstopped in order\n")
    assert seconds > 1.0
