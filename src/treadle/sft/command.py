"""Run the supervised stage from its settings to the result: `treadle sft`.

check -> prepare the model -> rows -> run folder -> trainer processes -> summary, and the command to type next
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle.background import awake_s
from treadle.config.load import load_run, save_run, with_absolute_paths
from treadle.config.schema import RunConfig, may_use_gpu
from treadle.config.sft import BATCH_SIZE, CHECKPOINT_INTERVAL, FULL_LR, LORA_LR, WARMUP_SHARE
from treadle.config.sync import SyncOptions
from treadle.config.train import ObjectiveOptions
from treadle.config.values import explicit_keys, with_values
from treadle.engines.model_folder import CheckpointFacts, read_checkpoint_facts
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.rows import SUFFIXES
from treadle.errors import ConfigError, Problems, TreadleError
from treadle.formatting import counted, duration, near, program
from treadle.launch import STOPPED_BY_USER
from treadle.launch import folder as run_folders
from treadle.launch.machine import MachineFacts, read_machine_facts
from treadle.launch.monitor import MemorySampler
from treadle.launch.preflight import absolute, check_one_model, model_of, prepare_model
from treadle.launch.process_plan import CONFIG_FILE, LOG_FOLDER, folder_of_copies
from treadle.launch.process_spec import ProcessSpec, child_environment
from treadle.launch.ranks import choose_layout, name_of_rank, rank_variables
from treadle.launch.restarts import Progress, TrainerRestarts
from treadle.launch.supervisor import Stopped, StopRequest, Supervisor
from treadle.report.history import History, HistoryReader, Step, check_is_run, reader_of
from treadle.report.summary import SUMMARY_FILE, Outcome, Summary, load_summary, save_summary, summarize
from treadle.sft.data import (
    HELD_OUT_ROWS,
    ROWS_FOLDER,
    TRAIN_ROWS,
    Example,
    Examples,
    load_examples,
    num_steps,
    save_examples,
    shared_start,
    split_off,
)
from treadle.sft.rollouts import check_tokenizer, load_rollouts
from treadle.support import fast_dtype
from treadle.sync.model_folders import local_folder
from treadle.train.requirements import check_layers, check_trainer

_say = partial(print, flush=True)
SHARING_PAYS = 0.98  # as for rollouts (train/pack.py)
RECENT_STEPS = 10  # of the time that is left: a mean
NUM_HEALTH_LINES = 3
# Settings of [train] that mean nothing without rollouts and an engine. How tokens are weighted is of use.
_OF_ROLLOUTS = {*ObjectiveOptions.model_fields, *SyncOptions.model_fields, "max_age", "hub_url", "engine_url"}
_OF_ROLLOUTS -= {"aggregation", "weight_bridge_mode"}
# With these and an advantage of 1, the loss of the training loop is the cross entropy (data.py).
_CROSS_ENTROPY = {
    "train.weight_bridge_mode": "offline", "train.surrogate": "cispo", "train.hub_url": "", "train.epochs": 1,
    "train.max_age": 0,
}  # fmt: skip


def start(config: RunConfig) -> int:
    """Exit code 0: done, 130: stopped by the user."""
    facts = read_machine_facts({})
    requested, explicit = config, explicit_keys(config)
    config = _checked(config, explicit, facts)
    model_folder = prepare_model(config.model, "sft")
    check_layers(config.train, Path(model_folder))
    model = read_checkpoint_facts(Path(model_folder))
    if model.max_positions is not None and model.max_positions < config.train.seq_len:
        config = with_values(config, {"train.seq_len": model.max_positions})
    tokenizer = ChatTokenizer.load(model.folder)
    examples = _examples(config, tokenizer, model.folder)
    config = _resolved(config, explicit, examples.train, model_folder)
    _describe(config, examples, tokenizer, model)
    if "train.save_path" in explicit:
        note = run_folders.check_checkpoints(config.train.save_path, config.steps)
        if note:
            _say(note)
    folder = run_folders.create_run_folder(config.output, _label(config))
    with run_folders.locked(folder):
        save_path = config.train.save_path if "train.save_path" in explicit else folder / "checkpoints"
        metrics = config.train.metrics_file or folder / "metrics.jsonl"
        own: dict[str, Any] = {"train.save_path": save_path, "train.metrics_file": metrics}
        own["train.checkpoint_url"] = folder_of_copies(config.train.checkpoint_url, folder)
        config = with_values(config, own)
        save_examples(examples.train, folder / ROWS_FOLDER / TRAIN_ROWS)
        save_examples(examples.held_out, folder / ROWS_FOLDER / HELD_OUT_ROWS)
        run_folders.save_request(requested, folder)
        save_run(config, folder / CONFIG_FILE)
        run_folders.save_versions(folder)
        return _train(config, folder, facts)


def resume(run_folder: Path, given: Mapping[str, Any]) -> int:
    """Go on from the last checkpoint of a supervised run, with the same rows and settings."""
    folder = run_folder.expanduser().resolve()
    check_is_run(folder)
    config = load_run(folder / CONFIG_FILE)
    if not config.is_supervised:
        raise ConfigError(f"{folder} is no supervised run", fix=f"{program()} run --resume {near(folder)}")
    if given:
        flag = "--" + min(given).removeprefix("sft.").replace("_", "-")
        raise ConfigError(f"a run keeps its settings; --resume cannot be with {flag}", fix="start a new run")
    with run_folders.locked(folder):
        summary = load_summary(folder)
        if summary is not None and summary.is_complete:
            _say(f"this run is complete: {counted(summary.steps_taken, 'step')} taken")
            _report(summary, reader_of(config, folder).read())
            return 0
        run_folders.check_disk_space(folder)
        return _train(config, folder, read_machine_facts({}))


# ---- settings


def _checked(config: RunConfig, explicit: frozenset[str], facts: MachineFacts) -> RunConfig:
    """Refuse what cannot be, all problems at once, before a model is downloaded."""
    problems = Problems()
    with problems.collected():
        if not config.sft.source:
            raise ConfigError(
                "there is nothing to train on",
                fix="--data FILE (JSONL, CSV or Parquet), --data ID of a dataset, or --from RUN, a run's completions",
            )
    for name in sorted(_OF_ROLLOUTS):
        if f"train.{name}" in explicit:
            flag = f"--train.{name.replace('_', '-')}"
            fix = "--epochs sets the passes over the rows" if name == "epochs" else f"leave {flag} out"
            with problems.collected():
                raise ConfigError(f"{flag} is a setting of treadle run: there are no rollouts and no engine", fix=fix)
    for name in ("data", "eval_data"):
        with problems.collected():
            _check_path(getattr(config.sft, name), name)
    if config.sft.from_run is not None:
        with problems.collected():
            config = _with_model_of_run(config, explicit)
    with problems.collected():
        check_one_model(config, explicit)
    with problems.collected():
        config = with_absolute_paths(config)
        names = {"model": model_of(config.model), "sft.data": config.sft.data, "sft.eval_data": config.sft.eval_data}
        config = with_values(config, _CROSS_ENTROPY | {key: absolute(name) for key, name in names.items()})
    with problems.collected():
        layout = choose_layout(config.model_copy(update={"engines": 0}), facts, explicit)
        config = with_values(config, layout.settings)
    with problems.collected():
        check_trainer(config.train, os.environ, local_folder(config.model))
    with problems.collected():
        warning = run_folders.check_disk_space(config.output)
        if warning:
            _say(f"warning: {warning}")
    problems.raise_all()
    return config


def _check_path(name: str, setting: str) -> None:
    is_file = name.startswith((".", "/", "~")) or name.endswith((*SUFFIXES, ".parquet"))
    if is_file and not Path(name).expanduser().exists():
        flag = "--" + setting.replace("_", "-")
        raise ConfigError(f"there is no file or folder {name}", fix=f"correct {flag}")


def _with_model_of_run(config: RunConfig, explicit: frozenset[str]) -> RunConfig:
    """The run's own model to begin with, unless the user named one."""
    folder = Path(config.sft.from_run or "").expanduser().resolve()
    check_is_run(folder)
    run = load_run(folder / CONFIG_FILE)
    if run.is_supervised:
        raise ConfigError(f"{folder} is a supervised run, which has no completions", fix="name a run of treadle run")
    values: dict[str, Any] = {"sft.from_run": folder}
    return with_values(config, values if "model" in explicit else values | {"model": run.model})


