from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.hub.batching import plan
from treadle.store import LeaseTerms, Store
from treadle.wire.hub import RegisterTrainer


class HandClock:
    """A monotonic clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def terms() -> LeaseTerms:
    return LeaseTerms(lease_s=60.0, max_deliveries=3, plan=plan, is_alive=lambda _: True)


@pytest.fixture
def trainer() -> RegisterTrainer:
    return RegisterTrainer(
        wandb_group="g",
        wandb_project="p",
        batch_size=4,
        max_token_len=128,
        checkpoint_dir="ckpt",
        save_checkpoint_interval=5,
        starting_step=0,
        num_steps=10,
    )


@pytest.fixture
def store(tmp_path: Path, clock: HandClock) -> Iterator[Store]:
    with Store.open(tmp_path / "hub.sqlite", clock=clock) as opened:
        yield opened
