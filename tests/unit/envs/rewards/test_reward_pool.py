"""The pool: whatever a reward does, its completion gets an outcome, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import misbehaving_rewards
import psutil
import pytest
import uvloop

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment
from treadle.envs.rewards import LengthReward, RewardInput, RewardPool, make_scorer, registry
from treadle.envs.rewards.base import CallResult
from treadle.envs.rewards.scorers import CallBatch, CallQueue
from treadle.envs.rewards.worker_handle import INPUTS, pack_inputs
from treadle.errors import ConfigError, ProcessDied, TreadleError

PATIENCE_S = 60.0  # for what must happen, on a busy machine


def inputs_of(*texts):
    return [RewardInput(text) for text in texts]


def scored(reward, inputs, **settings):
    """The results of one call of `score` in a pool of its own."""

    async def score():
        async with RewardPool(**{"num_workers": 1, "time_limit_s": 1.5, **settings}) as pool:
            return await asyncio.wait_for(pool.score(reward, inputs), PATIENCE_S)

    return asyncio.run(score())


def wait_until_gone(pids):
    """Every process has ended; one that nobody has collected yet counts as ended."""
    deadline = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_verdict_of_a_reward_decides_and_else_the_threshold_does():
    class Task(Environment):
        def eval_items(self):
            return []

    def is_right(rewards, **settings):
        Task.rewards = rewards
        judge = Task(EnvConfig(**settings)).is_right
        return [judge(result) for result in scored(registry.create(rewards), inputs)]

    inputs = [RewardInput("4", answer="4"), RewardInput("5", answer="4")]
    assert is_right([misbehaving_rewards.half]) == [False, False], "some points are not a right answer"
    assert is_right([misbehaving_rewards.half], right=0.5) == [True, True]
    assert is_right([misbehaving_rewards.shaped]) == [True, False]
    assert is_right([misbehaving_rewards.half, misbehaving_rewards.shaped], right=0.1) == [True, False]


@pytest.mark.parametrize(
    ("misdeed", "outcome", "detail"),
    [
        ("loop", "timed_out", "took longer than 1.5 s"),
        ("regex", "timed_out", "took longer than 1.5 s"),
        ("recurse", "raised", "RecursionError"),
        ("memory", "out_of_memory", "memory limit"),
        ("raise", "raised", "KeyError: 'no such answer'"),
        ("sys.exit", "raised", "SystemExit: 3"),
        ("os._exit", "worker_died", "exit code 4"),
        ("abort", "worker_died", "SIGABRT"),
        ("nan", "raised", "the score is nan"),
        ("none", "raised", "the score is None"),
        ("words", "raised", "the score is 'plenty'"),
        ("verdict", "raised", "'correct' is 'yes', not True or False"),
    ],
)
def test_what_a_reward_does_is_the_outcome_of_its_completion_alone(misdeed, outcome, detail):
    before, blamed, after = scored(misbehaving_rewards.misbehave, inputs_of("1", misdeed, "2"))
    assert (before.score, before.outcome) == (1.0, "scored")
    assert (after.score, after.outcome) == (2.0, "scored")
    assert (blamed.score, blamed.parts, blamed.outcome) == (None, {"misbehave": None}, outcome)
    assert detail in blamed.detail
    assert blamed.detail.startswith("misbehave: ")


def test_a_timeout_in_a_chunk_fails_its_completion_and_keeps_the_order():
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=1.5) as pool:
            await pool.score(
                misbehaving_rewards.misbehave, inputs_of(*map(str, range(100)))
            )  # now it is known to be cheap
            texts = [str(number) for number in range(120)]
            texts[17] = texts[18] = "loop"
            texts[70] = "os._exit"
            return await pool.score(misbehaving_rewards.misbehave, inputs_of(*texts))

    results = asyncio.run(score())
    assert {place: r.outcome for place, r in enumerate(results) if r.outcome != "scored"} == {
        17: "timed_out", 18: "timed_out", 70: "worker_died",
    }  # fmt: skip
    assert all(r.score == place for place, r in enumerate(results) if r.outcome == "scored")


def test_200_concurrent_callers_each_get_their_own_results():
    bad = {20: "loop", 77: "raise", 133: "memory"}

    async def score():
        async with RewardPool(num_workers=2, time_limit_s=2.0, max_waiting=32) as pool:
            callers = [
                pool.score(misbehaving_rewards.misbehave, inputs_of(bad.get(caller, str(caller)), str(caller + 0.5)))
                for caller in range(200)
            ]
            return await asyncio.wait_for(asyncio.gather(*callers), PATIENCE_S)

    for caller, (first, second) in enumerate(asyncio.run(score())):
        assert second.score == caller + 0.5
        assert first.score == (None if caller in bad else caller)


def test_the_event_loop_goes_on_while_rewards_hang():
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=1.0) as pool:
            num_turns = 0
            scoring = asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of("regex")))
            while not scoring.done():
                await asyncio.sleep(0.01)
                num_turns += 1
            return num_turns, await scoring

    num_turns, (result,) = asyncio.run(score())
    assert result.outcome == "timed_out"
    assert num_turns > 20


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_counts_though_our_own_loop_was_busy_past_the_limit(new_loop):
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=2.0) as pool:
            await pool.score(misbehaving_rewards.misbehave, inputs_of("1"))  # the worker is up
            scoring = asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of("nap")))
            await asyncio.sleep(0.1)  # the nap of half a second begins
            time.sleep(2.5)  # noqa: ASYNC251  # somebody's code blocks the loop
            return await scoring

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert [result.score for result in runner.run(score())] == [0.5]


def test_it_works_under_uvloop():
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=1.0) as pool:
            return await pool.score(misbehaving_rewards.misbehave, inputs_of("1", "loop", "2"))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(score())
    assert [result.outcome for result in results] == ["scored", "timed_out", "scored"]


def test_memory_left_by_earlier_calls_does_not_fail_a_later_completion():
    results = scored(misbehaving_rewards.hoarding, inputs_of(*"12345678"), memory_limit_mb=200, time_limit_s=10)
    assert [result.score for result in results] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_reward_that_looks_at_groups_is_called_once_with_all_of_them():
    slow_steps = registry.create("rank", step=0.5)
    results = scored(slow_steps, inputs_of("ccc", "a", "bb", "dd"))
    assert [result.score for result in results] == [1.0, 0.0, 0.5, 0.5]


def test_a_group_call_that_fails_marks_the_whole_group():
    results = scored(misbehaving_rewards.rank, inputs_of("a", "loop"))
    assert [result.outcome for result in results] == ["timed_out", "timed_out"]


def test_a_failed_part_keeps_the_others_and_weight_zero_fails_nothing():
    both = registry.create([LengthReward(target=2), misbehaving_rewards.misbehave])
    (failed,) = scored(both, inputs_of("raise"))
    assert (failed.score, failed.parts) == (None, {"length": 0.5, "misbehave": None})
    recorded = registry.create([LengthReward(target=2), {"type": misbehaving_rewards.misbehave.source, "weight": 0}])
    (fine,) = scored(recorded, inputs_of("raise"))
    assert (fine.score, fine.outcome, fine.parts["misbehave"]) == (0.5, "scored", None)
    assert "KeyError" in fine.detail


def test_nothing_to_score_is_nothing():
    assert scored(misbehaving_rewards.misbehave, []) == []
    assert scored(misbehaving_rewards.rank, []) == []


def test_the_time_to_load_a_reward_is_not_its_completions():
    (result,) = scored(misbehaving_rewards.SleepyReward(load_s=1.0), inputs_of("x"), time_limit_s=0.9)
    assert result.score == 1.0


@pytest.mark.parametrize(
    ("reward", "error", "words"),
    [
        (misbehaving_rewards.BrokenReward(), ConfigError, "no module named 'verifier'"),
        (misbehaving_rewards.CrashingReward(), ProcessDied, "exit code 9"),
        (misbehaving_rewards.SleepyReward(load_s=60), ProcessDied, "took longer than 3 s"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_and_the_pool_goes_on(reward, error, words):
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=5, load_limit_s=3) as pool:
            with pytest.raises(error, match=words):
                await pool.score(reward, inputs_of("1", "2"))
            return await pool.score(misbehaving_rewards.misbehave, inputs_of("1"))

    assert [result.score for result in asyncio.run(score())] == [1.0]


def test_what_cannot_be_sent_to_a_worker_is_refused_with_a_way_out():
    def local(completion):
        return 1.0

    with pytest.raises(ConfigError, match="inline"):
        scored(
            registry.create(misbehaving_rewards.misbehave.with_settings({})).__class__(function=local), inputs_of("1")
        )
    with pytest.raises(ConfigError, match="cannot be sent"):
        scored(registry.create("rank", step=object()), inputs_of("1"))
    with pytest.raises(ConfigError, match="cannot be sent"):
        scored(misbehaving_rewards.misbehave, [RewardInput("1", metadata={"row": object()})])


def test_a_completion_without_text_is_marked_alone():
    broken, fine = scored(misbehaving_rewards.misbehave, [RewardInput(None), RewardInput("1")])
    assert (broken.outcome, fine.score) == ("raised", 1.0)


def test_closing_leaves_no_worker_and_tells_those_who_wait():
    async def score():
        pool = RewardPool(num_workers=2, time_limit_s=30)
        async with pool:
            waiting = [
                asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of("loop"))) for _ in range(4)
            ]
            while len(pool.workers) < 2:
                await asyncio.sleep(0.01)
            pids = [worker.pid for worker in pool.workers]
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)
        return pids, outcomes, pool

    pids, outcomes, pool = asyncio.run(score())
    assert all(isinstance(outcome, TreadleError) for outcome in outcomes)
    assert not [pid for pid in pids if is_alive(pid)]
    with pytest.raises(TreadleError, match="not open"):
        asyncio.run(pool.score(misbehaving_rewards.misbehave, inputs_of("1")))


def test_closing_tells_those_who_could_not_even_stand_in_line():
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=30, max_waiting=1) as pool:
            waiting = [
                asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of("loop", "1"))) for _ in range(5)
            ]
            while not pool.workers:
                await asyncio.sleep(0.01)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)

    assert [type(outcome) for outcome in asyncio.run(score())] == [TreadleError] * 5


def test_a_caller_that_goes_away_takes_its_waiting_calls_along():
    async def score():
        async with RewardPool(num_workers=1, time_limit_s=1.0) as pool:
            gone = asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of(*["loop"] * 100)))
            while not pool.workers:
                await asyncio.sleep(0.01)
            gone.cancel()
            return await asyncio.wait_for(pool.score(misbehaving_rewards.misbehave, inputs_of("1")), 50)  # not 100 s

    assert [result.score for result in asyncio.run(score())] == [1.0]


def test_what_a_reward_started_is_killed_with_its_worker(tmp_path, monkeypatch):
    note = tmp_path / "pid"
    monkeypatch.setenv("CHILD_PID_FILE", str(note))
    (result,) = scored(misbehaving_rewards.misbehave, inputs_of("child"))
    assert result.outcome == "timed_out"
    wait_until_gone([int(note.read_text())])


PARENT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import misbehaving_rewards
from treadle.envs.rewards import RewardInput, RewardPool

async def main():
    async with RewardPool(num_workers=2, time_limit_s=600) as pool:
        scoring = asyncio.create_task(pool.score(misbehaving_rewards.misbehave, [RewardInput({misdeed!r})]))
        idle = await pool.score(misbehaving_rewards.misbehave, [RewardInput("1")])
        while len(pool.workers) < 2:
            await asyncio.sleep(0.01)
        print(*[worker.pid for worker in pool.workers], flush=True)
        await scoring

asyncio.run(main())
"""