def _resolved(config: RunConfig, explicit: frozenset[str], rows: Sequence[Example], model_folder: str) -> RunConfig:
    """With everything that follows from the rows, and the defaults of this stage."""
    train = config.train
    is_gpu = may_use_gpu(train.device)
    defaults: dict[str, Any] = {
        "train.batch_size": BATCH_SIZE,
        "train.lr": LORA_LR if train.lora else FULL_LR,
        "train.checkpoint_interval": CHECKPOINT_INTERVAL,
        "train.merge_final": train.lora and train.quantization == "none",
        "train.dtype": fast_dtype("cuda" if is_gpu else "cpu"),
        "train.share_prompts": "on" if shared_start(rows) > 1 - SHARING_PAYS else "off",  # forwarded once a micro
        "train.seed": config.seed,
        "train.device": train.device,
    }
    chosen = {key: value for key, value in defaults.items() if key not in explicit}
    config = with_values(config, chosen | {"train.model": model_folder})
    steps = num_steps(len(rows), config.train.sequences_per_step, config.sft.epochs)
    for key in ("train.steps", "steps"):
        steps = config.steps if key == "steps" and key in explicit else steps
        steps = config.train.steps if key == "train.steps" and key in explicit else steps
    values: dict[str, Any] = {"steps": steps, "train.steps": steps}
    if "train.warmup_steps" not in explicit:
        values["train.warmup_steps"] = max(1, round(WARMUP_SHARE * steps))
    return with_values(config, values)


