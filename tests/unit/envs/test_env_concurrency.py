import asyncio
import io
from contextlib import aclosing

import pytest

from treadle.envs.rollout import groups_at_once, in_order, show_progress


def gather(work, items, at_once):
    async def run():
        async with aclosing(in_order(work, items, at_once=at_once)) as arriving:
            return [result async for result in arriving]

    return asyncio.run(run())


def test_results_come_in_order_however_long_each_takes():
    async def work(item):
        await asyncio.sleep(0.02 if item == 0 else 0)
        return item * item

    assert gather(work, range(6), at_once=3) == [0, 1, 4, 9, 16, 25]


def test_no_more_than_allowed_are_worked_on_at_once():
    running, most = 0, 0

    async def work(item):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    gather(work, range(20), at_once=3)
    assert most == 3


def test_a_failure_ends_the_rest():
    ended = []

    async def work(item):
        if item == 1:
            raise RuntimeError("gone")
        try:
            await asyncio.sleep(30 if item > 1 else 0)
        finally:
            ended.append(item)

    with pytest.raises(RuntimeError, match="gone"):
        gather(work, range(4), at_once=4)
    assert ended == [0, 2, 3]


@pytest.mark.parametrize(("num_rollouts", "at_once", "expected"), [(8, 64, 8), (1, 64, 64), (100, 64, 1), (8, 32, 4)])
def test_how_many_groups_keep_an_engine_busy(num_rollouts, at_once, expected):
    assert groups_at_once(num_rollouts, at_once) == expected


def test_without_a_terminal_progress_is_lines_and_few():
    reported = io.StringIO()
    with show_progress("groups", 1000, file=reported) as report_progress:
        for done in range(1, 1001):
            report_progress(done, "[bold]mean score 0.5")
    assert reported.getvalue() == "groups: 1000 of 1000, [bold]mean score 0.5\n"
