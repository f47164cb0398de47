"""The report of an environment process: counts, waits and problems, as one value."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.responses import JSONResponse

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, Item, Score, environment, load_environment
from treadle.envs.chat import Transcript
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.rollout import Rollout
from treadle.envs.serving.monitor import EnvMonitor, EnvReport
from treadle.envs.serving.runner import run
from treadle.net.client import RetryPolicy

QUICK = RetryPolicy(give_up_after_s=5.0, first_pause_s=0.01, longest_pause_s=0.05)
WRONG, HALF, RIGHT = Score(0.0, is_right=False), Score(0.5, is_right=False), Score(1.0, is_right=True)
LATE = Score(None, is_right=False, outcome="timed_out", error="exact_match took longer than 10 s")


def group(*scores):
    transcript = Transcript(messages=[])
    transcript.wrote(Completion([1], [-0.5], "1", "stop", 0))
    return [Rollout([transcript], score, seconds=0.1) for score in scores]


def test_a_report_counts_what_became_of_the_groups():
    monitor = EnvMonitor("gsm8k")
    monitor.finish(group(RIGHT, WRONG))
    monitor.finish(group(RIGHT, RIGHT))
    monitor.finish(group(WRONG, WRONG, LATE), dropped_for="equal_scores")
    monitor.finish(group(LATE, LATE), dropped_for="unscored")
    monitor.finish([], dropped_for="failed")
    monitor.num_retries += 1
    with monitor.track_groups("wave 1", 3, 600.0):
        report = monitor.report()
    assert report.total == report.recent
    assert (report.total.finished, report.total.sent) == (5, 2)
    assert report.total.dropped == {"equal_scores": 1, "unscored": 1, "failed": 1}
    assert (report.total.equal, report.total.all_right, report.total.all_wrong) == (2, 1, 1)
    assert (report.rollouts, report.unscored_rollouts) == (9, {"timed_out": 3})
    assert (report.in_flight, report.asked_again, monitor.report().in_flight) == (3, 1, 0)


def test_recent_counts_forget_what_is_long_ago_and_totals_do_not():
    monitor = EnvMonitor("gsm8k")
    for _ in range(60):
        monitor.finish(group(RIGHT, WRONG))
    for _ in range(40):
        monitor.finish(group(WRONG, WRONG), dropped_for="equal_scores")
    report = monitor.report()
    assert (report.recent.finished, report.recent.sent) == (40, 0)
    assert (report.total.finished, report.total.sent) == (100, 60)


def test_groups_with_equal_scores_are_reported_with_their_kind_and_a_fix():
    monitor = EnvMonitor("gsm8k")
    for number in range(40):
        same = RIGHT if number < 2 else WRONG
        monitor.finish(group(same, same), dropped_for="equal_scores")
    report = monitor.report()
    assert report.problem == (
        "dropped 40 of its last 40 groups because all their scores were equal (38 all wrong, 2 all right)"
    )
    assert report.fix.startswith("perhaps the reward never pays (`treadle env gsm8k validate` checks it)")
    assert "too hard for this model, or the reward too coarse" in report.fix


@pytest.mark.parametrize(
    ("scores", "dropped_for", "problem", "fix"),
    [
        (
            (RIGHT, RIGHT),
            None,
            "40 of its last 40 groups have no learning signal: all their scores are equal (40 all",
            "too easy",
        ),
        ((HALF, Score(0.5, is_right=True)), "equal_scores", "(40 neither right nor wrong)", "reward too coarse"),
        ((LATE, LATE), "unscored", "because none of their rollouts could be scored", "treadle env gsm8k validate"),
        ((RIGHT, WRONG), "oversize", "more sequences than the trainer's batch", "--env.group-size"),
        ((RIGHT, WRONG), None, "", ""),
    ],
)
def test_what_is_wrong_is_said_in_words(scores, dropped_for, problem, fix):
    monitor = EnvMonitor("gsm8k")
    for _ in range(40):
        monitor.finish(group(*scores), dropped_for=dropped_for)
    report = monitor.report()
    assert problem in report.problem
    assert fix in report.fix
    assert bool(report.problem) == bool(report.fix) == bool(problem)


def test_a_few_groups_are_not_judged():
    monitor = EnvMonitor("gsm8k")
    for _ in range(9):
        monitor.finish(group(WRONG, WRONG), dropped_for="equal_scores")
    assert monitor.report().problem == ""


def test_what_is_in_flight_is_a_wait_with_its_name_that_may_be_late():
    monitor = EnvMonitor("gsm8k")
    with monitor.track_groups("item 17", 1, patience_s=0.0):
        (wait,) = monitor.waits.now
        assert wait.wanted.what == "item 17 to be sampled and scored"
        assert wait.wanted.holding == "1 group"
        assert wait.is_late
        assert monitor.report().as_about().state == "1 group in flight"
    assert monitor.waits.now == []


def test_a_report_can_be_sent_as_it_is():
    monitor = EnvMonitor("gsm8k")
    monitor.finish(group(RIGHT, WRONG))
    report = monitor.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=EnvReport) == report


@environment("test-too-hard")
class TooHard(Environment):
    """Answers are right for the items from `first_right` on."""

    defaults = {"ensure_scores_are_not_same": True, "num_eval": 0, "max_token_length": 16}  # noqa: RUF012

    def train_item(self, index):
        return Item.ask(f"Say {index}", answer=str(index))

    def eval_items(self):
        return []

    def score(self, item, completion_text, completion):
        return float(int(item.answer) >= self.config.args["first_right"] and completion_text == "yes")


class TrainingHub(HubDouble):
    """A hub beside a trainer that trains whatever makes a batch, at once."""

    @property
    def num_sequences(self):
        return sum(len(group.tokens) for _, groups in self.deliveries for group in groups)

    async def _standing(self, _):
        self.current_step = min(self.num_steps, self.num_sequences // self.info["batch_size"])
        return JSONResponse(
            {
                "step": self.current_step,
                "num_steps": self.num_steps,
                "batch_size": self.info["batch_size"],
                "untrained_sequences": self.num_sequences - self.current_step * self.info["batch_size"],
                "trainer_waits": True,
                "share": 1.0,
            }
        )


async def serve(tmp_path, hub, monitor, **settings):
    engine_double = EngineDouble(
        save_tokenizer(tmp_path / "model"), lambda _, request: (["yes", "no"] * 9)[: request.n]
    )
    config = EnvConfig(**{"group_size": 4, "state_dir": tmp_path / "state", **settings})
    async with (
        EngineClient(ServerConfig(), retry_policy=QUICK, transport=FlakyNetwork(engine_double.app)) as engine,
        HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(hub.app), waits=monitor.waits) as client,
        open_context(load_environment(config), engine, ChatTokenizer.load(engine_double.folder)) as context,
    ):
        await asyncio.wait_for(run(context, client, monitor), 60)


def warnings_of(caplog, event):
    records = [record for record in caplog.records if record.getMessage() == event]
    return [record.treadle_fields for record in records if record.levelno >= logging.WARNING]


def test_a_run_that_drops_all_its_first_groups_warns_early_and_once(tmp_path, caplog):
    monitor = EnvMonitor("test-too-hard")
    hub = TrainingHub(batch_size=16, num_steps=2)
    asyncio.run(serve(tmp_path, hub, monitor, name="test-too-hard", args={"first_right": 30}))
    (reported,) = warnings_of(caplog, "no_group_was_sent_yet")
    assert reported["problem"] == (
        "dropped 12 of its last 12 groups because all their scores were equal (12 all wrong)"  # three batches of four
    )
    assert "too hard" in reported["fix"]
    report = monitor.report()
    assert report.total.sent >= 8  # more are started when most are dropped
    assert report.total.dropped == {"equal_scores": 30}
    assert report.total.all_wrong == 30
    assert (report.in_flight, report.problem) == (0, "")


def test_a_run_that_drops_few_groups_says_nothing(tmp_path, caplog):
    hub = TrainingHub(batch_size=16, num_steps=2)
    asyncio.run(serve(tmp_path, hub, EnvMonitor("x"), name="test-too-hard", args={"first_right": 5}))
    assert warnings_of(caplog, "no_group_was_sent_yet") == []


def test_groups_of_waves_are_in_the_report_too(tmp_path):
    monitor = EnvMonitor("echo")
    asyncio.run(serve(tmp_path, HubDouble(batch_size=8, num_steps=3), monitor, name="arithmetic", num_eval=0))
    report = monitor.report()
    assert (report.total.finished, report.total.sent, report.rollouts) == (6, 6, 24)
    assert report.total.all_wrong == 6


def test_an_evaluation_that_goes_on_is_reported_with_how_far_it_has_come():
    monitor = EnvMonitor("gsm8k")
    with monitor.track_evaluation(20, total=256) as report_progress:
        report_progress(64, "40 % right")
        work = monitor.report().as_about().work
        assert work is not None
        assert (work.what, work.done, work.total) == ("evaluating at step 20", 64, 256)
    assert monitor.report().evaluation is None
