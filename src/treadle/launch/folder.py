"""A run's folder: made once, locked while a launcher uses it, refused when there is no room for it.

runs/20260102-030405-arithmetic-addition/
  config.json   every setting, resolved      request.json  the settings that the user gave
  metrics.jsonl evals/ checkpoints/ logs/    hub.sqlite    summary.json  reward.png
"""

from __future__ import annotations

import fcntl
import glob
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.config.load import replace_text
from treadle.config.schema import RunConfig
from treadle.config.secret_settings import without_secrets
from treadle.errors import ConfigError, DiskFull
from treadle.launch.machine import SHARED_MEMORY
from treadle.launch.plan import CONFIG_FILE
from treadle.launch.wording import gigabytes

REQUEST_FILE = "request.json"
_TOO_LITTLE_BYTES, _ENOUGH_BYTES = 2e9, 5e9


def create_run_folder(output: Path, name: str) -> Path:
    """`<output>/<YYYYMMDD-HHMMSS>-<name>`, with a number behind it when two runs start in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = output.resolve() / (f"{stamp}-{name}" + (f"-{number}" if number > 1 else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{output} holds a thousand runs of this second", fix="choose another --output")


def check_disk_space(output: Path) -> str:
    """A warning when room is short, "" when there is enough; DiskFull when no run can end well."""
    place = output.expanduser().resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < _TOO_LITTLE_BYTES:
        raise DiskFull(
            f"only {gigabytes(free)} are free where {output} is, and a run needs {gigabytes(_ENOUGH_BYTES)}",
            fix="free some space, or choose another disk with --output",
        )
    if free < _ENOUGH_BYTES:
        return f"only {gigabytes(free)} are free where {output} is; a run may need {gigabytes(_ENOUGH_BYTES)}"
    return ""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other launchers out; the lock ends with this process, however it ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"the run in {folder} is going on", fix="stop it first, or wait for its end") from None
        yield


def check_is_run(folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it holds no {CONFIG_FILE}",
            fix="name the folder that `treadle run` printed when it began",
        )


def check_queue_exists(config: RunConfig, last_step: int) -> None:
    """Refuse to resume a run that has begun and whose queue, with its batches and rollouts, was deleted."""
    has_begun = last_step > 0 or newest_checkpoint(config.train.save_path) > 0 or config.env.state_dir.exists()
    if has_begun and not config.hub.database.is_file():
        raise ConfigError(
            f"the queue of this run is gone: {config.hub.database}; without it the run would go on with other data",
            fix="restore it, or start a new run from a checkpoint: --model CHECKPOINT",
        )


def save_request(config: RunConfig, folder: Path) -> None:
    asked = without_secrets(config.model_dump(mode="json", exclude_unset=True))
    replace_text(folder / REQUEST_FILE, json.dumps(asked, indent=2) + "\n")


def requested_keys(folder: Path) -> frozenset[str]:
    """The dotted keys that the user gave when the run began; the rest may be settled anew."""
    file = folder / REQUEST_FILE
    try:
        asked = json.loads(file.read_bytes())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise _damaged(file, str(error)) from None
    if not isinstance(asked, dict):
        raise _damaged(file, "it holds no JSON object")
    return frozenset(_dotted(asked))


def _damaged(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{file} cannot be read: {problem}", fix="put back a copy of it")


def remove_stale_weights(folder: Path) -> None:
    """A launcher that was killed left its weights in memory; whoever holds the run's lock may remove them."""
    if SHARED_MEMORY.is_dir():
        # With what lies beside them: weights on a GPU have no file, but a gate.
        for path in SHARED_MEMORY.glob(f"treadle-{glob.escape(folder.name)}-*.weights*"):
            path.unlink(missing_ok=True)


def remove_weights(path: Path) -> None:
    """The file and what lies beside it under its name, such as the layout of the tensors."""
    for part in path.parent.glob(f"{glob.escape(path.name)}*"):
        part.unlink(missing_ok=True)


def _dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in values.items():
        keys += _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return keys


def newest_checkpoint(save_path: Path) -> int:
    """The step of the newest whole checkpoint, by its folder's name; 0 where there is none."""
    steps = [path.name.rpartition("step_")[2] for path in save_path.glob("*step_*") if not path.name.startswith(".")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)
