"""Trackio: on this machine, or on a Space or server of one's own (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)."""

from __future__ import annotations

from typing import Any

from treadle.errors import MissingExtra
from treadle.log import get_logger
from treadle.track.sink import ForwardOnly, RunIdentity, Table

log = get_logger("track")


class TrackioTracker(ForwardOnly):
    """One Trackio run over all lives of our run; it is known by its name, so the id is part of that.

    Trackio keeps every point: steps that it has already are not sent again.
    """

    def __init__(self, identity: RunIdentity) -> None:
        super().__init__(identity)
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
        log.info("trackio", project=identity.project, run=name)

    def _as_table(self, table: Table) -> Any:
        import trackio

        return trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])

    def close(self) -> None:
        self._run.finish()
