"""The answer of a plan: components, each with the moments in which it exists, on each place that has memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treadle.launch.budget.calibration import SAFE_SHARE
from treadle.launch.budget.cards import Machine
from treadle.launch.budget.job import Job

Moment = Literal["loss", "backward", "step"]
Verdict = Literal["fits", "tight", "does not fit", "not known"]
Owner = Literal["trainer", "engine", "both", "others"]
ALL: tuple[Moment, ...] = ("loss", "backward", "step")
MICRO: tuple[Moment, ...] = ("loss", "backward")


@dataclass(frozen=True)
class Component:
    """`bytes` of memory in these moments of a step: while the loss is made, while a layer's backward runs, and while
    the optimizer moves the weights."""

    name: str
    bytes: int
    owner: Owner
    note: str = ""
    moments: tuple[Moment, ...] = ALL

    @property
    def is_transient(self) -> bool:
        return self.moments != ALL


@dataclass(frozen=True)
class Place:
    """One kind of memory: "each trainer GPU", "host"; `capacity` None: not known."""

    name: str
    capacity: int | None
    components: tuple[Component, ...]
    problem: str = ""  # why it does not fit, whatever the sum

    def at(self, moment: Moment) -> int:
        return sum(part.bytes for part in self.components if moment in part.moments)

    @property
    def peak_moment(self) -> Moment:
        return max(ALL, key=self.at)

    @property
    def peak(self) -> int:
        return self.at(self.peak_moment)

    @property
    def verdict(self) -> Verdict:
        if self.capacity is None:
            return "not known"
        if self.problem or self.peak > self.capacity:
            return "does not fit"
        return "fits" if self.peak <= SAFE_SHARE * self.capacity else "tight"

    def find(self, name: str) -> int:
        """Bytes of the component with this name; 0 when there is none."""
        return sum(part.bytes for part in self.components if part.name == name)

    @property
    def trainer_tensors(self) -> int:
        """What the trainer's own torch would report as its peak: no contexts, no gaps, nothing of the engine.

        Shared weights count, though they are mapped: subtract "weights" where the engine allocated them.
        """
        mine = [p for p in self.components if p.owner in ("trainer", "both") and p.name not in NOT_TENSORS]
        return max(sum(part.bytes for part in mine if moment in part.moments) for moment in ALL)


NOT_TENSORS = ("CUDA context", "fragmentation", "Python and torch", "freed but kept")


@dataclass(frozen=True)
class Budget:
    job: Job
    machine: Machine
    places: tuple[Place, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the places; one whose size is not known decides nothing."""
        verdicts = {place.verdict for place in self.places}
        order: tuple[Verdict, ...] = ("does not fit", "tight", "fits")
        return next((verdict for verdict in order if verdict in verdicts), "not known")

    def place(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)