@pytest.mark.parametrize("misdeed", ["loop", "regex"])
def test_no_worker_outlives_a_parent_that_is_killed(misdeed):
    script = PARENT.format(folder=str(Path(__file__).parent), misdeed=misdeed)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    wait_until_gone(pids)


def test_a_worker_opens_no_pool_of_its_own(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import asyncio\n"
        "from treadle.envs.rewards import RewardInput, RewardPool, reward\n"
        "@reward\n"
        "def always(completion):\n"
        "    return 1.0\n"
        "async def main():\n"
        "    async with RewardPool(num_workers=1) as pool:\n"
        "        await pool.score(always, [RewardInput('x')])\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode != 0
    assert 'if __name__ == "__main__":' in run.stderr


def test_the_line_is_bounded_and_first_come_first_served():
    async def stand_in_line():
        line = CallQueue(max_waiting=3)
        batch = CallBatch(
            0, {}, [pack_inputs(inputs_of(str(n))) for n in range(5)], asyncio.get_running_loop().create_future()
        )
        putting = asyncio.create_task(line.put(batch))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(line), putting.done()) == (3, False)
        first = await line.take(lambda key: 2)
        await putting
        rest = await line.take(lambda key: 64)
        for call in [*first, *rest]:
            call.set_result(CallResult(scores=[1.0]))
        assert batch.done.done()
        return [INPUTS.decode(call.inputs)[0].text for call in [*first, *rest]]

    assert asyncio.run(stand_in_line()) == ["0", "1", "2", "3", "4"]


