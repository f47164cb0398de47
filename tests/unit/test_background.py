"""Threads beside the main work of a process, and the clock that leaves out its pauses."""

from __future__ import annotations

import threading
import time

from treadle.background import LONGEST_STEP_S, BackgroundWorker, _AwakeClock


def test_a_process_that_never_reads_its_clock_is_awake() -> None:
    clock = _AwakeClock()
    before_s = clock()
    time.sleep(2.5 * LONGEST_STEP_S)
    assert clock() - before_s > 1.5 * LONGEST_STEP_S  # less than all of it, where this machine is busy


def test_the_threads_of_a_worker_end_with_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.worker = BackgroundWorker("owned", 3)

        def answer(self) -> int:
            return 42

    owner = Owner()
    assert [owner.worker.submit(owner.answer).result(10) for _ in range(5)] == [42] * 5
    threads = [thread for thread in threading.enumerate() if thread.name == "owned"]
    assert len(threads) == 3
    del owner
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
