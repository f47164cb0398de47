"""What an engine waits for, seen from its state again and again: to be let go, or for its model to finish something."""

from __future__ import annotations

from treadle.engines.port import EngineState
from treadle.watch.waits import Wait, Waits, Wanted
from treadle.watch.watchdog import About
from treadle.wire.hub import GENERATED_TOKENS, WorkReport


class EngineEye:
    """`eye.see(await engine.state())`, every few seconds; the watchdog does the rest."""

    def __init__(self, waits: Waits, patience_s: float) -> None:
        self._waits = waits
        self._patience_s = patience_s
        self._state: EngineState | None = None
        self._loading: WorkReport | None = None  # how far it has come, where that is known
        self._hold: Wait | None = None
        self._generation: Wait | None = None

    def loads(self, what: str, done: int, total: int) -> None:
        """Called before the first state."""
        self._loading = WorkReport(what=what, done=done, total=total)

    def see(self, state: EngineState) -> None:
        before, self._state = self._state, state
        requests = f"{state.num_running} requests that run and {state.num_waiting} that wait"
        self._hold = self._follow(
            self._hold,
            Wanted(
                f"the trainer to let it go: it is held to change version {state.policy_version}",
                of="trainer",
                holding=requests,
                deadline_s=self._patience_s,
                fix="the trainer's log says what it does",
            )
            if state.is_held
            else None,
        )
        moved = before is not None and before.num_moves != state.num_moves
        if moved and self._generation is not None:
            self._waits.end(self._generation, was_met=True)
            self._generation = None
        generates = state.num_running > 0 and not state.is_held
        answer = Wanted(
            "the model to get on with a completion", of="engine", holding=requests, deadline_s=self._patience_s
        )
        self._generation = self._follow(self._generation, answer if generates else None)

    def about(self) -> About:
        state = self._state
        if state is None:
            return About(state="loading", work=self._loading)
        if state.is_held:
            told = "held"
        elif state.num_running:
            told = f"generating {state.num_running}, {state.num_waiting} waiting"
        else:
            told = "idle"
        counts = {"moves": float(state.num_moves), GENERATED_TOKENS: float(state.generated_tokens)}
        return About(state=told, policy_version=state.policy_version, problem=state.failure or "", counts=counts)

    def _follow(self, wait: Wait | None, wanted: Wanted | None) -> Wait | None:
        """Begin a wait when there is something to wait for, end it when there is not; one that lasts stays as it is."""
        if wanted is None and wait is not None:
            self._waits.end(wait, was_met=True)
            return None
        return self._waits.begin(wanted) if wanted is not None and wait is None else wait