def _label(config: RunConfig) -> str:
    name = Path(config.sft.source).name.partition(".")[0].partition(":")[0]
    return f"sft-{name}"


# ---- rows


def _examples(config: RunConfig, tokenizer: ChatTokenizer, model_folder: Path) -> Examples:
    sft, seq_len = config.sft, config.train.seq_len
    if sft.from_run is None:
        return load_examples(sft, tokenizer, seq_len, _say)
    run = load_run(sft.from_run / CONFIG_FILE)
    check_tokenizer(run, sft.from_run, config.model, model_folder)
    return split_off(load_rollouts(run, sft.from_run, sft.min_score, seq_len, _say), sft.held_out)


def _describe(config: RunConfig, examples: Examples, tokenizer: ChatTokenizer, model: CheckpointFacts) -> None:
    train = examples.train
    num_tokens = sum(len(example.tokens) for example in train)
    num_trained = sum(int(example.is_trained.sum()) for example in train)
    _say(
        f"{counted(len(train), 'row')} with {num_tokens:,} tokens, {num_trained:,} of them trained; "
        f"{counted(len(examples.held_out), 'row')} held out"
    )
    num_cut_off = sum(example.is_cut_off for example in train)
    if num_cut_off:
        _say(f"{counted(num_cut_off, 'row')} cut off after {config.train.seq_len} tokens (--train.seq-len)")
    if examples.broken:
        _say(f"{counted(len(examples.broken), 'row')} skipped")
    if tokenizer.end_of_turn not in model.eos_ids:
        token = tokenizer.decode([tokenizer.end_of_turn], skip_special_tokens=False)
        _say(
            f"warning: engines do not stop at {token}, which ends a turn here: add {tokenizer.end_of_turn} to "
            "eos_token_id in the generation_config.json of the trained model"
        )
    passes = f", {config.sft.epochs} epochs" if config.sft.epochs > 1 else ""
    _say(
        f"{counted(config.steps, 'step')} of {counted(config.train.sequences_per_step, 'row')}{passes}; learning rate "
        f"{config.train.lr:g}, {config.train.dtype}"
    )


# ---- training


def _train(config: RunConfig, folder: Path, facts: MachineFacts) -> int:
    """The caller holds the lock of the folder."""
    earlier = load_summary(folder)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)  # the page takes a run with a summary for ended
    _say(f"run folder: {near(folder)}")
    _say(f"its page: {program()} dash {near(folder)}")
    reader = reader_of(config, folder)
    progress = ProgressLines(config, reader)
    stop = StopRequest()
    alarms: list[str] = []

    def note_restart(text: str) -> None:
        alarms.append(text)
        _say(text)

    def reached() -> Progress:
        return Progress(reader.read().last_step, run_folders.newest_checkpoint(config.train.save_path))

    restarts = TrainerRestarts(config.max_restarts, reached, note_restart)
    supervisor = Supervisor(stop, on_tick=progress.tick, on_wait=_say, restarts=restarts)
    memory = MemorySampler(lambda: supervisor.pids)
    is_complete, last_words = False, ""
    try:
        with stop.listening(), memory, supervisor, suppress(Stopped):
            supervisor.start(_processes(config, folder, facts))
            supervisor.watch(lambda: reader.read().last_step >= config.steps)
            is_complete = True
    except TreadleError as error:
        last_words = str(error)
        raise
    finally:
        progress.tick()
        took_s = progress.elapsed_s
        outcome = Outcome(
            is_complete, took_s, memory.peak_bytes, dict(memory.peak_by_process), last_words=last_words,
            restarts=tuple(alarms),
        )  # fmt: skip
        summary = summarize(config, folder, reader.read(), outcome.after(earlier))
        save_summary(summary, folder)
    if not is_complete:
        _say(f"stopped; continue with: {program()} sft --resume {near(folder)}")
        return STOPPED_BY_USER
    _report(summary, reader.read())
    return 0


