"""Waves: corrections of the schedule, and many simulated runs with restarts, in which every item comes once."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from env_doubles import EngineDouble, FlakyNetwork, HubDouble, save_tokenizer
from starlette.responses import JSONResponse

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.hub_client import HubClient
from treadle.envs.main import open_context
from treadle.envs.serving.runner import run
from treadle.envs.serving.waves import PlannedWave, WaveSchedule
from treadle.errors import ConfigError
from treadle.net.client import RetryPolicy
from treadle.wire.hub import EnvState

QUICK = RetryPolicy(give_up_after_s=5.0, first_pause_s=0.01, longest_pause_s=0.05)


class TrainingHub(HubDouble):
    """A hub and a trainer that trains whatever makes a batch, whenever it is looked at.

    `becomes[step]` is a trainer that was started again there, and wants batches of another size.
    """

    def __init__(self, *, becomes=None, loses=None, batch_size=8, **settings):
        super().__init__(batch_size=batch_size, **settings)
        self.steps_at_once = False
        self.becomes = becomes or {}
        self.loses = loses or {}  # sequences, at a step
        self.num_gone = 0  # trained or lost
        self.trained = []  # sequences of each step
        self.looks_without_trainer = 0  # the hub was reset; then a trainer registers, with `next_batch_size`
        self.next_batch_size = batch_size

    @property
    def untrained(self):
        accepted = self.groups_accepted * 4 + sum(len(g.tokens) for _, groups in self.deliveries for g in groups)
        return accepted - self.num_gone

    async def _standing(self, http):
        if self.looks_without_trainer:
            self.looks_without_trainer -= 1
            self.info["batch_size"] = self.next_batch_size
            return JSONResponse(
                {"step": 0, "num_steps": 0, "batch_size": 0, "untrained_sequences": 0}
                | {"trainer_waits": False, "share": 1.0}
            )
        while self.current_step < self.num_steps and self.untrained >= self.info["batch_size"]:
            self.num_gone += self.info["batch_size"]
            self.trained.append(self.info["batch_size"])
            self.current_step += 1
            self.num_gone += self.loses.pop(self.current_step, 0)
            self.info["batch_size"] = self.becomes.pop(self.current_step, self.info["batch_size"])
        return JSONResponse(
            {
                "step": self.current_step,
                "num_steps": self.num_steps,
                "batch_size": self.info["batch_size"],
                "untrained_sequences": self.untrained,
                "trainer_waits": self.current_step < self.num_steps,
                "share": 1.0,
            }
        )


def add(prompt, request):
    a, b = map(int, re.findall(r"\d+", prompt)[:2])
    return [str(a + b) if i % 2 == 0 else "?" for i in range(request.n)]


def serve(tmp_path, hub, **settings):
    engine_double = EngineDouble(save_tokenizer(tmp_path / "model"), add)
    config = EnvConfig(**{"group_size": 4, "num_eval": 0, "seed": 5, **settings})

    async def scenario():
        async with (
            EngineClient(ServerConfig(), retry_policy=QUICK, transport=FlakyNetwork(engine_double.app)) as engine,
            HubClient("http://hub", retry_policy=QUICK, transport=FlakyNetwork(hub.app)) as client,
            open_context(load_environment(config), engine, ChatTokenizer.load(engine_double.folder)) as context,
        ):
            await asyncio.wait_for(run(context, client), 60)

    asyncio.run(scenario())


def items_of(hub):
    return [group.item for _, groups in hub.deliveries for group in groups]


@pytest.mark.parametrize("max_age", [0, 1, 2])
@pytest.mark.parametrize("becomes", [{2: 16}, {2: 24}, {2: 4}, {1: 16, 3: 4, 4: 8}])
def test_waves_follow_a_trainer_that_comes_back_with_another_batch_size(tmp_path, caplog, becomes, max_age):
    hub = TrainingHub(batch_size=8, num_steps=6, becomes=dict(becomes))
    serve(tmp_path, hub, max_age=max_age)
    sizes, size = [], 8
    for step in range(6):
        size = becomes.get(step, size)
        sizes.append(size)
    assert hub.trained == sizes
    assert len(set(items_of(hub))) == len(items_of(hub)), "an item was asked twice"
    assert len({key for key, _ in hub.deliveries}) == len(hub.deliveries)
    assert hub.untrained < (1 + max_age) * 24, "more than was asked for"
    reported = [record.treadle_fields for record in caplog.records if record.getMessage() == "trainer_changed"]
    assert [change["batch_size"] for change in reported] == list(becomes.values())


def test_a_batch_size_that_no_groups_can_fill_ends_with_both_numbers(tmp_path):
    hub = TrainingHub(batch_size=8, num_steps=6, becomes={2: 10})
    with pytest.raises(ConfigError, match="the batch of 10 sequences is no multiple of group_size 4"):
        serve(tmp_path, hub)


def test_an_environment_restarted_with_another_batch_size_continues(tmp_path):
    for size, groups_accepted, step in ((16, 16, 8), (4, 16, 2)):  # both had batches of eight, or of 32
        hub = TrainingHub(batch_size=size, num_steps=step + 3)
        hub.groups_accepted, hub.current_step, hub.num_gone = groups_accepted, step, 4 * groups_accepted
        serve(tmp_path, hub)
        assert hub.trained == [size] * 3
        assert items_of(hub)[0] >= groups_accepted


def test_what_the_hub_lost_is_made_up_for(tmp_path, caplog):
    hub = TrainingHub(batch_size=8, num_steps=5, loses={2: 4})
    serve(tmp_path, hub, max_age=1)
    assert hub.trained == [8] * 5
    assert [record for record in caplog.records if record.getMessage() == "wave_schedule_corrected"]


def test_a_trainer_that_wants_more_steps_gets_more_waves(tmp_path):
    hub = TrainingHub(batch_size=8, num_steps=3)
    hub.becomes = {2: 8}
    serve(tmp_path, hub, total_steps=2)
    assert hub.current_step == 2
    again = TrainingHub(batch_size=8, num_steps=5)
    again.groups_accepted, again.current_step, again.num_gone = 4, 2, 16
    serve(tmp_path, again)
    assert [key for key, _ in again.deliveries] == [
        f"arithmetic-5-wave-{wave}" for wave in ("3-item-4", "4-item-6", "5-item-8")
    ]


def test_after_a_reset_of_the_hub_waves_wait_for_and_follow_its_trainer(tmp_path):
    hub = TrainingHub(batch_size=8, num_steps=3)
    hub.looks_without_trainer, hub.next_batch_size = 5, 16
    serve(tmp_path, hub)
    assert hub.trained == [16] * 3


def test_after_a_reset_a_batch_smaller_than_a_group_is_refused(tmp_path):
    hub = TrainingHub(batch_size=8, num_steps=3)
    hub.looks_without_trainer, hub.next_batch_size = 5, 2
    with pytest.raises(ConfigError, match="the batch of 2 sequences is no multiple of group_size 4"):
        serve(tmp_path, hub)


def standing(**values):
    given = {"step": 4, "num_steps": 100, "batch_size": 64, "untrained_sequences": 0, "trainer_waits": False}
    return EnvState(**{**given, "share": 1.0, **values})


def test_the_steps_that_a_resumed_trainer_repeats_need_no_waves():
    count = WaveSchedule.at_start(standing(step=4), groups_accepted=10 * 8, group_size=8)
    assert count.next_wave() == PlannedWave(step=11, first_item=80, num_prompts=8)
    assert count.corrected(standing(step=4)) == count
    assert count.corrected(standing(step=7, untrained_sequences=0)) == count


def test_a_trainer_that_waits_for_what_was_delivered_is_believed():
    count = WaveSchedule.at_start(standing(step=4), groups_accepted=10 * 8, group_size=8)
    wave = count.corrected(standing(step=4, untrained_sequences=40, trainer_waits=True)).next_wave()
    assert wave == PlannedWave(step=5, first_item=80, num_prompts=3, first_position=5)


def test_the_rest_of_a_partial_wave_is_sampled_for_the_free_positions():
    count = WaveSchedule.at_start(standing(step=1, untrained_sequences=24), groups_accepted=11, group_size=8)
    assert count.next_wave() == PlannedWave(step=2, first_item=11, num_prompts=5, first_position=3)
    assert count.after(count.next_wave()).next_wave() == PlannedWave(step=3, first_item=16, num_prompts=8)


def test_a_batch_size_changed_during_a_restart_repeats_no_item():
    # Seven waves of two prompts, and now there are four in one: 14 is no multiple of it.
    count = WaveSchedule.at_start(standing(step=7, batch_size=32), groups_accepted=14, group_size=8)
    assert count.next_wave() == PlannedWave(step=8, first_item=14, num_prompts=4)


def test_a_wave_of_another_size_for_a_repeated_step_has_another_name():
    earlier = WaveSchedule.at_start(standing(step=2, batch_size=16), groups_accepted=4, group_size=8).next_wave()
    later = WaveSchedule.at_start(standing(step=2, batch_size=32), groups_accepted=8, group_size=8).next_wave()
    assert (earlier.step, earlier.first_item) == (3, 4)
    assert (later.step, later.first_item) == (3, 8)
    assert earlier.name != later.name


def test_a_new_hub_with_an_old_checkpoint_gets_only_the_next_waves():
    count = WaveSchedule.at_start(standing(step=50), groups_accepted=0, group_size=8)
    assert count.next_wave() == PlannedWave(step=51, first_item=400, num_prompts=8)


NUM_SIMULATIONS = 2000
NUM_STEPS = 12
MOST_ROUNDS = 400
FAULTS = ("env dies", "env dies in a delivery", "trainer resumes", "trainer resumes at once", "size", "both", "drop")


class SimulatedRun:
    """A run: the hub's queue and what it was trained on, the trainer, the environment; one thing wrong now and then."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.group_size = self.chance.choice([1, 2, 4])
        self.sizes = [self.group_size * prompts for prompts in (1, 2, 3, 4, 6)]
        self.batch_size = self.chance.choice(self.sizes)
        self.max_age = self.chance.choice([0, 0, 1, 2])
        self.num_faults = self.chance.randrange(5)
        self.step = 0
        self.trainer_waits = False
        self.queue: list[int] = []  # items
        self.recorded: set[int] = set()  # steps whose batch the hub has kept
        self.delivered: list[int] = []  # items
        self.keys: dict[str, list[int]] = {}
        self.conflicts: list[str] = []
        self.happened: list[str] = []
        self.count = self.start_env()

    def standing(self) -> EnvState:
        return EnvState(
            step=self.step,
            num_steps=NUM_STEPS,
            batch_size=self.batch_size,
            untrained_sequences=len(self.queue) * self.group_size,
            trainer_waits=self.trainer_waits,
            share=1.0,
        )

    def start_env(self) -> WaveSchedule:
        return WaveSchedule.at_start(self.standing(), groups_accepted=len(self.delivered), group_size=self.group_size)

    def run(self) -> None:
        for _ in range(MOST_ROUNDS):
            if self.step == NUM_STEPS:
                return
            if self.num_faults and self.chance.random() < 0.15:
                self.num_faults -= 1
                self.go_wrong(self.chance.choice(FAULTS))
            self.sample()
            self.train()
        raise AssertionError(f"stuck at step {self.step}: {self.count}, {self.standing()}")

    def go_wrong(self, fault: str) -> None:
        self.happened.append(f"{fault} at step {self.step}")
        if fault == "env dies in a delivery" and (wave := self.next_wave()) is not None:
            self.accept(wave.name, items_of_wave(wave)[: self.chance.randrange(wave.num_prompts + 1)])
        if fault in ("trainer resumes", "trainer resumes at once", "both"):
            self.step = max(0, self.step - self.chance.randrange(3))
        if fault in ("size", "both"):
            self.batch_size = self.chance.choice(self.sizes)
        if fault in ("size", "both", "trainer resumes"):
            self.trainer_waits = False
        if fault == "drop" and self.queue:
            self.queue.pop(self.chance.randrange(len(self.queue)))
        if fault.startswith("env dies") or self.chance.random() < 0.3:
            self.count = self.start_env()

    def next_wave(self) -> PlannedWave | None:
        """None: it is not time yet."""
        self.count = self.count.corrected(self.standing())
        wave = self.count.next_wave()
        return wave if wave.step <= min(NUM_STEPS, self.step + 1 + self.max_age) else None

    def sample(self) -> None:
        wave = self.next_wave()
        if wave is not None:
            self.accept(wave.name, items_of_wave(wave))
            self.count = self.count.after(wave)

    def accept(self, key: str, items: list[int]) -> None:
        """As the hub does: of two deliveries under one key, the first stands."""
        if not items:
            return
        if key in self.keys:
            self.conflicts.append(key)
            return
        self.keys[key] = items
        self.queue += items
        self.delivered += items

    def train(self) -> None:
        num_groups = self.batch_size // self.group_size
        is_there = self.step + 1 in self.recorded or len(self.queue) >= num_groups
        self.trainer_waits = not is_there
        if not is_there:
            return
        self.step += 1
        if self.step not in self.recorded:
            self.recorded.add(self.step)
            del self.queue[:num_groups]


def items_of_wave(wave: PlannedWave) -> list[int]:
    return list(range(wave.first_item, wave.first_item + wave.num_prompts))


def test_no_run_gets_stuck_repeats_an_item_or_reuses_a_key():
    num_faults = 0
    for seed in range(NUM_SIMULATIONS):
        scenario = SimulatedRun(seed)
        scenario.run()
        reported = f"run {seed}: {scenario.happened}"
        assert sorted(scenario.delivered) == list(range(len(scenario.delivered))), reported
        assert scenario.conflicts == [], reported
        num_faults += len(scenario.happened)
    assert num_faults > NUM_SIMULATIONS, "too little went wrong to show anything"
