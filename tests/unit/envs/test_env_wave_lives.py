"""Waves over many restarts: whatever is killed, resumed, dropped or resized, items come once, nobody hangs."""

from __future__ import annotations

import random

from treadle.envs.serving.waves import PlannedWave, WaveSchedule
from treadle.wire.hub import EnvStanding

NUM_LIVES = 2000
NUM_STEPS = 12
MOST_ROUNDS = 400
FAULTS = ("env dies", "env dies in a delivery", "trainer resumes", "trainer resumes at once", "size", "both", "drop")


class Life:
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

    def standing(self) -> EnvStanding:
        return EnvStanding(
            step=self.step,
            num_steps=NUM_STEPS,
            batch_size=self.batch_size,
            untrained_sequences=len(self.queue) * self.group_size,
            trainer_waits=self.trainer_waits,
            share=1.0,
        )

    def start_env(self) -> WaveSchedule:
        return WaveSchedule.at_start(self.standing(), groups_accepted=len(self.delivered), group_size=self.group_size)

    def live(self) -> None:
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
            self.accept(wave.name, items_of(wave)[: self.chance.randrange(wave.num_prompts + 1)])
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
            self.accept(wave.name, items_of(wave))
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


def items_of(wave: PlannedWave) -> list[int]:
    return list(range(wave.first_item, wave.first_item + wave.num_prompts))


def test_no_life_is_stuck_repeats_an_item_or_uses_a_key_for_two_waves():
    num_faults = 0
    for seed in range(NUM_LIVES):
        life = Life(seed)
        life.live()
        reported = f"life {seed}: {life.happened}"
        assert sorted(life.delivered) == list(range(len(life.delivered))), reported
        assert life.conflicts == [], reported
        num_faults += len(life.happened)
    assert num_faults > NUM_LIVES, "too little went wrong to show anything"