def test_two_who_wait_for_one_call_take_one_call():
    async def stand_in_line():
        line = CallQueue(max_waiting=3)
        takers = [asyncio.create_task(line.take(lambda key: 1)) for _ in range(2)]
        batch = CallBatch(
            0, {}, [pack_inputs(inputs_of(text)) for text in "ab"], asyncio.get_running_loop().create_future()
        )
        await asyncio.sleep(0)  # both wait
        await line.put(CallBatch(0, {}, batch.calls[:1], batch.done))
        while not any(taker.done() for taker in takers):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sorted(taker.done() for taker in takers) == [False, True]
        await line.put(CallBatch(0, {}, batch.calls[1:], batch.done))
        calls = [call for taken in await asyncio.gather(*takers) for call in taken]
        return sorted(INPUTS.decode(call.inputs)[0].text for call in calls)

    assert asyncio.run(stand_in_line()) == ["a", "b"]


def test_all_workers_are_still_at_work_after_single_calls():
    async def score():
        async with RewardPool(num_workers=3, time_limit_s=30) as pool:
            for number in range(20):
                await pool.score(misbehaving_rewards.misbehave, inputs_of(str(number)))
            hanging = [
                asyncio.create_task(pool.score(misbehaving_rewards.misbehave, inputs_of("loop"))) for _ in range(2)
            ]
            (result,) = await asyncio.wait_for(pool.score(misbehaving_rewards.misbehave, inputs_of("7")), 60)
            for task in hanging:
                task.cancel()
            return result.score

    assert asyncio.run(score()) == 7.0


def test_inline_scoring_gives_the_same_results_without_processes():
    async def score():
        async with make_scorer("inline") as scorer:
            return await scorer.score(misbehaving_rewards.misbehave, inputs_of("1", "raise", "sys.exit", "2"))

    results = asyncio.run(score())
    assert [result.outcome for result in results] == ["scored", "raised", "raised", "scored"]
    assert [result.score for result in results] == [1.0, None, None, 2.0]


def test_impossible_limits_are_refused():
    for settings in ({"num_workers": 0}, {"time_limit_s": 0}, {"memory_limit_mb": -1}, {"max_waiting": 0}):
        with pytest.raises(ConfigError):
            RewardPool(**settings)
