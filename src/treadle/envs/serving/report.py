"""Count what became of an environment's groups, and report it with the current waits and a diagnosis.

    monitor = EnvMonitor("gsm8k")
    monitor.report()                     # EnvReport(in_flight=12, recent=GroupCounts(finished=40, sent=0, ...), ...)

Counts start with the process. Building a report takes about 30 µs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from treadle.envs.concurrency import ReportProgress
from treadle.envs.grouping import Scores, compare_scores
from treadle.envs.rollout import Rollout
from treadle.envs.serving.tracking import Tracking
from treadle.watch.waits import Waits, WaitSpec
from treadle.watch.watchdog import ProcessFacts
from treadle.wire.hub import WorkReport

RECENT_GROUPS = 40
TOO_FEW_TO_JUDGE = 10
TOO_FEW_LESSONS = 40  # a model that learns has passed its first groups, which are all wrong, by then
MOST = 0.9  # share of the recent groups that counts as a problem


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
    unscored_rollouts: dict[str, int]  # of them, by outcome: timed_out, raised, out_of_memory, worker_died, too_short
    asked_again: int  # groups that failed as a whole (engine error, timeout) and were retried
    in_flight: int  # groups that are being sampled or scored
    undelivered: int  # groups on disk that the hub has not accepted yet
    env_id: int | None  # as registered at the hub
    evaluation: WorkReport | None  # progress of the current evaluation
    problem: str  # diagnosis of the recent groups: "dropped 40 of its last 40 groups because ..."
    fix: str

    def as_about(self) -> ProcessFacts:
        """The form in which the watchdog sends it to the hub; the watchdog adds the waits."""
        dropped = {f"dropped_{reason}": float(count) for reason, count in self.total.dropped.items()}
        unscored = {f"rollouts_{outcome}": float(count) for outcome, count in self.unscored_rollouts.items()}
        return ProcessFacts(
            state=f"{_groups(self.in_flight)} in flight" if self.in_flight else "",
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
        self.env_id: int | None = None
        self.tracking = Tracking(None, 0)  # replaced after registration, when the trainer's trackers are known
        self._evaluation: WorkReport | None = None
        self._env_name = env_name
        self._lock = threading.Lock()
        self._total: Counter[GroupOutcome] = Counter()
        self._recent: deque[GroupOutcome] = deque(maxlen=RECENT_GROUPS)
        self._num_rollouts = 0
        self._unscored: Counter[str] = Counter()
        self._asked_again = 0
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

    def count_retry(self) -> None:
        self._asked_again += 1

    @property
    def total(self) -> GroupCounts:
        with self._lock:
            return count_groups(self._total)

    def report(self) -> EnvReport:
        with self._lock:
            recent, unscored = count_groups(Counter(self._recent)), dict(self._unscored)
        problem, fix = diagnose(recent, self._env_name)
        return EnvReport(
            total=self.total,
            recent=recent,
            rollouts=self._num_rollouts,
            unscored_rollouts=unscored,
            asked_again=self._asked_again,
            in_flight=self._num_in_flight,
            undelivered=self.num_undelivered,
            env_id=self.env_id,
            evaluation=self._evaluation,
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
