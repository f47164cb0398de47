"""Weights & Biases. Without an account: WANDB_MODE=offline keeps everything below the run folder."""

from __future__ import annotations

import configparser
import netrc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treadle.errors import ConfigError, MissingExtra
from treadle.log import get_logger
from treadle.track.sink import ForwardOnly, RunIdentity, Table

LOGIN_FIX = "run `wandb login`, set WANDB_API_KEY, or keep the run local with WANDB_MODE=offline"
_DECIDING_VARIABLES = (
    "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS", "WANDB_CONFIG_DIR", "WANDB_DIR",
)  # fmt: skip
_SETTINGS_FILES = ("~/.config/wandb/settings", "wandb/settings")
CLOSE_TIMEOUT_S = 20.0  # an upload that hangs must not keep a finished trainer alive
log = get_logger("track")


def check_login(env: Mapping[str, str]) -> None:
    """Refuse to log to W&B without an API key. Does not import wandb, which takes a second.

    wandb looks in more places than these; where any of them says something, it decides itself.
    """
    if env.get("WANDB_MODE", "online") != "online" or any(env.get(name) for name in _DECIDING_VARIABLES):
        return
    file = configparser.ConfigParser()
    try:
        file.read([Path(name).expanduser() for name in _SETTINGS_FILES], encoding="utf-8")
        if any({"mode", "base_url", "api_key", "anonymous"} & set(file[section]) for section in file.sections()):
            return
        host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        named = [env["NETRC"]] if env.get("NETRC") else ["~/.netrc", "~/_netrc"]
        logins = [Path(name).expanduser() for name in named]
        if any(path.exists() and netrc.netrc(path).authenticators(host) for path in logins):
            return
    except (OSError, ValueError, RuntimeError, configparser.Error, netrc.NetrcParseError):
        return
    raise ConfigError("W&B has no API key on this machine", fix=LOGIN_FIX)


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
                fix=LOGIN_FIX,
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
