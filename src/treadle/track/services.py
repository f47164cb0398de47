"""Log to TensorBoard, Trackio and Weights & Biases.

TensorBoard    by the tensorboard package's own writer: neither torch nor TensorFlow is needed
Trackio        on this machine, or on a Space or server (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)
W&B            without an account: WANDB_MODE=offline keeps everything below the run folder
"""

from __future__ import annotations

import configparser
import html
import netrc
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from treadle.errors import ConfigError, MissingExtra
from treadle.log import get_logger
from treadle.track.trackers import AppendOnlyTracker, Metric, RunIdentity, Table, finite_numbers

LOGIN_FIX = "run `wandb login`, set WANDB_API_KEY, or keep the run local with WANDB_MODE=offline"
_DECIDING_VARIABLES = (
    "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS", "WANDB_CONFIG_DIR", "WANDB_DIR",
)  # fmt: skip
_SETTINGS_FILES = ("~/.config/wandb/settings", "wandb/settings")
CLOSE_TIMEOUT_S = 20.0  # an upload that hangs must not keep a finished trainer alive
log = get_logger("track")


class TensorboardTracker:
    """Event files in `folder`; look at them with `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtra("--track tensorboard needs tensorboard", fix="pip install 'treadle[trackers]'") from None
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in finite_numbers(metrics).items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def log_table(self, step: int, table: Table) -> None:
        """As text, which its page "Text" shows as a table."""
        from tensorboard.plugins.text import summary_v2

        summary = summary_v2.text_pb(table.name, as_markdown(table))
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Mark the steps after `step` in earlier files as invalid."""
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=restart))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def as_markdown(table: Table) -> str:
    r"""A Markdown table; markup in the text of a model is escaped.

    >>> print(as_markdown(Table("t", ("question", "reward"), [("a|b\n<c>", 0.25)])))
    | question | reward |
    |---|---|
    | a&#124;b ↵ &lt;c&gt; | 0.25 |
    """
    head = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*head, *("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows)])


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return html.escape(value, quote=False).replace("|", "&#124;").replace("\n", " ↵ ")


class TrackioTracker(AppendOnlyTracker):
    """One Trackio run over all processes of a run. Trackio identifies it by its name, so the id is part of that."""

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
            auto_log_cpu=False,  # metrics of this run are under perf/
        )
        self._make_table = trackio.Table
        log.info("trackio", project=identity.project, run=name)

    def close(self) -> None:
        self._run.finish()


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


class WandbTracker(AppendOnlyTracker):
    """One W&B run over all processes of a run."""

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
                # no capture of the console, and no questions on the terminal
                settings=wandb.Settings(console="off", silent=True, init_timeout=30.0),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                f"W&B refused: {str(error).splitlines()[0]}",
                fix=LOGIN_FIX,
            ) from None
        # Columns may hold values of several kinds: a reward that could not be computed is empty.
        self._make_table = partial(wandb.Table, allow_mixed_types=True)
        log.info("wandb", run="offline" if self._run.offline else self._run.url, folder=str(identity.folder))

    def close(self) -> None:
        finishing = threading.Thread(target=self._run.finish, name="wandb-finish", daemon=True)
        finishing.start()
        finishing.join(CLOSE_TIMEOUT_S)
        if finishing.is_alive():
            log.warning("wandb_not_finished", seconds=CLOSE_TIMEOUT_S, fix="upload the rest with `wandb sync`")
