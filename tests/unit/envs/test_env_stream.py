"""Pace stream: max_age limits the groups in flight; kills, refusals and an unreachable hub lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import re
import sys

import msgspec
import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treadle.config.env import EnvConfig, ServerConfig, parse_part
from treadle.envs.base import Environment, Item, Score, environment, load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.assignment import InFlightLimit, choose_pace, room
from treadle.envs.serving.monitor import EnvMonitor
from treadle.envs.serving.runner import run
from treadle.envs.serving.stream_state import DifficultySelection, ItemCursor
from treadle.errors import ConfigError, EngineError, HubError, ProcessDied, ScoringError
from treadle.net.client import RetryPolicy
from treadle.wire.generate import EngineHealth
from treadle.wire.hub import EnvState

QUICK = RetryPolicy(give_up_after_s=5.0, first_pause_s=0.01, longest_pause_s=0.05)


@environment("test-two-turns")
class TwoTurns(Environment):
    """Asks twice; an item divisible by 3 gives equal scores."""

    defaults = {"ensure_scores_are_not_same": True, "num_eval": 0}  # noqa: RUF012

    def train_item(self, index):
        return Item.ask(f"Say {index}", answer=str(index))

    def eval_items(self):
        return [Item.ask("Say 1", answer="1")]

    async def rollout(self, item, model):
        chat = model.chat(item.messages)
        first = await chat.ask()
        chat.add({"role": "user", "content": "Again"})
        await chat.ask()
        return 1.0 if int(item.answer) % 3 == 0 else float(first.text.endswith("!"))


class TrainingHub(HubDouble):
    """A hub beside a trainer that trains whatever makes a batch, at once."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.steps_at_once = False
        self.is_away = False
        self.most_untrained = 0

    @property
    def groups(self):
        return [group for _, groups in self.deliveries for group in groups]

    def train(self):
        self.current_step = min(self.num_steps, sum(len(g.tokens) for g in self.groups) // self.info["batch_size"])

    @property
    def untrained(self):
        return sum(len(g.tokens) for g in self.groups) - self.current_step * self.info["batch_size"]

    async def _standing(self, _: Request) -> Response:
        self.most_untrained = max(self.most_untrained, self.untrained)
        return JSONResponse(
            {
                "step": self.current_step,
                "num_steps": self.num_steps,
                "batch_size": self.info["batch_size"],
                "untrained_sequences": self.untrained,
                "trainer_waits": True,
                "share": 1.0,
            }
        )

    async def _deliver(self, http: Request) -> Response:
        if self.is_away:
            return JSONResponse({"detail": "starting"}, 503)
        answer = await super()._deliver(http)
        self.train()
        return answer


def write(prompt, request):
    """The first of two seeds is loud: scores differ within a group."""
    reply = re.findall(r"\d+", prompt)[-1] if "Again" not in prompt else "again"
    return [reply + ("!" if (request.seed >> 20) % 2 else "")] * request.n


class Harness:
    def __init__(self, tmp_path, hub=None, **settings):
        self.config = EnvConfig(
            **{"name": "test-two-turns", "group_size": 4, "state_dir": tmp_path / "state", **settings}
        )
        self.hub = hub or TrainingHub(batch_size=8, num_steps=5)
        self.engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
        self.engine.policy_version = lambda: self.hub.current_step
        self.environment = None  # another class than the registered one
        self.monitor = EnvMonitor(self.config.name)

    async def serve(self):
        async with (
            EngineClient(ServerConfig(), retry_policy=QUICK, transport=FlakyNetwork(self.engine.app)) as engine,
            HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(self.hub.app)) as hub,
        ):
            tokenizer = ChatTokenizer.load(self.engine.folder)
            loaded = load_environment(self.config)
            task = loaded if self.environment is None else self.environment(loaded.config)
            async with open_context(task, engine, tokenizer) as context:
                await asyncio.wait_for(run(context, hub, self.monitor), 60)

    @property
    def folder(self):
        return self.config.state_dir / self.config.name


