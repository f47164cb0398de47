"""An engine that is held, or whose model finishes nothing, is a wait with somebody whose turn it is."""

from __future__ import annotations

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.eye import EngineEye
from treadle.engines.port import EngineState
from treadle.engines.transformers_engine import TransformersEngine
from treadle.loading import report_loading
from treadle.watch.waits import Waits


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def state(**more: object) -> EngineState:
    values = {
        "policy_version": 3,
        "is_held": False,
        "num_running": 0,
        "num_waiting": 0,
        "generated_tokens": 0,
        "num_moves": 0,
    }
    return EngineState(**{**values, "generating_s": 0.0, **more})  # type: ignore[arg-type]


def test_a_held_engine_waits_for_the_trainer_until_it_is_let_go() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    eye = EngineEye(waits, 300.0)
    eye.see(state(is_held=True, num_running=5, num_waiting=2))
    clock.now_s = 301
    eye.see(state(is_held=True, num_running=5, num_waiting=9))
    (wait,) = waits.now
    assert (wait.wanted.of, wait.wanted.holding) == ("trainer", "5 requests that run and 2 that wait")
    assert (wait.seconds, wait.is_late) == (301, True)
    assert eye.about().state == "held"
    eye.see(state())
    assert waits.now == []
    assert eye.about().state == "idle"


def test_a_model_that_gets_on_is_not_late() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    eye = EngineEye(waits, 300.0)
    for tokens in (0, 10, 20, 20):
        eye.see(state(num_running=4, num_moves=tokens))
        clock.now_s += 200
    (wait,) = waits.now
    assert wait.seconds == 400, "since it last got on"
    assert wait.is_late
    assert eye.about().state == "generating 4, 0 waiting"


def test_before_the_model_is_there_it_is_loading() -> None:
    assert EngineEye(Waits(), 300.0).about().state == "loading"


def test_a_model_that_loads_tells_how_far_it_has_come_until_it_serves(tmp_path) -> None:
    folder = write_tiny_model(tmp_path)
    eye = EngineEye(Waits(), 300.0)
    told: list[tuple[int, int]] = []

    def tell(what: str, done: int, total: int) -> None:
        eye.loads(what, done, total)
        work = eye.about().work
        assert work is not None
        assert work.what == "loading weights"
        told.append((work.done, work.total))

    assert eye.about().work is None
    with report_loading(tell):
        engine = TransformersEngine(EngineConfig(dtype="float32", threads=1), folder)
    total = len(engine.weights)
    assert told == [(done, total) for done in range(total + 1)]
    eye.see(state())
    assert eye.about().work is None
    TransformersEngine(EngineConfig(dtype="float32", threads=1), folder)
    assert len(told) == total + 1  # nobody listens any more
