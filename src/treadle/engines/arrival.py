"""New weights on their way into an engine that is held: until they are whole, and have a version, it may not go on."""

from __future__ import annotations

from treadle.errors import EngineError

REPUBLISH_FIX = "let the trainer publish again (treadle run --resume), or POST /bridge/restart"


class Arrival:
    """begin ──> came ──> named          as it should be: on their way, whole, served under a version
    ──> broke_off                     a mixture now; the next that comes whole mends it, or a restart
    """

    def __init__(self) -> None:
        self._problem: str | None = None  # why the weights are no version's; None: they are one's
        self._are_whole = True

    @property
    def is_settled(self) -> bool:
        """Whether the weights are those of the version that is served; else only all of them, anew, can mend that."""
        return self._problem is None

    def begin(self) -> None:
        self._problem, self._are_whole = "they are on their way", False

    def broke_off(self, reason: str) -> None:
        self._problem, self._are_whole = reason, False

    def came(self) -> None:
        self._problem, self._are_whole = "they have come, and nobody has said which version they are", True

    def named(self) -> None:
        """Or there are none any more: nothing was written, or the engine begins anew."""
        self._problem, self._are_whole = None, True

    def refuse_going_on(self, policy_version: int | None) -> None:
        """Whole weights may be served under a version that is named; a mixture, never."""
        if self._problem is None or (self._are_whole and policy_version is not None):
            return
        raise EngineError(
            f"new weights came in part, and nothing may be sampled from a mixture: {self._problem}"
            if not self._are_whole
            else f"new weights wait for their version: {self._problem}",
            fix=REPUBLISH_FIX,
        )
