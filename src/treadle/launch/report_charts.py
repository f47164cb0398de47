"""Which charts a report shows, from the history of a run. Pure."""

from __future__ import annotations

from dataclasses import replace

from treadle.launch.charts import Chart, Point, Series
from treadle.launch.history import TOKENS_PER_SECOND, History, is_number

# Where the time of a step goes; the rest of it is "other".
PARTS_OF_A_STEP = {
    "waiting for rollouts": "perf/rollout_wait_s",
    "forward and backward": "perf/fwd_bwd_s",
    "optimizer": "perf/optimizer_s",
    "publishing weights": "perf/weight_sync_s",
}
MAX_HEALTHY_KL = 0.1
MAX_HEALTHY_CLIPPED = 0.3
HEALTHY_RATIO = (0.8, 1.2)
NUM_COLOURS = 5
# A step whose groups all scored the same trains no token: earlier releases wrote a 0 for these, which is no figure.
OF_TRAINED_TOKENS = frozenset({"entropy", "grad_norm", "kl", "mean_kl", "mean_ratio", "clipped_fraction"})


def charts_of(history: History) -> list[Chart]:
    def course(key: str, name: str, colour: int = 1, *, is_noisy: bool = True) -> Series:
        points = points_of(history, key)
        return Series(name, points, colour, is_noisy, gaps_between(history, points))

    def plain(title: str, key: str, unit: str = "", *, from_zero: bool = True) -> Chart:
        return Chart(title, (course(key, title),), unit, from_zero=from_zero)

    return [
        Chart(
            "reward",
            distinct(course("reward", "mean reward", 2), course("rollout/accuracy", "accuracy in training", 1)),
            held_out=tuple(evaluation.point for evaluation in history.evaluations),
            from_zero=True,
        ),
        *_held_out_by_env(history),
        Chart(
            "KL",
            distinct(course("mean_kl", "from the sampling policy", 1), course("kl", "KL term of the loss", 3)),
            "nats",
            healthy=(0.0, MAX_HEALTHY_KL),
            from_zero=True,
        ),
        plain("entropy", "entropy", "nats"),
        plain("grad norm", "grad_norm"),
        Chart(
            "completion length",
            (
                course("completions/max_length", "longest", 4, is_noisy=False),
                course("completions/mean_length", "mean", 1),
                course("completions/min_length", "shortest", 3, is_noisy=False),
            ),
            "tokens",
            from_zero=True,
        ),
        Chart(
            "tokens per second",
            tuple(course(key, word, colour) for colour, (word, key) in enumerate(TOKENS_PER_SECOND.items(), start=1)),
            "tokens/s",
            from_zero=True,
        ),
        time_of_a_step(history),
        Chart("ratio", (course("mean_ratio", "mean ratio"),), healthy=HEALTHY_RATIO),
        Chart(
            "clipped tokens",
            (course("clipped_fraction", "clipped tokens"),),
            "share",
            healthy=(0.0, MAX_HEALTHY_CLIPPED),
            from_zero=True,
        ),
        plain("rollout staleness", "sample/staleness_mean", "policy versions"),
    ]


def _held_out_by_env(history: History) -> list[Chart]:
    """Of several environments, the held-out accuracy of each."""
    series = [
        Series(label, tuple((float(one.step), one.accuracy) for one in evaluations), 1 + place % NUM_COLOURS)
        for place, (label, evaluations) in enumerate(history.by_env.items())
    ]
    return [Chart("held-out accuracy by environment", tuple(series), "share", from_zero=True)] if series else []


def time_of_a_step(history: History) -> Chart:
    """Stacked; only steps in which every part was measured, so that all parts have the same steps."""
    keys = ("perf/step_s", *PARTS_OF_A_STEP.values())
    measured = [step for step in history.steps if all(is_number(step.get(key)) for key in keys)]
    parts = [
        Series(name, tuple((float(step["step"]), float(step[key])) for step in measured), colour)
        for colour, (name, key) in enumerate(PARTS_OF_A_STEP.items(), start=1)
    ]
    others = tuple(
        (float(step["step"]), max(0.0, step["perf/step_s"] - sum(step[key] for key in PARTS_OF_A_STEP.values())))
        for step in measured
    )
    return Chart("time of a step", (*parts, Series("other", others, 5)), "s", is_stacked=True)


def points_of(history: History, key: str) -> tuple[Point, ...]:
    trained = [step for step in history.steps if step.get("batch/forwarded_tokens_per_step") != 0]
    steps = trained if key in OF_TRAINED_TOKENS else history.steps
    return tuple((float(step["step"]), float(step[key])) for step in steps if is_number(step.get(key)))


def gaps_between(history: History, points: tuple[Point, ...]) -> tuple[float, ...]:
    """The steps that were taken and are not among the points."""
    known = {x for x, _ in points}
    return tuple(step for row in history.steps if (step := float(row["step"])) not in known)


def distinct(*series: Series) -> tuple[Series, ...]:
    """A line that another covers cannot be seen: equal ones become one, with both names."""
    kept: list[Series] = []
    for one in series:
        same = next((number for number, other in enumerate(kept) if one.points and other.points == one.points), None)
        if same is None:
            kept.append(one)
        else:
            kept[same] = replace(kept[same], name=f"{kept[same].name} = {one.name}")
    return tuple(kept)
