"""Share one GPU between engine and trainer: compute at the same time, or take turns.

    free     both compute whenever they have work; each slows the other
    mps      the same through CUDA MPS, where kernels of both run side by side (launch/mps.py starts its daemon)
    turns    the engine samples no token during forward and backward
    auto     mps where it works; then the faster of `free` and `turns`, measured in the first steps

What is faster depends on the model, the lengths and the card, so it is measured and not predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.sync.layout import Layout
from treadle.sync.protocol import EngineLink
from treadle.wire.bridge import BridgeState, Pause, Resume

log = get_logger("trainer")

# The engine continues by itself after this time: a trainer that is killed must not leave it paused, and two that
# compute at once do no harm.
LONGEST_TURN_S = 120.0
WARM_UP_STEPS = 4  # compilation, and a queue that fills
MEASURED_STEPS = 4  # of each kind; an even number, because with equal lengths two batches arrive at once
MIN_GAIN = 0.02  # a smaller difference is noise


class PausableEngine(Protocol):
    def pause(self) -> None: ...

    def resume(self) -> None: ...


class _LinkedEngine:
    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def pause(self) -> None:
        self._link.post("/bridge/pause", Pause(mode="keep", at_most_s=LONGEST_TURN_S), BridgeState)

    def resume(self) -> None:
        self._link.post("/bridge/resume", Resume(), BridgeState)


class CardSharing:
    """`with sharing.computing(): forward and backward`, then `sharing.record(seconds)` once per step.

    `engine` None: it computes elsewhere, and is never paused.
    """

    def __init__(self, engine: PausableEngine | None = None, *, measures: bool = False) -> None:
        self._engine = engine
        self._takes_turns = engine is not None and not measures
        self._measures = engine is not None and measures
        self._num_steps = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether they took turns

    @contextmanager
    def computing(self) -> Iterator[None]:
        if self._engine is None or not self._takes_turns:
            yield
            return
        self._engine.pause()
        try:
            yield
        finally:
            self._engine.resume()

    def record(self, step_s: float) -> None:
        """Count a step. While measuring, each kind has one step that does not count, because it begins as the other
        kind ended."""
        self._num_steps += 1
        if not self._measures or self._num_steps <= WARM_UP_STEPS:
            return
        own = self._seconds[self._takes_turns]
        own.append(step_s)
        if len(own) <= MEASURED_STEPS:
            return
        if not self._takes_turns:
            self._takes_turns = True
            return
        free_s, turns_s = (statistics.mean(self._seconds[kind][1:]) for kind in (False, True))
        self._takes_turns = turns_s < (1 - MIN_GAIN) * free_s
        self._measures = False
        log.info(
            "card_sharing", chosen="turns" if self._takes_turns else "at the same time",
            seconds_at_the_same_time=free_s, seconds_in_turns=turns_s,
        )  # fmt: skip


def share_card(config: TrainConfig, layout: Layout | None, device: torch.device) -> CardSharing:
    """Turns are taken only with an engine whose memory is mapped here: it computes on this card. The user may demand
    them for any other."""
    is_same_card = device.type == "cuda" and layout is not None and bool(layout.storages)
    if config.card_sharing == "turns" or (config.card_sharing in ("auto", "mps") and is_same_card):
        engine = _LinkedEngine(EngineLink.of_trainer(config))
        return CardSharing(engine, measures=config.card_sharing != "turns")
    return CardSharing()
