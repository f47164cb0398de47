"""The stream: as many groups in flight as the age allows, nothing lost by kills, refusals and hubs that are away."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import re
import sys

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, Item, Score
from treadle.envs.catalogue import environment, load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.process import open_context
from treadle.envs.serving.assignment import FlightLimit, choose_pace, room
from treadle.envs.serving.item_selection import DifficultySelection, ItemCursor
from treadle.envs.serving.runner import run
from treadle.errors import ConfigError, EngineError, HubError, ProcessDied, ScoringError
from treadle.net.client import RetryPolicy
from treadle.wire.hub import EnvStanding

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
    said = re.findall(r"\d+", prompt)[-1] if "Again" not in prompt else "again"
    return [said + ("!" if (request.seed >> 20) % 2 else "")] * request.n


class Scene:
    def __init__(self, tmp_path, hub=None, **settings):
        self.config = EnvConfig(
            **{"name": "test-two-turns", "group_size": 4, "state_dir": tmp_path / "state", **settings}
        )
        self.hub = hub or TrainingHub(batch_size=8, num_steps=5)
        self.engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
        self.engine.policy_version = lambda: self.hub.current_step
        self.environment = None  # another class than the registered one

    async def serve(self):
        async with (
            EngineClient(ServerConfig(), retry_policy=QUICK, transport=FlakyNetwork(self.engine.app)) as engine,
            HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(self.hub.app)) as hub,
        ):
            tokenizer = ChatTokenizer.load(self.engine.folder)
            loaded = load_environment(self.config)
            task = loaded if self.environment is None else self.environment(loaded.config)
            async with open_context(task, engine, tokenizer) as context:
                await asyncio.wait_for(run(context, hub), 60)

    @property
    def folder(self):
        return self.config.state_dir / self.config.name


def test_a_run_is_served_to_its_end_and_dropped_groups_are_counted(tmp_path):
    scene = Scene(tmp_path)
    asyncio.run(scene.serve())
    assert scene.hub.current_step == 5
    assert all(group.item % 3 for group in scene.hub.groups)
    dropped = sum(group.metrics.get("dropped_equal_scores", 0) for group in scene.hub.groups)
    assert dropped >= 1
    group = scene.hub.groups[0]
    assert len(group.tokens) == 4
    assert all(
        len(t) == len(m) == len(lp)
        for t, m, lp in zip(group.tokens, group.masks, group.inference_logprobs, strict=True)
    )
    sampled = [token for token in group.masks[0] if token != -100]
    text = scene.engine.tokenizer.decode(sampled)
    assert text.replace("!", "") == f"{group.item}again"  # both turns, and only they, are trained
    assert scene.hub.disconnected == [7]


def test_no_more_is_begun_than_the_age_allows(tmp_path):
    scene = Scene(tmp_path, max_age=0)
    asyncio.run(scene.serve())
    assert scene.hub.most_untrained <= 8  # one step's worth
    assert [group.policy_version for group in scene.hub.groups][:4] == [0, 0, 1, 1]


def test_groups_scored_while_the_hub_is_away_are_sent_after_a_restart(tmp_path):
    scene = Scene(tmp_path)
    scene.hub.is_away = True

    async def killed_life():
        task = asyncio.create_task(scene.serve())
        while len(list(scene.folder.glob("spool/*.groups"))) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(killed_life())
    kept = sorted(path.name for path in scene.folder.glob("spool/*.groups"))
    assert len(kept) >= 2
    assert scene.hub.deliveries == []
    scene.hub.is_away = False
    asyncio.run(scene.serve())
    items = [group.item for group in scene.hub.groups]
    assert len(items) == len(set(items)), "an item was delivered twice"
    delivered = {key for key, _ in scene.hub.deliveries}
    assert {name.partition("-")[2].removesuffix(".groups") for name in kept} <= delivered
    assert list(scene.folder.glob("spool/*.groups")) == []
    assert scene.hub.current_step == 5


def test_the_items_of_a_new_run_begin_with_the_first(tmp_path):
    scene = Scene(tmp_path)
    asyncio.run(scene.serve())
    later = Scene(tmp_path)
    later.hub.run_id = "another"
    asyncio.run(later.serve())
    assert min(group.item for group in later.hub.groups) == 1  # item 0 teaches nothing


def test_groups_left_by_an_earlier_run_are_set_aside_and_not_delivered(tmp_path):
    scene = Scene(tmp_path)
    for name in ("spool", "refused"):
        (scene.folder / name).mkdir(parents=True)
        (scene.folder / name / "000001-test-two-turns-0-item-1.groups").write_bytes(b"of another run")
    (scene.folder / "spool" / "000002-test-two-turns-0-item-2.partial").write_bytes(b"half")
    (scene.folder / "run").write_text("4f1c")
    asyncio.run(scene.serve())
    aside = scene.folder / "of-run-4f1c"
    kept = sorted(str(path.relative_to(aside)) for path in aside.rglob("*.groups"))
    assert kept == [f"{name}/000001-test-two-turns-0-item-1.groups" for name in ("refused", "spool")]
    assert list(scene.folder.glob("spool/*")) == []
    assert list(scene.folder.glob("refused/*")) == []
    assert scene.hub.current_step == 5


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
    scene = Scene(tmp_path, hub=TrainingHub(batch_size=8, num_steps=30))

    async def scenario():
        serving = asyncio.create_task(scene.serve())
        await until(lambda: scene.hub.current_step >= 2, serving)
        scene.hub.info["batch_size"] = size
        scene.hub.train()
        await serving

    asyncio.run(scenario())
    assert scene.hub.current_step == 30
    (reported,) = [r.treadle_fields for r in caplog.records if r.getMessage() == "trainer_changed"]
    assert reported == {"batch_size": size, "batch_size_before": 8}


def test_a_stream_ends_when_its_groups_can_no_longer_fill_a_batch(tmp_path):
    scene = Scene(tmp_path, name="test-one-turn")
    scene.engine.write = lambda _, request: ["1", "2"] * (request.n // 2)

    async def scenario():
        serving = asyncio.create_task(scene.serve())
        await until(lambda: scene.hub.current_step >= 2, serving)
        scene.hub.info["batch_size"] = 10
        await serving

    scene.hub.num_steps = 10**6
    with pytest.raises(ConfigError, match="the batch of 10 sequences is no multiple of group_size 4"):
        asyncio.run(scenario())


def test_a_group_that_the_hub_refuses_is_kept_and_the_run_goes_on(tmp_path):
    scene = Scene(tmp_path)
    scene.hub.failures = [JSONResponse({"detail": "mask has the wrong length"}, 422)]
    asyncio.run(scene.serve())
    assert scene.hub.current_step == 5
    assert len(list(scene.folder.glob("refused/*.groups"))) == 1


def test_a_hub_that_refuses_everything_is_reported(tmp_path):
    scene = Scene(tmp_path)
    scene.hub.failures = [JSONResponse({"detail": "mask has the wrong length"}, 422)] * 9
    with pytest.raises(HubError, match=r"mask has the wrong length.*kept in .*refused"):
        asyncio.run(scene.serve())
    assert len(list(scene.folder.glob("refused/*.groups"))) == 3


def test_two_processes_do_not_share_a_cursor(tmp_path):
    scene = Scene(tmp_path)
    scene.folder.mkdir(parents=True)
    with (scene.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another environment process"):
            asyncio.run(scene.serve())


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
    scene = Scene(tmp_path, name="test-odd-code")
    asyncio.run(scene.serve())
    assert scene.hub.current_step == 5
    assert 1 not in [group.item for group in scene.hub.groups]


def test_a_task_that_always_raises_ends_after_the_first_group(tmp_path):
    OddCode.odd = staticmethod(lambda: 0.0)
    scene = Scene(tmp_path, name="test-odd-code")
    scene.engine.write = lambda prompt, request: ["no number here"]

    class Broken(OddCode):
        async def rollout(self, item, model):
            await model.chat(item.messages).ask()
            raise KeyError("forgotten")

    scene.environment = Broken
    with pytest.raises(ScoringError, match=r"none of 4 answers .* KeyError: 'forgotten', at \S*test_env_stream.py:\d+"):
        asyncio.run(scene.serve())


def test_a_task_that_never_has_a_score_ends_and_says_why(tmp_path):
    OddCode.odd = staticmethod(lambda: 0.0)
    scene = Scene(tmp_path, name="test-odd-code", num_eval=0)

    class Slow(OddCode):
        async def rollout(self, item, model):
            await model.chat(item.messages).ask()
            return Score(None, is_right=False, outcome="timed_out", error="took longer than 10 s")

    scene.environment = Slow
    with pytest.raises(ProcessDied, match="none was fit to be trained on: took longer than 10 s"):
        asyncio.run(scene.serve())


def test_an_engine_that_answers_garbage_is_tried_again_and_then_named(tmp_path):
    scene = Scene(tmp_path)
    scene.engine.write = lambda prompt, request: ["too", "many", "answers"]
    with pytest.raises(EngineError, match="asked for 1 completions"):
        asyncio.run(scene.serve())
    assert len(scene.engine.requests) >= 12


def test_an_item_that_always_fails_is_left_out_and_the_run_goes_on(tmp_path):
    scene = Scene(tmp_path)
    scene.engine.write = lambda prompt, request: write(prompt, request) * (2 if "Say 4<" in prompt else 1)
    asyncio.run(scene.serve())
    assert scene.hub.current_step == 5
    assert 4 not in [group.item for group in scene.hub.groups]


def standing(**values):
    given = {
        "step": 0,
        "num_steps": 100,
        "batch_size": 64,
        "untrained_sequences": 0,
        "trainer_waits": False,
        "share": 1.0,
    }
    return EnvStanding(**{**given, **values})


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
    asked = room(now, max_age=1, group_sequences=8.0, num_spooled=spooled, num_in_flight=flying, limit=64)
    assert asked == begin


def test_groups_of_several_sequences_count_by_their_sequences():
    asked = room(standing(), max_age=1, group_sequences=24.0, num_spooled=0, num_in_flight=0, limit=64)
    assert asked == 6


def test_groups_in_flight_follow_what_the_engine_takes():
    limit = FlightLimit(at_most=40)
    for _ in range(10):
        limit.learn(num_running=8, num_waiting=0, num_in_flight=limit.value)
    assert limit.value == 40
    limit.learn(num_running=8, num_waiting=32, num_in_flight=40)
    assert limit.value == 32
    limit.learn(num_running=8, num_waiting=4, num_in_flight=32)
    assert limit.value == 32


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


def test_items_that_are_sometimes_right_come_more_often(tmp_path):
    class Scored:
        def __init__(self, right):
            self.score = type("S", (), {"reward": float(right), "is_right": right})()

    chooser = DifficultySelection(10, seed=0, path=tmp_path / "difficulty.json")
    for _ in range(2):
        for place in range(10):
            chooser.learn(place, [Scored((place == 3 and n == 0) or place > 6) for n in range(2)])
    counts = [sum(chooser.item_index(index) == place for index in range(400)) for place in range(10)]
    assert counts[3] == max(counts)
    assert counts[3] > 2 * sorted(counts)[-2]
    assert json.loads((tmp_path / "difficulty.json").read_text())["3"] == 0.5
    again = DifficultySelection(10, seed=0, path=tmp_path / "difficulty.json")
    assert again.item_index(7) == chooser.item_index(7)


def test_waves_are_refused_where_they_cannot_be(tmp_path):
    scene = Scene(tmp_path, pace="waves")
    with pytest.raises(ConfigError, match="several turns"):
        choose_pace(scene.config, load_environment(scene.config))
    plain = EnvConfig()
    assert choose_pace(plain, load_environment(plain)) == "waves"
    dropping = EnvConfig(ensure_scores_are_not_same=True)
    assert choose_pace(dropping, load_environment(dropping)) == "stream"
