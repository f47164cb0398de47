"""Run a job from its settings to the report: start it, or resume it.

check -> prepare the model -> run folder -> plan -> supervise (with a view) -> summary, plot, report
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle.budget.command import show_what_fits
from treadle.budget.shapes import read_shape
from treadle.config import DEFAULT_MODEL
from treadle.config.files import require_secrets
from treadle.config.load import load_run, save_run
from treadle.config.schema import RunConfig
from treadle.config.values import choose_steps, explicit_keys, keys_in, with_values
from treadle.errors import ConfigError, ModelError, ProcessDied, TreadleError, UserError, is_out_of_memory
from treadle.formatting import counted, near, program
from treadle.launch import folder as run_folders
from treadle.launch.attachment import (
    AttachedRun,
    attach,
    check_live_folder,
    merge_addresses,
    unused_settings,
)
from treadle.launch.child_process import KILLED
from treadle.launch.folder import save_versions
from treadle.launch.machine import Listeners, held_ports, of_this_machine, port_of, read_machine_facts
from treadle.launch.machines import describe_machines, facts_on, place_processes
from treadle.launch.monitor import MemorySampler, RunMonitor
from treadle.launch.mps import under_mps
from treadle.launch.placement import Placement
from treadle.launch.places import RunPlaces, on_machines, run_places
from treadle.launch.preflight import (
    checked_resume,
    checked_start,
    prepare_model,
    read_tokens,
    resolve_paths,
    run_label,
)
from treadle.launch.process_plan import (
    CONFIG_FILE,
    LOG_FOLDER,
    RunPlan,
    build_plan,
    engines_of_machine,
    server_addresses,
)
from treadle.launch.process_spec import AccessTokens
from treadle.launch.restarts import EngineRestarts, Progress, Replacements, TrainerRestarts
from treadle.launch.supervisor import Stopped, StopRequest, Supervisor
from treadle.launch.view import RunPage, Screen, ViewState, choose_view, current_phase
from treadle.net.address import shown_url, without_token
from treadle.net.probe import answers_ok, get_json
from treadle.report.history import HistoryReader, check_is_run, reader_of
from treadle.report.summary import (
    Outcome,
    Summary,
    draw_plot,
    load_summary,
    print_report,
    save_summary,
    summarize,
)
from treadle.train.requirements import check_layers

_say = partial(print, flush=True)
LAST_ANSWER_S = 10.0  # long, because the hub is idle by then and must answer
# The numbering of waves and steps depends on these.
_FIXED_SETTINGS = (
    "model", "seed", "output", "env", "env.name", "env.task", "env.group_size", "env.wandb_name", "train.batch_size",
    "train.gradient_accumulation_steps", "hub.database", "hub.fresh",
)  # fmt: skip


def start_run(config: RunConfig, *, plain: bool, open_page: bool = False) -> Summary:
    """Train to the end; `is_complete` of the summary is False if the user stopped it."""
    require_secrets(config.model_dump(mode="json"))  # of another run's config.json
    with run_places(config) as places:
        return _start_on(places, config, plain=plain, open_page=open_page)


def _start_on(places: RunPlaces, config: RunConfig, *, plain: bool, open_page: bool) -> Summary:
    requested, explicit = config, explicit_keys(config)
    config, placed = on_machines(config, explicit, places)
    facts = facts_on(read_machine_facts({}), config, places.machines)
    with checked_start(config, explicit | placed, _say, facts) as ready:
        config, listeners = ready
        if config.hub.store:  # a new run begins with an empty queue; one that is in the database is renamed
            config = with_values(config, {"hub.fresh": True})
        if "train.save_path" in explicit:
            note = run_folders.check_checkpoints(config.train.save_path, choose_steps(config, explicit))
            if note:
                _say(note)
        tokens = read_tokens(config)
        attached = attach(config, explicit, tokens, _say)
        model_folder = prepare_model(attached.config.model)
        check_layers(attached.config.train, Path(model_folder))
        plan_in = _planner(attached, model_folder, explicit, explicit, tokens, listeners, places, placed)
        plan_in(config.output)  # refuses contradicting settings before a folder is made
        folder = run_folders.create_run_folder(config.output, run_label(config))
        with run_folders.locked(folder):
            run_folders.save_request(requested, folder)
            placement = places.placement(listeners)
            return _run(plan_in(folder), explicit, placement, plain=plain, open_page=open_page)


def resume_run(run_folder: Path, overrides: dict[str, Any], *, plain: bool, open_page: bool = False) -> Summary:
    """Like `start_run`, from the last checkpoint of the run in `run_folder`."""
    folder = run_folder.expanduser().resolve()
    check_is_run(folder)
    for key in overrides:
        if re.sub(r"^envs\.\d+\.", "env.", key) in _FIXED_SETTINGS:
            raise ConfigError(f"a run keeps its {key}; --resume cannot change it", fix="start a new run")
    steps = overrides.get("steps", overrides.get("train.steps"))
    if steps is not None:
        overrides = {"steps": steps, "train.steps": steps, **overrides}
    if "env.max_age" in overrides:
        overrides = {"max_age": overrides["env.max_age"], **overrides}
    with run_folders.locked(folder), ExitStack() as opened:
        # --hub.fresh applies to the start of a run: now the queue has its batches.
        config = load_run(folder / CONFIG_FILE, {**overrides, "hub.fresh": False})
        if config.is_supervised:
            raise ConfigError(f"{folder} is a supervised run", fix=f"{program()} sft --resume {near(folder)}")
        given = keys_in(config, overrides)
        config = merge_addresses(config, given)
        _check_same_queue(config, folder)
        config.check_together()
        config = resolve_paths(config)
        run_folders.check_disk_space(folder)
        summary = load_summary(folder)
        if summary is not None and summary.steps_taken > config.steps:
            raise ConfigError(
                f"{counted(summary.steps_taken, 'step')} taken already", fix=f"--steps {summary.steps_taken + 1}"
            )
        if summary is not None and summary.is_complete and summary.steps_taken >= config.steps:
            _say(f"this run is complete: {counted(summary.steps_taken, 'step')} taken; more with --steps")
            print_report(summary, Console())
            return summary
        require_secrets(config.model_dump(mode="json"))
        config = checked_resume(config)
        explicit = run_folders.requested_keys(folder) | given
        places = opened.enter_context(run_places(config))
        config, placed = on_machines(config, explicit, places)
        prepared = Path(config.engine.model)
        with held_ports(of_this_machine(server_addresses(config)), explicit) as listeners:
            tokens = read_tokens(config)
            last_step = reader_of(config, folder).read().last_step
            attached = attach(config, explicit | {"model"}, tokens, _say, last_step)  # it keeps its model
            model_folder = str(prepared) if prepared.is_dir() else prepare_model(config.model)
            plan = _planner(attached, model_folder, explicit, given, tokens, listeners, places, placed)(folder)
            run_folders.check_queue_exists(plan.config, folder, last_step)
            _say_repeated_steps(plan.config, last_step)
            placement = places.placement(listeners)
            return _run(plan, explicit, placement, plain=plain, open_page=open_page)


def _check_same_queue(config: RunConfig, folder: Path) -> None:
    """A hub may move to another address, but a run cannot switch between its own hub and an attached one."""
    before = load_run(folder / CONFIG_FILE).hub_url
    if bool(before) != bool(config.hub_url):
        where = f"at the hub {shown_url(before)}" if before else "in a hub of its own"
        raise ConfigError(f"the queue of this run is {where}; --resume cannot change that", fix="start a new run")


def _say_repeated_steps(config: RunConfig, last_step: int) -> None:
    """Steps after the last checkpoint are trained again, on the batches that were recorded for them."""
    saved = run_folders.newest_checkpoint(config.train.save_path)
    if saved < last_step:
        steps = f"step {last_step}" if saved + 1 == last_step else f"steps {saved + 1} to {last_step}"
        _say(f"{steps} came after the last checkpoint: trained again, on the same batches from the queue")


def _planner(
    attached: AttachedRun,
    model_folder: str,
    explicit: frozenset[str],
    given: frozenset[str],
    tokens: AccessTokens,
    listeners: Listeners,
    places: RunPlaces,
    placed: frozenset[str],
) -> Callable[[Path], RunPlan]:
    """A function that plans the run in a folder; `given`: keys of this command line; `placed`: keys that follow from
    the machines."""
    model = attached.config.model
    ports = {name: port for name, (_, port) in server_addresses(attached.config).items()}
    ports |= {name: port_of(listener) for name, listener in listeners.items()}
    facts = facts_on(read_machine_facts(ports), attached.config, places.machines)

    try:
        shape = read_shape(Path(model_folder) / "config.json")
    except ModelError:  # of a family that is not counted: the engine gets one GPU
        shape = None

    def plan_in(folder: Path) -> RunPlan:
        plan = build_plan(
            attached.config,
            facts,
            run_folder=folder,
            model_folder=model_folder,
            is_model_local=model == DEFAULT_MODEL or Path(model).expanduser().is_dir(),
            explicit=explicit | placed | attached.decided,
            tokens=tokens,
            notes=(*attached.notes, *unused_settings(attached.config, given)),
            shape=shape,
        )
        if attached.engine is not None:
            check_live_folder(plan.config, attached.engine)
        config = attached.config
        settled = {*config.keys_of_envs("pace"), *config.keys_of_envs("group_size")}  # by preflight.py
        chosen = (attached.derived | settled | placed) - explicit
        processes = place_processes(plan.processes, places.machines, engines_of_machine(plan.config, facts))
        notes = plan.notes
        if config.cluster.scheduler != "local":
            notes += describe_machines(processes, places.machines)
        return replace(
            plan, processes=processes, notes=notes, is_env_last=attached.was_begun, derived=plan.derived | chosen
        )

    return plan_in


def _run(plan: RunPlan, explicit: frozenset[str], placement: Placement, *, plain: bool, open_page: bool) -> Summary:
    """The caller holds the lock of the folder."""
    folder = plan.run_folder
    run_folders.remove_stale_weights(folder)
    history = reader_of(plan.config, folder)
    save_run(plan.config, folder / CONFIG_FILE, plan.derived)
    save_versions(folder)
    page = RunPage(without_token(plan.hub_url), plan.watch_url)
    _say(f"run folder: {folder}")
    _say(page.announcement(opens=open_page))
    if plan.config.hub_url:
        _say(f"the page shows the steps of this run if the hub was started with --run-folder {folder}")
    for note in plan.notes:
        _say(note)
    earlier = load_summary(folder)
    session = RunSession(plan, history, placement)
    try:
        session.run(plain=plain, on_served=page.open if open_page else None)
    except TreadleError as error:
        session.last_words = str(error)
        if is_out_of_memory(session.last_words):
            show_what_fits(plan.config, Console(stderr=True), of_host=KILLED in session.last_words)
        if history.read().last_step > 0:
            advice = run_folders.resume_advice(plan.config, folder, history.read().last_step)
            sys.stderr.write(f"what was done is kept; {advice}\n")
        raise
    finally:
        if plan.config.engine.weights_file is not None and "engine.weights_file" not in explicit:
            run_folders.remove_weights(plan.config.engine.weights_file)
        if not folder.is_dir():
            raise UserError(f"the run's folder was deleted while the run went on: {folder}", fix="start a new run")
        summary = summarize(plan.config, folder, history.read(), session.outcome().after(earlier))
        save_summary(summary, folder)
    if not summary.is_complete:
        _say(f"stopped; {run_folders.resume_advice(plan.config, folder, history.read().last_step)}")
        return summary
    problem = draw_plot(history.read(), summary)
    print_report(summary, Console())
    if problem:
        _say(f"no reward plot: {problem}")
    return summary


class RunSession:
    """One session of a run: from start or resume until it is complete, stopped or failed."""

    def __init__(self, plan: RunPlan, history: HistoryReader, placement: Placement | None = None) -> None:
        self._plan = plan
        self._history = history
        self._begun = time.monotonic()
        self._is_complete = False
        self.last_words = ""  # the error that ended the session
        self._next_queue_poll = 0.0
        self._are_servers_started = False
        self._are_all_started = False
        self._stop = StopRequest()
        self._monitor = RunMonitor(
            plan.watch_url,
            lambda: self._supervisor.pids,
            plan.run_folder / LOG_FOLDER,
            plan.config.stall_timeout_s,
        )
        note_of_trainer = partial(self._note_restart, "trainer")
        limit = plan.config.max_restarts
        self._supervisor = Supervisor(
            self._stop,
            on_tick=self._tick,
            placement=placement,
            on_wait=_say,
            restarts=TrainerRestarts(limit, self._progress, note_of_trainer),
            engine_restarts=self._engine_restarts() if plan.config.has_fleet else None,
            replacements=Replacements(limit, self._progress, self._note_restart, self._has_published),
        )
        self._memory = MemorySampler(lambda: self._supervisor.pids)
        self._screen: Screen | None = None

    def run(self, *, plain: bool, on_served: Callable[[], None] | None = None) -> None:
        """`on_served` is called once, when hub and engine are ready."""
        state = ViewState(self._plan.config, self._plan.run_folder.name, phase=_start_phase(self._plan))
        with self._stop.listening(), under_mps(self._plan, _say) as plan, self._supervisor, self._memory:
            # The trainer loads its libraries while it waits for the engine.
            first = [spec for spec in plan.processes if spec.serves or spec.kind == "trainer"]
            rest = [spec for spec in plan.processes if spec not in first]
            try:
                with Screen(choose_view(plain=plain), state, self._refresh) as self._screen:
                    self._supervisor.start(first)
                    self._are_servers_started = True
                    if on_served is not None:
                        on_served()
                    if self._plan.is_env_last:
                        self._supervisor.wait(self._has_published)
                    self._supervisor.start(rest)
                    self._are_all_started = True
                    self._supervisor.watch(lambda: self._history.read().last_step >= self._plan.config.steps)
                    self._screen.tick()
                self._check_hub()
                self._is_complete = True
            except Stopped:
                _say("stopping: the trainer saves a checkpoint first; Ctrl-C again kills everything at once")

    def _has_published(self) -> bool:
        """Whether the trainer of this session has reported a published version to the hub; it registers before that."""
        own = self._supervisor.reported_pid("trainer")
        reports = [standing.report for standing in self._monitor.status.standings]
        return any(report.pid == own and report.policy_version is not None for report in reports)

    def _progress(self) -> Progress:
        saved = run_folders.newest_checkpoint(self._plan.config.train.save_path)
        return Progress(self._history.read().last_step, saved)

    def _note_restart(self, name: str, text: str) -> None:
        self._monitor.note_restart(text)
        spec = next(spec for spec in self._plan.processes if spec.name == name)
        with spec.log_path.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} WARNING launcher restart {text}\n")

    def _engine_restarts(self) -> EngineRestarts:
        def has_loaded(name: str, pid: int | None) -> bool:
            reports = [standing.report for standing in self._monitor.status.standings]
            own = [report for report in reports if report.name == name and pid in (None, report.pid)]
            return any(report.serves is not None for report in own)

        return EngineRestarts(self._monitor.note_restart, has_loaded, partial(has_engines, self._plan.watch_url))

    def _check_hub(self) -> None:
        """A run whose queue was deleted has failed: its groups are lost, and it cannot be resumed."""
        if answers_ok(f"{self._plan.hub_url}/healthz", timeout_s=LAST_ANSWER_S):
            return
        if self._plan.config.hub_url:
            _say(f"warning: the hub at {shown_url(self._plan.hub_url)} does not answer any more")
        else:
            raise ProcessDied(
                f"all steps are taken, but the hub cannot answer for its queue {self._plan.config.hub.database}",
                fix=f"the hub's log says why: {self._plan.run_folder / LOG_FOLDER / 'hub.log'}",
            )

    def outcome(self) -> Outcome:
        is_here = self._plan.config.cluster.scheduler == "local"  # else only the launcher's memory is known
        return Outcome(
            self._is_complete,
            time.monotonic() - self._begun,
            self._memory.peak_bytes if is_here else 0,
            dict(self._memory.peak_by_process) if is_here else {},
            self._monitor.status.alarms,
            self._monitor.status.findings,
            self.last_words,
            self._monitor.status.restarts,
        )

    def _tick(self) -> None:
        history = self._history.read()
        self._monitor.poll((history.last_step, len(history.measured)), is_starting=not self._are_servers_started)
        if self._screen is not None:
            self._screen.tick()

    def _refresh(self, state: ViewState) -> None:
        state.history = self._history.read()
        state.memory_bytes = self._memory.now_bytes
        state.status = self._monitor.status
        if not self._are_all_started:
            return
        state.phase = current_phase(state.history, self._plan.config)
        if time.monotonic() >= self._next_queue_poll:
            self._next_queue_poll = time.monotonic() + 1.0
            answer = get_json(f"{self._plan.watch_url}/status")
            state.num_queued = None if answer is None else int(answer.get("queue_size", 0))


def has_engines(hub_url: str) -> bool:
    """Whether the hub's table has an engine that serves or joins. Also if the hub does not answer, because it may be
    starting again: the trainer ends the run if it finds no engine."""
    table = get_json(f"{hub_url}/v1/engines", timeout_s=LAST_ANSWER_S)
    return table is None or any(engine["state"] in ("joining", "serving") for engine in table["engines"])


def _start_phase(plan: RunPlan) -> str:
    """ "starting hub and engine", or the servers that this run starts."""
    servers = [spec.name for spec in plan.processes if spec.serves]
    return f"starting {' and '.join(servers) or 'the trainer'}"
