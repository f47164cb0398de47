"""Trackio: on this machine, or on a Space or server of one's own (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.errors import MissingExtra
from treadle.log import get_logger
from treadle.track.sink import Metric, RunIdentity, finite_numbers

log = get_logger("track")


class TrackioTracker:
    """One Trackio run over all lives of our run; it is known by its name, so the id is part of that.

    Trackio keeps every point: steps that it has already are not sent again.
    """

    def __init__(self, identity: RunIdentity) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingExtra("--track trackio needs trackio", fix="pip install 'treadle[trackio]'") from None
        name = f"{identity.name}-{identity.id}"
        self._run = trackio.init(
            identity.project,
            name=name,
            group=identity.group,
            config=dict(identity.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # the machine's load is not the run's; ours stand under perf/
        )
        self._sent_until = identity.sent_until
        log.info("trackio", project=identity.project, run=name)

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        if step > self._sent_until:
            self._run.log(finite_numbers(metrics), step=step)
            self._sent_until = step

    def truncate_after(self, step: int) -> None:
        return  # see `log`

    def close(self) -> None:
        self._run.finish()
