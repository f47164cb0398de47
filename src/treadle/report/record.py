"""Read all that a run has left in its folder: settings, history, summary, versions, alarms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config.load import load_run
from treadle.config.schema import RunConfig
from treadle.dash.run_folder import CONFIG_FILE, read_object
from treadle.errors import ConfigError
from treadle.report.history import History, reader_of
from treadle.report.summary import Outcome, Summary, load_summary, summarize

VERSIONS_FILE = "versions.json"
_LATE = re.compile(r"^(?P<when>\S+) ERROR[^\S\n]+watchdog late (?P<rest>.*)$", re.MULTILINE)
_ENGINE = re.compile(r"\bengine loaded engine=(?P<kind>\S+) version=(?P<version>\S+)")


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    config: RunConfig
    requested: frozenset[str]  # dotted keys of the settings that the user gave
    history: History
    summary: Summary
    versions: Mapping[str, str]
    engines: tuple[str, ...]  # "vllm 0.32.0"; several if it changed at a resume
    alarms: tuple[str, ...]


def check_is_run(folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it holds no {CONFIG_FILE}",
            fix="name the folder that `treadle run` printed when it began",
        )


def read_record(folder: Path) -> RunRecord:
    config = load_run(folder / CONFIG_FILE)
    history = reader_of(config, folder).read()
    saved = load_summary(folder)
    outcome = (
        Outcome(is_complete=False, total_s=history.last("time_s") or 0.0)
        if saved is None
        else Outcome(
            saved.is_complete,
            saved.total_s,
            saved.peak_memory_bytes,
            saved.peak_memory_by_process,
            tuple(saved.alarms),
            tuple(saved.findings),
            saved.last_words,
        )
    )
    logs = {log.stem: log.read_text(errors="replace") for log in sorted((folder / "logs").glob("*.log"))}
    # Waits that took longer than is normal, as the watchdog of each process logged them.
    late = [
        f"{found['when']} {process}: late {found['rest']}"
        for process, text in logs.items()
        for found in _LATE.finditer(text)
    ]
    engines = [f"{found['kind']} {found['version']}" for found in _ENGINE.finditer(logs.get("engine", ""))]
    return RunRecord(
        folder=folder,
        config=config,
        requested=frozenset(flatten(read_object(folder / "request.json"))),
        history=history,
        summary=summarize(config, folder, history, outcome),
        versions={str(name): str(version) for name, version in read_object(folder / VERSIONS_FILE).items()},
        engines=tuple(dict.fromkeys(engines)),
        # The launcher's lines say more; a run that goes on, or was started by hand, has only those in the logs.
        alarms=outcome.alarms or tuple(late),
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key: {"train": {"lr": 1e-5}} -> {"train.lr": 1e-5}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        tables = {str(place): table for place, table in enumerate(value)} if name == "envs" else value
        is_section = isinstance(tables, dict) and name != "args"
        flat |= flatten(tables, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat
