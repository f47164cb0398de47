"""Report what an environment does: counts of its groups with a diagnosis, and metrics for trackers.

    monitor = EnvMonitor("gsm8k")
    monitor.report()                     # EnvReport(in_flight=12, recent=GroupCounts(finished=40, sent=0, ...), ...)

Counts start with the process. Building a report takes about 30 µs.

`Tracking` logs evaluations and some rollouts to the trackers that the trainer uses. An environment is a separate run
there, in the trainer's group, because its last evaluation comes after the trainer has ended. Its files are in
state_dir/NAME/tracker-RUN. Errors of a tracker are logged and stop nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.files import without_secrets
from treadle.config.load import parse
from treadle.config.train import TrackOptions
from treadle.envs.evaluation import EvalResult, eval_metrics
from treadle.envs.rollout import ReportProgress, Rollout, Scores, compare_scores
from treadle.errors import TreadleError
from treadle.log import get_logger
from treadle.track.trackers import CompositeTracker, Table, build_tracker
from treadle.watch.waits import Waits, WaitSpec
from treadle.watch.watchdog import ProcessFacts
from treadle.wire.hub import RegisteredEnv, WorkReport

log = get_logger("env")

RECENT_GROUPS = 40
TOO_FEW_TO_JUDGE = 10
PRIOR_KEPT_GROUPS = 4  # assumed to be kept before any group has finished
TOO_FEW_LESSONS = 40  # a model that learns has passed its first groups, which are all wrong, by then
MOST = 0.9  # share of the recent groups that counts as a problem
STEPS_PER_TABLE = 10  # between two tables of training rollouts; an evaluation logs one too
MAX_CELL_CHARS = 2000
TABLE_ROWS = 32
ROLLOUT_COLUMNS = ("policy_version", "prompt", "completion", "reward", "is_right", "tokens", "ended")
SAMPLE_COLUMNS = ("question", "completion", "gold", "reward", "is_right", "ended")


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that came to an end, by how they ended."""

    finished: int = 0  # sent + dropped
    sent: int = 0  # to the hub, or to disk while it is away
    dropped: dict[str, int] = {}  # by reason: equal_scores, unscored, nothing_sampled, oversize, failed
    equal: int = 0  # groups whose scores were all the same, sent or dropped
    all_right: int = 0  # of the equal ones
    all_wrong: int = 0


class EnvReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of an environment process."""

    total: GroupCounts  # since the process began
    recent: GroupCounts  # of the last RECENT_GROUPS
    rollouts: int  # finished
    unscored_rollouts: dict[str, int]  # of them, by outcome: timed_out, raised, judge_failed, too_long, too_short, ...
    reward_metrics: dict[str, float]  # totals of what rewards report: {"judge/requests": 40}
    asked_again: int  # groups that failed as a whole (engine error, timeout) and were retried
    in_flight: int  # groups that are being sampled or scored
    undelivered: int  # groups on disk that the hub has not accepted yet
    env_id: int | None  # as registered at the hub
    evaluation: WorkReport | None  # progress of the current evaluation
    pace: str  # "engine 38 % busy: 8 groups in flight, limited by max_age 1"; empty in waves
    problem: str  # diagnosis of the recent groups: "dropped 40 of its last 40 groups because ..."
    fix: str

    def as_about(self) -> ProcessFacts:
        """The form in which the watchdog sends it to the hub; the watchdog adds the waits."""
        dropped = {f"dropped_{reason}": float(count) for reason, count in self.total.dropped.items()}
        unscored = {f"rollouts_{outcome}": float(count) for outcome, count in self.unscored_rollouts.items()}
        of_rewards = {name.replace("/", "_"): value for name, value in self.reward_metrics.items()}
        return ProcessFacts(
            state=(self.pace or f"{_groups(self.in_flight)} in flight") if self.in_flight else "",
            env_id=self.env_id,
            work=self.evaluation,
            problem=self.problem,
            fix=self.fix,
            counts={
                "groups_finished": float(self.total.finished),
                "groups_sent": float(self.total.sent),
                "groups_equal": float(self.total.equal),
                "groups_all_right": float(self.total.all_right),
                "groups_all_wrong": float(self.total.all_wrong),
                "groups_asked_again": float(self.asked_again),
                "groups_in_flight": float(self.in_flight),
                "groups_undelivered": float(self.undelivered),
                "rollouts": float(self.rollouts),
                **dropped,
                **unscored,
                **of_rewards,
            },
        )


class GroupOutcome(msgspec.Struct, frozen=True):
    """How one group ended."""

    dropped_for: str | None  # None: it was sent
    scores: Scores


class EnvMonitor:
    """Collects the numbers of the report; `report()` may be called from another thread."""

    def __init__(self, env_name: str, waits: Waits | None = None) -> None:
        self.waits = waits or Waits()
        self.num_undelivered = 0
        self.pace = ""  # set by the stream
        self.num_retries = 0
        self.env_id: int | None = None
        self.tracking = Tracking(None)  # replaced after registration, when the trainer's trackers are known
        self._evaluation: WorkReport | None = None
        self._env_name = env_name
        self._lock = threading.Lock()
        self._total: Counter[GroupOutcome] = Counter()
        self._recent: deque[GroupOutcome] = deque(maxlen=RECENT_GROUPS)
        self._num_rollouts = 0
        self._unscored: Counter[str] = Counter()
        self._reward_metrics: dict[str, float] = {}
        self._num_in_flight = 0

    @contextmanager
    def track_groups(self, what: str, num_groups: int, patience_s: float) -> Iterator[None]:
        """Count groups as in flight while they are sampled and scored; `what` names them: "item 17"."""
        self._num_in_flight += num_groups
        flight = WaitSpec(f"{what} to be sampled and scored", holding=_groups(num_groups), deadline_s=patience_s)
        try:
            with self.waits.waiting(flight):
                yield
        finally:
            self._num_in_flight -= num_groups

    def finish(self, rollouts: Sequence[Rollout], *, dropped_for: str | None = None) -> None:
        """Record the end of a group; one without rollouts was given up."""
        ending = GroupOutcome(dropped_for, compare_scores(rollouts))
        with self._lock:
            self._total[ending] += 1
            self._recent.append(ending)
            self._num_rollouts += len(rollouts)
            self._unscored.update(rollout.score.outcome for rollout in rollouts if rollout.score.reward is None)
            for rollout in rollouts:
                for name, value in rollout.score.metrics.items():
                    self._reward_metrics[name] = self._reward_metrics.get(name, 0.0) + value
        if dropped_for is None:
            self.tracking.add(rollouts, may_log=self._evaluation is None)

    @contextmanager
    def track_evaluation(self, step: int, total: int) -> Iterator[ReportProgress]:
        """Report an evaluation as running; yields the callback for its progress."""
        what = f"evaluating at step {step}"
        self._evaluation = WorkReport(what=what, done=0, total=total)

        def report_progress(num_done: int, _: str) -> None:
            self._evaluation = WorkReport(what=what, done=num_done, total=total)

        try:
            yield report_progress
        finally:
            self._evaluation = None

    @property
    def kept_share(self) -> float:
        """Estimated share of groups that are sent and not dropped, from the last RECENT_GROUPS."""
        with self._lock:
            num_sent = sum(ending.dropped_for is None for ending in self._recent)
            return (num_sent + PRIOR_KEPT_GROUPS) / (len(self._recent) + PRIOR_KEPT_GROUPS)

    @property
    def total(self) -> GroupCounts:
        with self._lock:
            return count_groups(self._total)

    def report(self) -> EnvReport:
        with self._lock:
            recent, unscored = count_groups(Counter(self._recent)), dict(self._unscored)
            reward_metrics = dict(self._reward_metrics)
        problem, fix = diagnose(recent, self._env_name)
        return EnvReport(
            total=self.total,
            recent=recent,
            rollouts=self._num_rollouts,
            unscored_rollouts=unscored,
            reward_metrics=reward_metrics,
            asked_again=self.num_retries,
            in_flight=self._num_in_flight,
            undelivered=self.num_undelivered,
            env_id=self.env_id,
            evaluation=self._evaluation,
            pace=self.pace,
            problem=problem,
            fix=fix,
        )


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"


def count_groups(endings: Mapping[GroupOutcome, int]) -> GroupCounts:
    dropped: Counter[str] = Counter()
    scores: Counter[Scores] = Counter()
    for ending, times in endings.items():
        scores[ending.scores] += times
        if ending.dropped_for is not None:
            dropped[ending.dropped_for] += times
    finished = scores.total()
    return GroupCounts(
        finished=finished,
        sent=finished - dropped.total(),
        dropped=dict(dropped),
        equal=scores["equal"] + scores["all_right"] + scores["all_wrong"],
        all_right=scores["all_right"],
        all_wrong=scores["all_wrong"],
    )


def diagnose(groups: GroupCounts, env_name: str) -> tuple[str, str]:
    """The problem with these groups and its fix; two empty strings if there is none."""
    if groups.finished < TOO_FEW_TO_JUDGE:
        return "", ""
    of_them = f"of its last {groups.finished} groups"
    num_dropped = sum(groups.dropped.values())
    if num_dropped >= MOST * groups.finished:
        reason = max(groups.dropped, key=lambda name: groups.dropped[name])
        why, fix = _WHY_DROPPED.get(reason, (reason, _ASK_VALIDATE))
        if reason == "equal_scores":
            why, fix = f"{why} ({_which_way(groups)})", _fix_for_equal_scores(groups)
        return f"dropped {num_dropped} {of_them} because {why}", fix.format(env_name)
    if groups.finished >= TOO_FEW_LESSONS and groups.equal >= MOST * groups.finished:
        found = f"{groups.equal} {of_them} have no learning signal: all their scores are equal ({_which_way(groups)})"
        return found, _fix_for_equal_scores(groups).format(env_name)
    return "", ""


_ASK_VALIDATE = "treadle env {} validate"
_WHY_DROPPED = {
    "equal_scores": ("all their scores were equal", ""),
    "unscored": ("none of their rollouts could be scored", _ASK_VALIDATE),
    "nothing_sampled": ("nothing was sampled in them", _ASK_VALIDATE),
    "oversize": (
        "they had more sequences than the trainer's batch",
        "lower --env.group-size or raise --train.batch-size, or let a rollout begin fewer chats",
    ),
    "failed": ("they failed three times", "its log says why"),
}


def _which_way(groups: GroupCounts) -> str:
    """ "38 all wrong, 2 all right"."""
    ways = {
        "all wrong": groups.all_wrong,
        "all right": groups.all_right,
        "neither right nor wrong": groups.equal - groups.all_wrong - groups.all_right,
    }
    return ", ".join(f"{count} {way}" for way, count in ways.items() if count)


def _fix_for_equal_scores(groups: GroupCounts) -> str:
    if groups.all_right > groups.equal / 2:
        return "the task is too easy for this model: make it harder, or take rewards that tell good answers apart"
    return (
        "perhaps the reward never pays (`treadle env {} validate` checks it); else the task is too hard for this "
        "model, or the reward too coarse: give easier items, points for a part of the answer, or more rollouts"
    )


# ---- trackers


def open_tracking(config: EnvConfig, name: str, registered: RegisteredEnv) -> Tracking:
    """Open the sinks that the trainer registered with; may take seconds."""
    if not config.use_trackers or not registered.trackers.sinks:
        return Tracking(None)
    folder = config.state_dir / quote(name, safe="") / f"tracker-{quote(registered.run_id, safe='')[:8]}"
    try:
        options = {
            "track": registered.trackers.sinks,
            "wandb_project": registered.trackers.project or None,
            "wandb_group": registered.trackers.group or None,
            "wandb_run_name": name,
        }
        settings = without_secrets(config.model_dump(mode="json"))
        track = parse(TrackOptions, options, source="the trainer's registration")
        tracker = build_tracker(track, Path(folder, "metrics.jsonl"), settings)
    except TreadleError as error:  # the package is missing on this machine, or there is no login
        log.warning("no_tracker", problem=error.message, fix=f"{error.fix}; or turn it off: --env.use-trackers false")
        return Tracking(None)
    except OSError as error:
        fix = "give a folder that can be written to: --env.state-dir; or turn it off: --env.use-trackers false"
        log.warning("no_tracker", problem=str(error), fix=fix)
        return Tracking(None)
    log.info("tracking", sinks=",".join(registered.trackers.sinks), folder=str(folder))
    return Tracking(tracker)


class Tracking:
    """`Tracking(None)` logs nothing."""

    def __init__(self, tracker: CompositeTracker | None) -> None:
        self._tracker = tracker
        self._rollouts: deque[tuple[Any, ...]] = deque(maxlen=TABLE_ROWS)
        self._next_table = STEPS_PER_TABLE

    def add(self, rollouts: Sequence[Rollout], *, may_log: bool) -> None:
        """Add the first rollout of a delivered group to the next table.

        While an evaluation runs, nothing is logged: its step is lower, and tracking services need increasing steps.
        """
        if self._tracker is None or not rollouts or not rollouts[0].transcripts:
            return
        self._rollouts.append(_row(rollouts[0]))
        version = self._rollouts[-1][0]
        if may_log and version >= self._next_table:
            self._log_rollouts(version)

    def log_evaluation(self, result: EvalResult) -> None:
        if self._tracker is None:
            return
        with _only_logged():
            self._tracker.log(result.step, eval_metrics(result))
        if result.samples:
            firsts = result.samples[:: result.generation_params["n"]][:TABLE_ROWS]
            rows = [
                (_cut(one.question), _cut(one.completion), _cut(one.gold), one.reward, one.is_right, one.ended)
                for one in firsts
            ]
            self._tracker.log_table(result.step, Table("eval/samples", SAMPLE_COLUMNS, rows))
        self._log_rollouts(result.step)

    def close(self) -> None:
        if self._tracker is not None:
            with _only_logged():
                self._tracker.close()

    def _log_rollouts(self, step: int) -> None:
        self._next_table = step + STEPS_PER_TABLE
        if self._tracker is not None and self._rollouts:
            self._tracker.log_table(step, Table("train/rollouts", ROLLOUT_COLUMNS, list(self._rollouts)))


@contextmanager
def _only_logged() -> Iterator[None]:
    """Log errors of the metrics file; the other sinks never raise."""
    try:
        yield
    except (TreadleError, OSError) as error:
        log.warning("tracking_failed", problem=str(error))


def _row(rollout: Rollout) -> tuple[Any, ...]:
    first = rollout.transcripts[0]
    said = [str(message.get("content", "")) for message in first.messages if message.get("role") != "assistant"]
    return (
        max((version for transcript in rollout.transcripts for version in transcript.policy_versions), default=0),
        _cut("\n".join(said)),
        _cut(rollout.text),
        rollout.score.reward,
        rollout.score.is_right,
        rollout.num_sampled,
        not rollout.is_truncated,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + " ..."
