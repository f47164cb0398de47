"""The clock that leaves out pauses of its process."""

from __future__ import annotations

import time

from treadle.background import LONGEST_STEP_S, _AwakeClock


def test_a_process_that_never_reads_its_clock_is_awake() -> None:
    clock = _AwakeClock()
    before_s = clock()
    time.sleep(2.5 * LONGEST_STEP_S)
    assert clock() - before_s > 1.5 * LONGEST_STEP_S  # less than all of it, where this machine is busy
