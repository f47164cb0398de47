"""The reward plot is a real picture, whatever is missing from the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.track.plot import HeldOutPoint, draw_reward, smoothed

pytest.importorskip("matplotlib")


def test_smoothing_is_not_pulled_towards_zero_at_its_start() -> None:
    assert smoothed([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    assert smoothed([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])
    assert smoothed([]) == []


@pytest.mark.parametrize(
    ("steps", "held_out"),
    [
        ([{"step": 1, "reward": 0.1, "rollout/accuracy": 0.0}, {"step": 2, "reward": None}], []),
        ([], [HeldOutPoint(0, 0.016, 0.006, 0.039), HeldOutPoint(50, 0.73, 0.67, 0.78)]),
        ([], []),
    ],
)
def test_it_draws_what_there_is(tmp_path: Path, steps, held_out) -> None:
    file = tmp_path / "reward.png"
    draw_reward(steps, held_out, title="addition").savefig(file)
    assert file.read_bytes().startswith(b"\x89PNG")
