"""Engine and trainer on one GPU: turns, and the measurement that chooses them."""

from __future__ import annotations

import pytest
import torch

from treadle.config import TrainConfig
from treadle.train.card_sharing import MEASURED_STEPS, WARM_UP_STEPS, CardSharing, share_card


class RecordedEngine:
    def __init__(self):
        self.calls = []

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")


def take_steps(sharing, number, seconds):
    for _ in range(number):
        with sharing.computing():
            pass
        sharing.record(seconds)


def test_the_engine_is_paused_only_during_the_computation():
    engine = RecordedEngine()
    with CardSharing(engine).computing():
        assert engine.calls == ["pause"]
    assert engine.calls == ["pause", "resume"]


def test_the_engine_resumes_after_a_failed_computation():
    engine = RecordedEngine()
    with pytest.raises(ZeroDivisionError), CardSharing(engine).computing():
        raise ZeroDivisionError
    assert engine.calls == ["pause", "resume"]


@pytest.mark.parametrize(("turns_s", "pauses"), [(3.0, True), (3.9, False), (5.0, False)])
def test_turns_are_kept_if_they_were_clearly_faster(turns_s, pauses):
    engine = RecordedEngine()
    sharing = CardSharing(engine, measures=True)
    take_steps(sharing, WARM_UP_STEPS + MEASURED_STEPS + 1, 3.9)
    assert engine.calls == []
    take_steps(sharing, MEASURED_STEPS + 1, turns_s)
    assert engine.calls == ["pause", "resume"] * (MEASURED_STEPS + 1)
    engine.calls.clear()
    take_steps(sharing, 1, 3.9)
    assert engine.calls == (["pause", "resume"] if pauses else [])


def test_batches_that_arrive_in_pairs_are_compared_by_their_mean():
    engine = RecordedEngine()
    sharing = CardSharing(engine, measures=True)
    take_steps(sharing, WARM_UP_STEPS + 1, 3.0)
    for seconds in (5.0, 2.0) * (MEASURED_STEPS // 2):
        take_steps(sharing, 1, seconds)
    take_steps(sharing, MEASURED_STEPS + 1, 3.0)
    engine.calls.clear()
    take_steps(sharing, 1, 3.0)
    assert engine.calls == ["pause", "resume"]


def test_an_engine_elsewhere_is_never_paused_unless_the_user_demands_it():
    device = torch.device("cuda")
    assert share_card(TrainConfig(), None, device)._engine is None
    assert share_card(TrainConfig(card_sharing="free"), None, device)._engine is None
    assert share_card(TrainConfig(card_sharing="turns"), None, device)._engine is not None