def _processes(config: RunConfig, folder: Path, facts: MachineFacts) -> list[ProcessSpec]:
    """A trainer process for each rank: `treadle train --config RUN/config.json`."""
    ranks = config.train.ranks
    threads = config.train.threads or max(1, facts.num_cores // ranks)

    def spec(rank: int) -> ProcessSpec:
        argv: tuple[str, ...] = (facts.python, "-m", "treadle", "train", "--config", str(folder / CONFIG_FILE))
        argv += ("--trainer-rank", str(rank)) if rank else ()
        environment = child_environment(facts, threads=threads, is_offline=True) | rank_variables(rank, ranks)
        name = name_of_rank(rank)
        return ProcessSpec(name, argv, environment, folder / LOG_FOLDER / f"{name}.log")

    return [spec(rank) for rank in range(ranks)]


class ProgressLines:
    """Prints a line for each step that the trainer has taken."""

    def __init__(self, config: RunConfig, reader: HistoryReader) -> None:
        self._reader = reader
        self._num_steps = config.steps
        self._begun_s = awake_s()
        self._printed = max((int(step["step"]) for step in reader.read().steps), default=-1)

    @property
    def elapsed_s(self) -> float:
        return awake_s() - self._begun_s

    def tick(self) -> None:
        history = self._reader.read()
        if history.steps:  # a trainer that crashed repeats the steps since its checkpoint
            self._printed = min(self._printed, history.last_step)
        for place, step in enumerate(history.steps):
            if int(step["step"]) > self._printed:
                self._printed = int(step["step"])
                _say(self._line(step, history.steps[: place + 1]))

    def _line(self, step: Step, until: Sequence[Step]) -> str:
        number, held_out = int(step["step"]), step.get("eval_loss")
        shown = "" if held_out is None else f"  held-out loss {held_out:.4f}"
        if number == 0:
            return f"before training{shown}"
        width = len(str(self._num_steps))
        recent = [one["perf/step_s"] for one in until[-RECENT_STEPS:] if one.get("perf/step_s")]
        left_s = sum(recent) / max(1, len(recent)) * (self._num_steps - number)
        loss, speed = step.get("loss"), step.get("perf/forwarded_tok_s_wall_clock") or 0.0
        return (
            f"step {number:>{width}}/{self._num_steps}  loss {_shown(loss)}  {speed:,.0f} tokens/s  "
            f"{duration(left_s)} left{shown}"
        )


def _report(summary: Summary, history: History) -> None:
    console = Console()

    def row(name: str, value: str) -> None:
        console.print(f"  [dim]{name:<18}[/dim]  ", end="", highlight=False)
        console.print(value, highlight=False, markup=False, soft_wrap=True)

    console.print(
        f"\n[bold]{counted(summary.steps_taken, 'step')} in {duration(summary.total_s)}[/bold]", highlight=False
    )
    losses, held_out, speeds = (
        history.values(name) for name in ("loss", "eval_loss", "perf/forwarded_tok_s_wall_clock")
    )
    row("loss", f"{_shown(losses[0])} -> {_shown(losses[-1])}" if losses else "none")
    row("held-out loss", f"{held_out[0]:.4f} -> {held_out[-1]:.4f}" if held_out else "not measured: no rows held out")
    row("tokens per second", f"{sum(speeds) / max(1, len(speeds)):,.0f}")
    for line in summary.health[-NUM_HEALTH_LINES:]:
        row("health", line)
    row(summary.result_name, near(summary.final_model) if summary.final_model else "none")
    row("metrics", near(summary.metrics))
    run, command = near(summary.run), program()
    row("its page", f"{command} dash {run}")
    row("talk to it", f"{command} chat {run}")
    row("train it further", f"{command} run --model {run}")


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
