"""What a loop waits for, which may change from one look to the next."""

from __future__ import annotations

from typing import Self

from treadle.watch.waits import Wait, Waits, Wanted


def next_step(step: int, patience_s: float) -> Wanted:
    """What a trainer that has taken `step` steps is to do. Each step is a wait of its own, with a clock of its own."""
    return Wanted(f"the trainer to take step {step + 1}", of="trainer", deadline_s=patience_s)


class Pause:
    """One wait at most: `pause.wait_for(next_step(4, patience_s=600))`; None when there is something to do."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._wanted: Wanted | None = None
        self._wait: Wait | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._end(was_met=error is None)

    def wait_for(self, wanted: Wanted | None) -> None:
        """The same as before goes on; anything else begins now."""
        if wanted == self._wanted:
            return
        self._end(was_met=True)
        if wanted is not None:
            self._wanted, self._wait = wanted, self._waits.begin(wanted)

    def _end(self, *, was_met: bool) -> None:
        if self._wait is not None:
            self._waits.end(self._wait, was_met=was_met)
        self._wanted = self._wait = None
