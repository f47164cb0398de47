"""Every process hangs on purpose in a real run: the log names the wait, the stacks show where, and the run ends."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import environment
from tests.e2e.runs import TINY_RUN, command, newest_run
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
# Items after 12 hang in the coroutine of their rollout; the rewards of item 5 do, until their worker is ended.
TASK = """
import asyncio, time
from treadle.envs import Environment, Item, environment
from treadle.envs.rewards import RewardInput, reward

@reward
def says_it(completion: RewardInput) -> float:
    if completion.prompt.endswith("Say 5"):
        time.sleep(3600)
    return float(completion.answer in completion.text)

@environment("stuck")
class Stuck(Environment):
    {rewards}

    def train_item(self, index):
        return Item.ask(f"Say {{index}}", answer=str(index % 10))

    def eval_items(self):
        return [self.train_item(0)]
    {rollout}
"""
HANGING_ROLLOUT = """
    async def rollout(self, item, model):
        if int(item.prompt.split()[-1]) > 12:
            await asyncio.Event().wait()
        return float(item.answer in (await model.chat(item.messages).ask()).text)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(
    output: Path, model: Path, *flags: str, fault: str = "", late: str = "", timeout_s: float = 120
) -> tuple[str, int, Path]:
    """Everything that a run says, how it ends, and its folder."""
    done = subprocess.run(
        command(output / "runs", "--model", str(model), "--steps", "12", *TINY_RUN, "--env.num-eval", "0", *flags),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(TREADLE_FAULT=fault, TREADLE_LATE=late), timeout=timeout_s, check=False,
    )  # fmt: skip
    return done.stdout, done.returncode, newest_run(output / "runs")


def log_of(run: Path, name: str) -> str:
    return (run / "logs" / f"{name}.log").read_text()


@pytest.mark.full  # the test of an environment below shows the same of another process
def test_an_engine_that_hangs_between_two_tokens(model, tmp_path):
    printed, code, folder = run(
        tmp_path, model, "--stall-timeout-s", "12", fault="engine:step:6:sleep", late="get on with a completion:3"
    )
    print(printed)
    alarm = r"watchdog: engine has waited \d+ s for the model to get on with a completion \(it holds \d+ running and"
    assert re.search(alarm, printed)
    assert code == 1
    assert "nothing has moved for" in printed
    assert "in reach" in log_of(folder, "engine"), "the stack shows the place"


@pytest.mark.full  # tests/unit/sync/test_verify.py: a publish to an engine that is frozen
def test_an_engine_that_hangs_in_the_middle_of_a_publish(model, tmp_path):
    printed, code, folder = run(tmp_path, model, "--train.publish-timeout-s", "8", fault="engine:release:3:sleep")
    print(printed)
    alarm = r"watchdog: trainer has waited \d+ s for the engine to adopt version 2 \(it holds step 2\); stacks are in "
    assert re.search(alarm + r"\S+trainer\.log and \S+engine\.log", printed)
    assert code == 1
    assert "did not answer POST /bridge/adopt within 8 s" in printed
    engine = log_of(folder, "engine")
    assert 'stacks why="trainer has waited' in engine, "asked for by the hub's answer to its report"
    assert "in reach" in engine


def test_an_environment_whose_rollout_never_ends(model, tmp_path):
    task = tmp_path / "stuck.py"
    task.write_text(TASK.format(rewards="", rollout=HANGING_ROLLOUT))
    printed, code, folder = run(
        tmp_path, model, "--env.name", str(task), "--env.task", "", "--stall-timeout-s", "12",
        late="the batch of step:3",
    )  # fmt: skip
    print(printed)
    alarm = r"watchdog: trainer has waited \d+ s for the batch of step \d+ \(\d+ of 10 groups wait"
    assert re.search(alarm, printed)
    assert code == 1
    assert re.search(r"tasks at .*Stuck\.rollout \(\S+stuck\.py:\d+\)", log_of(folder, "env")), "the coroutine is named"


@pytest.mark.full  # tests/unit/envs/rewards/test_reward_pool.py: rewards that never end
def test_a_reward_that_never_ends_costs_its_rollout_and_not_the_run(model, tmp_path):
    task = tmp_path / "stuck.py"
    task.write_text(TASK.format(rewards="rewards = (says_it,)", rollout=""))
    printed, code, folder = run(
        tmp_path, model, "--steps", "4", "--env.name", str(task), "--env.task", "", "--env.reward-timeout-s", "0.5",
        "--env.group-size", "2", "--train.batch-size", "4",
    )  # fmt: skip
    print(printed)
    assert code == 0, printed
    log = log_of(folder, "env")
    assert 'score_failed problem="timed_out: says_it: took longer than 0.5 s" prompt="Say 5"' in log, log[-2000:]


def test_a_disk_that_does_not_take_what_was_posted(tmp_path):
    hub = HubProcess(tmp_path, env={"TREADLE_LATE": "the disk to take:1"})
    try:
        hub.start(fault="store:before_commit:2:sleep")
        with hub.client() as client, pytest.raises(httpx.ReadTimeout):
            [client.post("/register", json=REGISTRATION, timeout=4) for _ in range(3)]
        deadline = time.monotonic() + 10
        while "late" not in hub.log and time.monotonic() < deadline:
            time.sleep(0.1)
        assert 'late for="the disk to take what was posted"' in hub.log
        assert 'fix="look at the disk of --database' in hub.log
        assert "in reach" in hub.log
        explained = httpx.get(f"{hub.url}/v1/explain").json()["reason"]
        print(explained)
        assert "hub has waited" in explained
    finally:
        hub.end()


REGISTRATION = {
    "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 2,
}  # fmt: skip
