"""Run the weight modes one after another on the same task and seed, and compare them (`treadle matrix`).

settings -> for each mode: an ordinary `treadle run` in FOLDER/<mode> -> row -> FOLDER/matrix.{txt,json,png,html}

runs/20260102-030405-matrix-arithmetic-addition/
  request.json   the settings that the user gave    matrix.json   the modes and their rows, written after each mode
  lora_only/20260102-030405-arithmetic-addition/    the run of a mode, as `treadle run` makes it
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treadle.budget.hardware import find_gpu, host_memory
from treadle.config.files import NOT_STORED, require_secrets, secrets_in, without_secrets
from treadle.config.load import load_run, parse, replace_text, suggest
from treadle.config.schema import RunConfig
from treadle.config.section import set_value
from treadle.config.values import choose_steps, explicit_keys, keys_in, value_of, with_fitting_groups
from treadle.errors import ConfigError, MissingExtra, Problems, TreadleError, as_path_error, as_user_error
from treadle.formatting import gigabytes, near, program
from treadle.launch import STOPPED_BY_USER, resume, start
from treadle.launch import folder as run_folders
from treadle.launch.machine import count_cores
from treadle.launch.matrix_table import (
    COLUMNS,
    Matrix,
    ModeRow,
    draw_plot,
    one_sentence,
    render_page,
    row_of,
    text_of,
    verdict,
)
from treadle.launch.preflight import check_one_model, resolve_paths, run_label, settle_environments
from treadle.launch.process_plan import CONFIG_FILE
from treadle.report.page import PAGE_FILE, render_report
from treadle.report.summary import load_summary, read_record
from treadle.support import MATRIX_MODES as MODES
from treadle.support import WEIGHT_MODES
from treadle.track.plot import load_pyplot
from treadle.train.requirements import check_trainer

MATRIX_FILE = "matrix.json"
_say = partial(print, flush=True)
# The settings of the trainer that define a mode, with their defaults.
_MODE_SETTINGS = MappingProxyType(
    {"weight_bridge_mode": "shared_vllm", "single_copy": False, "use_shared_memory": False, "broadcast_by": "auto"}
)
_SEVERAL = {"all": tuple(MODES), "shared_vllm": ("single_copy", "broadcast")}
# Files, folders and servers of one run: a mode that shared them would continue the run of another mode.
_OF_ONE_RUN = (
    "hub_url", "engine_url", "hub.database", "hub.run_folder", "train.save_path", "train.metrics_file",
    "train.live_path", "train.hub_url", "train.engine_url", "engine.weights_file", "engine.adapter_root",
    "env.data_dir_to_save_evals", "env.state_dir", "env.hub_url", "openai.base_url",
)  # fmt: skip


def parse_modes(text: str) -> tuple[str, ...]:
    """The modes that `--modes` names, each once, in the order given.

    >>> parse_modes("lora_only,shared_vllm")
    ('lora_only', 'single_copy', 'broadcast')
    """
    found: dict[str, None] = {}
    for name in text.replace("-", "_").replace(",", " ").split():
        if name not in MODES and name not in _SEVERAL:
            known = f"known: {', '.join([*MODES, *_SEVERAL])}"
            hint = suggest(name, MODES)
            if name in WEIGHT_MODES and not WEIGHT_MODES[name].publishes:
                hint = "it trains from recorded batches, without an engine"
            raise ConfigError(f"--modes: there is no mode '{name}' to compare", fix=f"{hint}; {known}".lstrip("; "))
        found |= dict.fromkeys(_SEVERAL.get(name, (name,)))
    if not found:
        raise ConfigError("--modes names no mode", fix=f"known: {', '.join([*MODES, *_SEVERAL])}")
    return tuple(found)


def load_settings(file: Path | None, flags: Mapping[str, Any]) -> RunConfig:
    """Settings that all modes share. A file may name a mode, as for `treadle run`; flags may not."""
    named = [key for key in _MODE_SETTINGS if f"train.{key}" in flags]
    if named:
        flag = "--train." + named[0].replace("_", "-")
        raise ConfigError(f"{flag} chooses one mode, and a matrix compares several", fix="give --modes")
    defaults = {f"train.{key}": value for key, value in _MODE_SETTINGS.items()}
    return load_run(file, {**flags, **defaults}, with_derived=False)


def start_matrix(config: RunConfig, modes: Sequence[str], *, plain: bool) -> int:
    """Run every mode. Exit code 0: all passed that can run here, 1: some failed, 130: stopped by the user."""
    check_settings(config, modes)
    check_trainer(config.train, os.environ)
    config = with_settled_paths(config)  # also of ~/runs
    folder = run_folders.create_run_folder(config.output, f"matrix-{run_label(config)}")
    with run_folders.locked(folder):
        run_folders.save_request(config, folder)
        return _Runner(folder, config, modes, plain=plain).run({})


def resume_matrix(matrix_folder: Path, given: RunConfig, modes: Sequence[str] | None, *, plain: bool) -> int:
    """Run the modes that have not finished. `given` and `modes`: flags of this command, which may repeat those of the
    start and give its secrets again, but change nothing."""
    folder = matrix_folder.expanduser().resolve()
    saved = _load(folder)
    given, begun = with_settled_paths(given), load_run(folder / run_folders.REQUEST_FILE)
    refuse_other_settings(given, begun)
    if modes is not None and list(modes) != saved["modes"]:
        raise ConfigError(
            f"this matrix has the modes {','.join(saved['modes'])}, and --modes says {','.join(modes)}",
            fix="leave --modes out, or start a new matrix",
        )
    merged = _merged(begun.model_dump(exclude_unset=True), given.model_dump(exclude_unset=True))
    config = parse(RunConfig, merged, source="the command line")
    require_secrets(config.model_dump(mode="json"))
    errors = {row["mode"]: row["reason"] for row in saved["rows"] if row["result"] == "failed"}
    with run_folders.locked(folder):
        return _Runner(folder, config, saved["modes"], plain=plain).run(errors)


def check_settings(config: RunConfig, modes: Sequence[str]) -> None:
    """Refuse settings with which no mode can run, before a folder is made."""
    explicit = explicit_keys(config)
    named = [key for key in _OF_ONE_RUN if keys_in(config, [key]) & explicit]
    if named:
        flag = "--" + named[0].replace("_", "-")
        raise ConfigError(
            f"{flag} would be the same for all modes, and each needs a hub, an engine and a folder of its own",
            fix="leave it out",
        )
    problems = Problems()
    settle_environments(config, problems)
    problems.raise_all()
    choose_steps(config, explicit)
    refused = [error for mode in modes if (error := refusal(config, mode)) is not None]
    if len(refused) == len(modes):
        raise refused[0]


def refusal(config: RunConfig, mode: str) -> ConfigError | None:
    """Why a mode cannot run with these settings, such as `single_copy` with --train.lora; None if it can."""
    try:
        run = settings_of(config, mode, config.output)
        explicit = explicit_keys(run)
        run = with_fitting_groups(run, explicit)
        run.check_together()
        check_one_model(run, explicit)
    except ConfigError as error:
        return error
    return None


def with_settled_paths(config: RunConfig) -> RunConfig:
    """The given settings with absolute paths, so that a matrix can be resumed from another folder."""
    settled, values = resolve_paths(config), config.model_dump(exclude_unset=True)
    for key in explicit_keys(config):
        set_value(values, key, value_of(settled, key))
    return parse(RunConfig, values, source="the command line")


def refuse_other_settings(given: RunConfig, begun: RunConfig) -> None:
    """All runs of a matrix have the settings with which it was started, because they are compared."""
    for key in sorted(explicit_keys(given)):
        now, then = value_of(given, key), value_of(begun, key)
        if now != then and NOT_STORED not in str(then):
            name = key.rpartition(".")[2]
            was, wished = (without_secrets({name: value})[name] for value in (then, now))
            raise ConfigError(
                f"this matrix was started with {key} {was}; --resume cannot change it to {wished}",
                fix="leave it out, or start a new matrix",
            )


def settings_of(config: RunConfig, mode: str, folder: Path) -> RunConfig:
    """The settings of one mode's run, in a folder of its own."""
    own = {"output": folder / mode, "train": {**_MODE_SETTINGS, **MODES[mode]}}
    return parse(RunConfig, _merged(config.model_dump(exclude_unset=True), own), source=f"mode {mode}")