def test_a_run_is_served_to_its_end_and_dropped_groups_are_counted(tmp_path):
    harness = Harness(tmp_path)
    asyncio.run(harness.serve())
    assert harness.hub.current_step == 5
    assert all(group.item % 3 for group in harness.hub.groups)
    dropped = sum(group.metrics.get("dropped_equal_scores", 0) for group in harness.hub.groups)
    assert dropped >= 1
    group = harness.hub.groups[0]
    assert len(group.tokens) == 4
    assert all(
        len(t) == len(m) == len(lp)
        for t, m, lp in zip(group.tokens, group.masks, group.inference_logprobs, strict=True)
    )
    sampled = [token for token in group.masks[0] if token != -100]
    text = harness.engine.tokenizer.decode(sampled)
    assert text.replace("!", "") == f"{group.item}again"  # both turns, and only they, are trained
    assert harness.hub.disconnected == [7]


def test_no_more_is_begun_than_the_age_allows(tmp_path):
    harness = Harness(tmp_path, max_age=0)
    asyncio.run(harness.serve())
    assert harness.hub.most_untrained <= 8  # one step's worth
    assert [group.policy_version for group in harness.hub.groups][:4] == [0, 0, 1, 1]


def test_groups_scored_while_the_hub_is_away_are_sent_after_a_restart(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.is_away = True

    async def killed_life():
        task = asyncio.create_task(harness.serve())
        while len(list(harness.folder.glob("spool/*.groups"))) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(killed_life())
    kept = sorted(path.name for path in harness.folder.glob("spool/*.groups"))
    assert len(kept) >= 2
    assert harness.hub.deliveries == []
    harness.hub.is_away = False
    asyncio.run(harness.serve())
    items = [group.item for group in harness.hub.groups]
    assert len(items) == len(set(items)), "an item was delivered twice"
    delivered = {key for key, _ in harness.hub.deliveries}
    assert {name.partition("-")[2].removesuffix(".groups") for name in kept} <= delivered
    assert list(harness.folder.glob("spool/*.groups")) == []
    assert harness.hub.current_step == 5


def test_the_items_of_a_new_run_begin_with_the_first(tmp_path):
    harness = Harness(tmp_path)
    asyncio.run(harness.serve())
    later = Harness(tmp_path)
    later.hub.run_id = "another"
    asyncio.run(later.serve())
    assert min(group.item for group in later.hub.groups) == 1  # item 0 teaches nothing


def test_groups_left_by_an_earlier_run_are_set_aside_and_not_delivered(tmp_path):
    harness = Harness(tmp_path)
    for name in ("spool", "refused"):
        (harness.folder / name).mkdir(parents=True)
        (harness.folder / name / "000001-test-two-turns-0-item-1.groups").write_bytes(b"of another run")
    (harness.folder / "spool" / "000002-test-two-turns-0-item-2.partial").write_bytes(b"half")
    (harness.folder / "run").write_text("4f1c")
    asyncio.run(harness.serve())
    aside = harness.folder / "of-run-4f1c"
    kept = sorted(str(path.relative_to(aside)) for path in aside.rglob("*.groups"))
    assert kept == [f"{name}/000001-test-two-turns-0-item-1.groups" for name in ("refused", "spool")]
    assert list(harness.folder.glob("spool/*")) == []
    assert list(harness.folder.glob("refused/*")) == []
    assert harness.hub.current_step == 5


async def until(condition, serving):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.wait([serving], timeout=0.01)
            if serving.done():
                await serving


@environment("test-one-turn")
class OneTurn(TwoTurns):
    """Of one turn, and scores that differ."""

    defaults = {**TwoTurns.defaults, "max_token_length": 16}  # noqa: RUF012
    rollout = Environment.rollout

    def score(self, item, completion_text, completion):
        return float(completion.token_ids[0] % 2)


@pytest.mark.parametrize("size", [4, 16])
def test_a_stream_follows_a_trainer_that_restarts_with_another_batch_size(tmp_path, caplog, size):
    harness = Harness(tmp_path, hub=TrainingHub(batch_size=8, num_steps=30))

    async def scenario():
        serving = asyncio.create_task(harness.serve())
        await until(lambda: harness.hub.current_step >= 2, serving)
        harness.hub.info["batch_size"] = size
        harness.hub.train()
        await serving

    asyncio.run(scenario())
    assert harness.hub.current_step == 30
    (reported,) = [r.treadle_fields for r in caplog.records if r.getMessage() == "trainer_changed"]
    assert reported == {"batch_size": size, "batch_size_before": 8}


def test_a_stream_ends_when_its_groups_can_no_longer_fill_a_batch(tmp_path):
    harness = Harness(tmp_path, name="test-one-turn")
    harness.engine.write = lambda _, request: ["1", "2"] * (request.n // 2)

    async def scenario():
        serving = asyncio.create_task(harness.serve())
        await until(lambda: harness.hub.current_step >= 2, serving)
        harness.hub.info["batch_size"] = 10
        await serving

    harness.hub.num_steps = 10**6
    with pytest.raises(ConfigError, match="the batch of 10 sequences is no multiple of group_size 4"):
        asyncio.run(scenario())


def test_a_group_that_the_hub_refuses_is_kept_and_the_run_goes_on(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.failures = [JSONResponse({"detail": "mask has the wrong length"}, 422)]
    asyncio.run(harness.serve())
    assert harness.hub.current_step == 5
    assert len(list(harness.folder.glob("refused/*.groups"))) == 1


def test_a_hub_that_refuses_everything_is_reported(tmp_path):
    harness = Harness(tmp_path)
    harness.hub.failures = [JSONResponse({"detail": "mask has the wrong length"}, 422)] * 9
    with pytest.raises(HubError, match=r"mask has the wrong length.*kept in .*refused"):
        asyncio.run(harness.serve())
    assert len(list(harness.folder.glob("refused/*.groups"))) == 3


def test_two_processes_do_not_share_a_cursor(tmp_path):
    harness = Harness(tmp_path)
    harness.folder.mkdir(parents=True)
    with (harness.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another environment process"):
            asyncio.run(harness.serve())


@environment("test-odd-code")
class OddCode(TwoTurns):
    """Item 1 ends in a way of its own, the others are fine."""

    odd = staticmethod(lambda: None)

    async def rollout(self, item, model):
        scored = await super().rollout(item, model)
        return type(self).odd() if item.answer == "1" else scored


def cancel_yourself():
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "odd",
    [
        lambda: sys.exit(0),
        cancel_yourself,
        lambda: Score(1.0, is_right=True, parts={"length": float("nan")}),
        lambda: Score(1.0, is_right=True, parts={"length": None}),
        lambda: "1.0",
        lambda: {}["missing"],
    ],
    ids=["exit", "cancel", "nan part", "none part", "text", "raises"],
)
def test_odd_code_of_a_user_costs_its_rollouts_and_not_the_run(tmp_path, odd):
    OddCode.odd = staticmethod(odd)
    harness = Harness(tmp_path, name="test-odd-code")
    asyncio.run(harness.serve())
    assert harness.hub.current_step == 5
    assert 1 not in [group.item for group in harness.hub.groups]


def test_a_task_that_always_raises_ends_after_the_first_group(tmp_path):
    OddCode.odd = staticmethod(lambda: 0.0)
    harness = Harness(tmp_path, name="test-odd-code")
    harness.engine.write = lambda prompt, request: ["no number here"]

    class Broken(OddCode):
        async def rollout(self, item, model):
            await model.chat(item.messages).ask()
            raise KeyError("forgotten")

    harness.environment = Broken
    with pytest.raises(ScoringError, match=r"none of 4 answers .* KeyError: 'forgotten', at \S*test_env_stream.py:\d+"):
        asyncio.run(harness.serve())


def test_a_task_that_never_has_a_score_ends_and_says_why(tmp_path):
    OddCode.odd = staticmethod(lambda: 0.0)
    harness = Harness(tmp_path, name="test-odd-code", num_eval=0)

    class Slow(OddCode):
        async def rollout(self, item, model):
            await model.chat(item.messages).ask()
            return Score(None, is_right=False, outcome="timed_out", error="took longer than 10 s")

    harness.environment = Slow
    with pytest.raises(ProcessDied, match="none was fit to be trained on: took longer than 10 s"):
        asyncio.run(harness.serve())


def test_an_engine_that_answers_garbage_is_tried_again_and_then_named(tmp_path):
    harness = Harness(tmp_path)
    harness.engine.write = lambda prompt, request: ["too", "many", "answers"]
    with pytest.raises(EngineError, match="asked for 1 completions"):
        asyncio.run(harness.serve())
    assert len(harness.engine.requests) >= 12


def test_an_item_that_always_fails_is_left_out_and_the_run_goes_on(tmp_path):
    harness = Harness(tmp_path)
    harness.engine.write = lambda prompt, request: write(prompt, request) * (2 if "Say 4<" in prompt else 1)
    asyncio.run(harness.serve())
    assert harness.hub.current_step == 5
    assert 4 not in [group.item for group in harness.hub.groups]


def standing(**values):
    given = {
        "step": 0,
        "num_steps": 100,
        "batch_size": 64,
        "untrained_sequences": 0,
        "trainer_waits": False,
        "share": 1.0,
    }
    return EnvState(**{**given, **values})


@pytest.mark.parametrize(
    ("now", "spooled", "flying", "begin"),
    [
        (standing(), 0, 0, 16),  # the step that comes and one ahead
        (standing(untrained_sequences=64), 1, 3, 4),
        (standing(untrained_sequences=128), 0, 0, 0),
        (standing(share=0.25), 0, 1, 3),
        (standing(step=99), 0, 0, 8),  # the last step needs no more
        (standing(step=100), 0, 0, 0),
        (standing(untrained_sequences=128, trainer_waits=True), 0, 0, 1),  # no batch fits in what waits
        (standing(untrained_sequences=128, trainer_waits=True), 0, 1, 0),
        (standing(untrained_sequences=256, trainer_waits=True), 0, 0, 0),
        (standing(batch_size=0, num_steps=0), 0, 0, 0),  # no trainer
    ],
)
def test_room_for_groups(now, spooled, flying, begin):
    asked = room(
        now, max_age=1, group_sequences=8.0, num_spooled=spooled, num_in_flight=flying, limit=InFlightLimit(0, 64)
    )
    assert asked.num_groups == begin


def test_groups_of_several_sequences_count_by_their_sequences():
    asked = room(
        standing(), max_age=1, group_sequences=24.0, num_spooled=0, num_in_flight=0, limit=InFlightLimit(0, 64)
    )
    assert asked.num_groups == 6


@pytest.mark.parametrize(
    ("max_age", "kept_share", "begin"),
    [
        (1, 1.0, 16),
        (1, 0.95, 16),  # never fewer than are needed
        (1, 0.5, 22),  # of 22 groups, more than 16 are kept once in a hundred times
        (0, 0.5, 8),  # strictly on-policy: one too many would be trained on a step later
        (1, 0.0, 64),  # as many as the engine takes
    ],
)
def test_groups_that_will_be_dropped_are_started_in_addition(max_age, kept_share, begin):
    asked = room(
        standing(), max_age=max_age, group_sequences=8.0, num_spooled=0, num_in_flight=0, limit=InFlightLimit(0, 64),
        kept_share=kept_share,
    )  # fmt: skip
    assert asked.num_groups == begin


def test_a_share_of_kept_groups_near_zero_is_not_planned_with():
    asked = room(
        standing(), max_age=1, group_sequences=8.0, num_spooled=0, num_in_flight=0, limit=InFlightLimit(0, 1000),
        kept_share=0.001,
    )  # fmt: skip
    assert 64 < asked.num_groups < 160


def test_the_share_of_kept_groups_is_that_of_the_recent_ones():
    monitor = EnvMonitor("tiny")
    assert monitor.kept_share == 1.0
    for _ in range(4):
        monitor.finish((), dropped_for="equal_scores")
    assert monitor.kept_share == 0.5  # four groups that were not dropped are assumed
    for _ in range(40):
        monitor.finish((), dropped_for="equal_scores")
    assert monitor.kept_share == pytest.approx(4 / 44)


def test_the_room_names_what_limits_it():
    def limited_by(limit, **values):
        wanted = {"max_age": 1, "group_sequences": 8.0, "num_spooled": 0, "num_in_flight": 0}
        return room(standing(**values), limit=limit, **wanted).limited_by

    assert limited_by(InFlightLimit(0, 64)) == "max_age 1"
    assert limited_by(InFlightLimit(4, 64)) == "--env.max-num-workers 4"
    assert limited_by(InFlightLimit(0, 64), step=99) == "the end of the run"
    assert limited_by(InFlightLimit(0)) == "the first report of the engine"
    assert limited_by(filled(max_num_seqs=64, group_size=8)) == "the engine's maximum of 64 sequences"


def test_the_report_of_the_process_says_what_limits_the_pace(tmp_path):
    harness = Harness(tmp_path)
    harness.engine.health_values = {"max_num_seqs": 100, "num_running": 38}
    asyncio.run(harness.serve())
    report = harness.monitor.report()
    assert re.fullmatch(r"engine 38 % busy: \d+ groups? in flight, limited by .+", report.pace)
    assert msgspec.structs.replace(report, in_flight=3).as_about().state == report.pace


def health(**values):
    return EngineHealth(**{"status": "ok", "model": "tiny", "policy_version": 0, **values})


def filled(max_num_seqs=1024, group_size=16, at_most=0):
    """A limit after the engine's first report."""
    limit = InFlightLimit(at_most)
    limit.update(health(max_num_seqs=max_num_seqs), group_size=group_size, num_in_flight=0)
    return limit


def updated(limit, num_in_flight, **values):
    limit.update(health(max_num_seqs=1024, **values), group_size=16, num_in_flight=num_in_flight)
    return limit.value


def test_an_engine_of_unknown_size_gets_groups_until_they_wait():
    limit = InFlightLimit(at_most=40)
    limit.update(health(num_running=8), group_size=8, num_in_flight=7)
    assert limit.value == 8  # not used up yet
    for _ in range(10):
        limit.update(health(num_running=8), group_size=8, num_in_flight=limit.value)
    assert limit.value == 40
    limit.update(health(num_running=8, num_waiting=32), group_size=8, num_in_flight=40)
    assert (limit.value, limit.reason) == (32, "the engine's queue")
    limit.update(health(num_running=8, num_waiting=4), group_size=8, num_in_flight=32)
    assert limit.value == 32
    for _ in range(20):
        limit.update(health(num_running=1, num_waiting=8), group_size=8, num_in_flight=1)
    assert limit.value == 1


def test_an_engine_of_known_size_is_filled_at_its_first_report():
    limit = filled(max_num_seqs=1024, group_size=16)
    assert limit.value == 68  # 1,024 sequences and 5 % more
    assert updated(limit, 68, num_running=1024, num_waiting=64) == 68


def test_the_limit_follows_a_changed_number_of_engines():
    limit = filled(max_num_seqs=1024, group_size=16)
    limit.update(health(max_num_seqs=2048), group_size=16, num_in_flight=0)
    assert limit.value == 135


def test_the_limit_stays_within_max_num_workers():
    limit = filled(at_most=10)
    assert (limit.value, limit.reason) == (10, "--env.max-num-workers 10")
    assert updated(limit, 10, num_running=160) == 10


def test_fewer_groups_are_in_flight_when_the_kv_cache_is_full():
    limit = filled()
    full = {"num_running": 400, "kv_cache_usage": 0.98}
    assert updated(limit, 68, num_waiting=688, **full) == 26
    assert limit.reason == "the engine's KV cache"
    assert updated(limit, 60, num_waiting=560, **full) == 26  # those in flight finish: no further reduction
    assert updated(limit, 60, num_waiting=100, **full) == 26
    assert updated(limit, 26, num_running=416, kv_cache_usage=0.95) == 26  # nothing waits, but there is no room
    assert updated(limit, 26, num_running=416, kv_cache_usage=0.5) == 32
    assert limit.reason == "the engine's KV cache"
    for _ in range(4):
        updated(limit, limit.value, num_running=416, kv_cache_usage=0.5)
    assert limit.value >= 68
    assert limit.reason == "the engine's maximum of 1024 sequences"


def test_a_queue_without_a_full_kv_cache_does_not_lower_the_limit():
    assert updated(filled(), 68, num_running=200, num_waiting=888, kv_cache_usage=0.2) == 68  # prompts are computed
    assert updated(filled(), 68, num_running=1020, num_waiting=500, kv_cache_usage=0.98) == 68  # all slots are taken


def test_a_short_queue_at_a_full_kv_cache_does_not_lower_the_limit():
    assert updated(filled(), 68, num_running=100, num_waiting=16, kv_cache_usage=0.98) == 68  # one group
    assert updated(filled(), 68, num_running=900, num_waiting=40, kv_cache_usage=0.98) == 68  # less than 5 %


def test_the_limit_grows_while_the_engine_has_free_slots_and_no_queue():
    assert updated(filled(), 68, num_running=700) == 85  # completions of groups in flight have finished
    assert updated(filled(), 67, num_running=700) == 68  # the limit is not used up
    assert updated(filled(), 68, num_running=700, num_waiting=1) == 68
    assert updated(filled(), 68, num_running=1024) == 68


def test_the_report_of_a_held_engine_changes_nothing():
    limit = filled()
    assert updated(limit, 68, status="paused", num_waiting=1088, kv_cache_usage=0.98) == 68
    assert limit.busy_share == 0.0


def test_the_busy_share_is_that_of_running_sequences():
    limit = filled()
    updated(limit, 68, num_running=512, num_waiting=100)
    assert limit.busy_share == 0.5


def test_the_speed_of_the_engine_is_an_average_of_the_last_seconds():
    limit = InFlightLimit(at_most=0)
    speeds = []
    for thousands, seconds in (
        (1, 1.0),
        (50, 5.0),
        (51, 6.0),
        (200, 15.0),
        (1, 1.0),
        (7, 7.0),
        (9, 1.0),
        (19, 6.0),
        (1, 12.0),
    ):
        updated(limit, 1, generated_tokens=1000 * thousands, generating_s=seconds)
        speeds.append(limit.tokens_per_s / 1000)
    assert speeds == [
        0,
        10,
        10,
        15,
        15,
        1,
        1,
        2,
        2,
    ]  # the engine's counters begin again when it restarts, here three times


def test_the_cursor_forgets_nothing(tmp_path):
    cursor = ItemCursor(tmp_path / "cursor.json")
    assert [cursor.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    for index in (0, 2, 3):
        cursor.finish(index)
    asyncio.run(cursor.save())
    again = ItemCursor(tmp_path / "cursor.json")
    assert (again.num_done, [again.take() for _ in range(3)]) == (3, [1, 4, 5])
    again.give_back(4)
    assert [again.take(), again.take()] == [4, 6]
    (tmp_path / "cursor.json").write_text("{")
    with pytest.raises(ConfigError, match="delete it"):
        ItemCursor(tmp_path / "cursor.json")


def test_processes_of_one_environment_take_each_item_once(tmp_path):
    cursors = [ItemCursor(tmp_path / f"{n}.json", *parse_part(f"{n}/3")) for n in (1, 2, 3)]
    taken = [cursor.take() for _ in range(4) for cursor in cursors]
    assert taken == list(range(12))
    second = cursors[1]
    second.finish(1)
    second.finish(7)
    asyncio.run(second.save())
    again = ItemCursor(tmp_path / "2.json", *parse_part("2/3"))
    assert (again.num_done, [again.take() for _ in range(3)]) == (2, [4, 10, 13])
    again.start_over()
    assert (again.num_done, again.take()) == (0, 1)


def test_items_that_are_sometimes_right_come_more_often(tmp_path):
    class Scored:
        def __init__(self, right):
            self.score = type("S", (), {"reward": float(right), "is_right": right})()

    chooser = DifficultySelection(lambda _, number: number % 10, seed=0, path=tmp_path / "difficulty.json")
    for _ in range(2):
        for place in range(10):
            chooser.learn(place, [Scored((place == 3 and n == 0) or place > 6) for n in range(2)])
    counts = [sum(chooser.item_index(index) == place for index in range(400)) for place in range(10)]
    assert counts[3] == max(counts)
    assert counts[3] > 2 * sorted(counts)[-2]
    assert json.loads((tmp_path / "difficulty.json").read_text())["3"] == 0.5
    again = DifficultySelection(lambda _, number: number % 10, seed=0, path=tmp_path / "difficulty.json")
    assert again.item_index(7) == chooser.item_index(7)


def test_waves_are_refused_where_they_cannot_be(tmp_path):
    harness = Harness(tmp_path, pace="waves")
    with pytest.raises(ConfigError, match="several turns"):
        choose_pace(harness.config, load_environment(harness.config))
    plain = EnvConfig()
    assert choose_pace(plain, load_environment(plain)) == "waves"
    dropping = EnvConfig(ensure_scores_are_not_same=True)
    assert choose_pace(dropping, load_environment(dropping)) == "stream"
