"""Weights & Biases. Without an account: WANDB_MODE=offline keeps everything below the run folder."""

from __future__ import annotations

import threading
from typing import Any

from treadle.errors import ConfigError, MissingExtra
from treadle.log import get_logger
from treadle.track.sink import ForwardOnly, RunIdentity, Table

CLOSE_TIMEOUT_S = 20.0  # an upload that hangs must not keep a finished trainer alive
log = get_logger("track")


class WandbTracker(ForwardOnly):
    """One W&B run over all lives of our run.

    W&B cannot take a step back: steps that it has already are not sent again.
    """

    def __init__(self, identity: RunIdentity) -> None:
        super().__init__(identity)
        try:
            import wandb
        except ImportError:
            raise MissingExtra("--track wandb needs wandb", fix="pip install 'treadle[trackers]'") from None
        try:
            self._run = wandb.init(
                project=identity.project,
                group=identity.group,
                name=identity.name,
                id=identity.id,
                resume="allow",
                dir=identity.folder,
                config=dict(identity.config),
                # our own log stays ours, and nothing is asked on a terminal that nobody watches
                settings=wandb.Settings(console="off", silent=True, init_timeout=30.0),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"W&B refused: {str(error).splitlines()[0]}",
                fix="run `wandb login`, set WANDB_API_KEY, or keep the run local with WANDB_MODE=offline",
            ) from None
        log.info("wandb", run="offline" if self._run.offline else self._run.url, folder=str(identity.folder))

    def _as_table(self, table: Table) -> Any:
        import wandb

        # Columns may hold values of several kinds: a reward that could not be computed is empty.
        return wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows], allow_mixed_types=True)

    def close(self) -> None:
        finishing = threading.Thread(target=self._run.finish, name="wandb-finish", daemon=True)
        finishing.start()
        finishing.join(CLOSE_TIMEOUT_S)
        if finishing.is_alive():
            log.warning("wandb_not_finished", seconds=CLOSE_TIMEOUT_S, fix="upload the rest with `wandb sync`")