def flags_of(mode: str) -> str:
    """The flags of `treadle run` for a mode: "--train.weight-bridge-mode lora_only"."""
    words = [(f"--train.{key.replace('_', '-')}", value) for key, value in MODES[mode].items()]
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in words)


def obstacle(mode: str, num_gpus: int) -> str:
    """Why a mode cannot run on a machine with this many GPUs; "" if it can."""
    if mode == "broadcast_nccl" and num_gpus < 2:
        has = "none" if num_gpus == 0 else "only one"
        return f"NCCL needs a GPU for the trainer and another for the engine, and this machine has {has}"
    return ""


class _Runner:
    """Runs the modes of one matrix and writes its files; the caller holds the folder's lock."""

    def __init__(self, folder: Path, config: RunConfig, modes: Sequence[str], *, plain: bool) -> None:
        self._folder = folder
        self._config = config
        self._modes = modes
        self._plain = plain
        self._num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        self._machine = describe_machine()

    def run(self, errors: Mapping[str, str]) -> int:
        """`errors`: of modes that failed before, by mode."""
        rows = {mode: self._row_of(mode, errors.get(mode, "")) for mode in self._modes}
        _say(f"matrix folder: {self._folder}")
        with contextlib.suppress(MissingExtra):  # imported now, so that the measured memory of all modes includes it
            load_pyplot()
        for number, mode in enumerate(self._modes, start=1):
            self._save(rows)
            heading = f"\nmode {number} of {len(self._modes)}, {mode}:"
            if rows[mode].result == "not possible" or _is_complete(self._run_folder(mode)):
                _say(f"{heading} {verdict(rows[mode])}")
                continue
            _say(f"{heading} {program()} run {flags_of(mode)} ...")
            code, error = self._run_mode(mode)
            rows[mode] = self._row_of(mode, error)
            if code == STOPPED_BY_USER:
                break
            if rows[mode].result == "failed":
                _say(f"{mode} failed: {rows[mode].reason}")
        matrix = self._save(rows)
        problem = self._write_pictures(matrix)
        _say(f"\n{text_of(matrix)}")
        for name in ("matrix.txt", MATRIX_FILE, "matrix.png", "matrix.html"):
            if (self._folder / name).exists():
                _say(near(self._folder / name))
        if problem:
            _say(f"no plot: {problem}")
        results = [row.result for row in matrix.rows]
        if "stopped" in results or "not run" in results:
            _say(f"stopped; continue with: {program()} matrix --resume {near(self._folder)}")
            return STOPPED_BY_USER
        return 0 if "failed" not in results and "passed" in results else 1

    def _run_mode(self, mode: str) -> tuple[int, str]:
        """(exit code, error) of its run; an interrupted run is resumed."""
        run = self._run_folder(mode)
        try:
            if run is not None:
                secrets = secrets_in(self._config.model_dump(mode="json"))
                return resume(run, secrets, plain=self._plain), ""
            return start(settings_of(self._config, mode, self._folder), plain=self._plain), ""
        except TreadleError as error:
            return error.exit_code, str(error)
        except OSError as error:  # such as a full disk or a busy port; the next mode may run
            user_error = as_user_error(error) or as_path_error(error)
            if user_error is None:
                raise
            return user_error.exit_code, str(user_error)

    def _row_of(self, mode: str, error: str) -> ModeRow:
        """The row of a mode from its folder; `error`: why its run failed."""
        flags = flags_of(mode)
        refused = refusal(self._config, mode)
        reason = obstacle(mode, self._num_gpus) if refused is None else one_sentence(refused.message)
        if reason:
            return ModeRow(mode, "not possible", reason, flags)
        run = self._run_folder(mode)
        if run is not None:
            return row_of(mode, flags, read_record(run), str(run.relative_to(self._folder)), error)
        return ModeRow(mode, "failed" if error else "not run", one_sentence(error), flags)

    def _run_folder(self, mode: str) -> Path | None:
        """The newest run of a mode, if it has begun."""
        begun = sorted(path.parent for path in (self._folder / mode).glob(f"*/{CONFIG_FILE}"))
        return begun[-1] if begun else None

    def _save(self, rows: Mapping[str, ModeRow]) -> Matrix:
        """Write the table after every mode, so that results are kept if the matrix is interrupted."""
        config = self._config
        matrix = Matrix(
            name=self._folder.name,
            task=config.task_name if config.envs else f"{config.env.own_name}-{config.env.task_name}",
            model=Path(config.model).name if Path(config.model).is_dir() else config.model,
            seed=config.seed,
            steps=choose_steps(config, explicit_keys(config)),
            machine=self._machine,
            date=time.strftime("%Y-%m-%d"),
            rows=tuple(rows.values()),
        )
        columns = {column.key: f"{column.title} ({column.unit}): {column.meaning}" for column in COLUMNS}
        saved = {"modes": list(self._modes), **asdict(matrix), "columns": columns}
        replace_text(self._folder / MATRIX_FILE, json.dumps(saved, indent=2, allow_nan=False) + "\n")
        (self._folder / "matrix.txt").write_text(text_of(matrix), encoding="utf-8")
        return matrix

    def _write_pictures(self, matrix: Matrix) -> str:
        """Write plot, page and the report of each run. Returns why the plot could not be drawn, or ""."""
        picture, problem = self._folder / "matrix.png", ""
        try:
            if any(row.figures for row in matrix.rows):
                draw_plot(matrix, picture)
        except MissingExtra as error:
            problem = str(error)
        drawn = picture.read_bytes() if picture.exists() else b""
        (self._folder / "matrix.html").write_text(render_page(matrix, drawn), encoding="utf-8")
        for row in matrix.rows:
            if row.run:
                run = self._folder / row.run
                (run / PAGE_FILE).write_text(render_report(read_record(run)), encoding="utf-8")
        return problem


def describe_machine() -> str:
    """ "2 cores, 8.0 GB of memory, no GPU, Linux x86_64"."""
    gpu = find_gpu()
    cores = count_cores()
    return ", ".join(
        (
            f"{cores} core{'s' if cores > 1 else ''}",
            f"{gigabytes(host_memory())} of memory",
            "no GPU" if gpu is None else gpu[0],
            f"{platform.system()} {platform.machine()}",
        )
    )


def _load(folder: Path) -> dict[str, Any]:
    """The saved matrix: its modes and rows."""
    file = folder / MATRIX_FILE
    try:
        saved = json.loads(file.read_bytes())
        modes, rows = saved["modes"], saved["rows"]
        if not modes or not set(modes) <= set(MODES):
            raise ValueError(f"it names the modes {modes}")
        return {"modes": modes, "rows": [{key: row[key] for key in ("mode", "result", "reason")} for row in rows]}
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} is not the folder of a matrix: it holds no {MATRIX_FILE}",
            fix="name the folder that `treadle matrix` printed when it began",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="put back a copy of it") from None


def _is_complete(run: Path | None) -> bool:
    summary = load_summary(run) if run is not None else None
    return summary is not None and summary.is_complete


def _merged(values: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated with `over`, section by section."""
    merged = dict(values)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged
