"""The environment `agent`: a program per rollout, its score, its failures and its end, in real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from env_doubles import save_tokenizer
from tokenizers import Tokenizer

from treadle.config.env import EnvConfig
from treadle.envs.base import Item
from treadle.envs.catalogue import load_environment
from treadle.envs.chat import Sampling
from treadle.envs.engine_client import Completion, Generation
from treadle.envs.rewards import make_scorer
from treadle.envs.rollout import Desk, roll_group
from treadle.envs.scoring import Judge
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import ConfigError, EngineError

# A client of a few lines: the real one takes a second to import, and is put to the test elsewhere.
ASK = """
import json, os, sys, urllib.request
def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def ask(*messages):
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", messages=messages)
    return answer["choices"][0]["message"]["content"]
item = json.load(sys.stdin)
assert json.loads(os.environ["TREADLE_ITEM"]) == item
"""
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "hint": "count"} for n in range(12)]


@dataclass
class Parrot:
    """An engine at its port that always says the same."""

    tokenizer: Tokenizer
    says: str
    error: Exception | None = None
    prompts: list[str] = field(default_factory=list)

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=()):
        self.prompts.append(self.tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False))
        if self.error is not None:
            raise self.error
        ids = self.tokenizer.encode(self.says).ids
        return Generation([Completion(ids, [-0.5] * len(ids), self.says, "stop", 0)], 0.1)


@asynccontextmanager
async def opened(tmp_path, *, says="8", error=None, **args):
    folder = save_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    config = EnvConfig(name="agent", data=str(tmp_path / "rows.jsonl"), args=args)
    environment = load_environment(config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    engine = Parrot(tokenizer, says, error)
    await environment.open()
    try:
        async with make_scorer("inline") as scorer:
            yield Desk(environment, engine, ChatTokenizer.load(folder), Judge(environment, scorer))
    finally:
        await environment.close()


def rolled(tmp_path, program, *, num_rollouts=1, **more):
    """The rollouts of one item whose agent is `program`."""
    file = tmp_path / "agent.py"
    file.write_text(ASK + program)

    async def scenario():
        async with asyncio.timeout(60), opened(tmp_path, command=[sys.executable, str(file)], **more) as desk:
            item = Item.ask("What is 7 + 1?", answer="8", hint="count")
            return await roll_group(desk, item, Sampling(max_tokens=20, temperature=1.0), num_rollouts=num_rollouts)

    return asyncio.run(scenario())


def test_each_rollout_is_a_run_of_the_program_with_the_score_that_it_posts(tmp_path):
    program = """
said = ask(*item["messages"])
post(os.environ["TREADLE_SCORE_URL"], score=float(said == item["answer"]), parts={"hinted": len(item["metadata"])})
"""
    rollouts = rolled(tmp_path, program, num_rollouts=2)
    assert [(rollout.score.reward, rollout.score.is_right) for rollout in rollouts] == [(1.0, True)] * 2
    assert [dict(rollout.score.parts) for rollout in rollouts] == [{"hinted": 1.0}] * 2
    assert [rollout.text for rollout in rollouts] == ["8", "8"]


def test_without_a_score_the_rewards_judge_the_last_reply(tmp_path):
    (rollout,) = rolled(tmp_path, 'ask({"role": "user", "content": "Well?"})', rewards=["exact_match"])
    assert (rollout.score.reward, rollout.score.outcome) == (1.0, "scored")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('ask(*item["messages"])', "without posting a score"),
        ('ask(*item["messages"]); print("I am lost"); sys.exit(3)', "exited 3; it last printed: I am lost"),
        ("import time; time.sleep(60)", "took longer than 2 s"),
        ("post(os.environ['OPENAI_BASE_URL'] + '/nowhere')", "HTTP Error 404"),
    ],
)
def test_an_agent_that_fails_marks_its_own_rollout_and_says_why(tmp_path, program, said):
    (rollout,) = rolled(tmp_path, program, time_limit_s=2)
    assert rollout.score.reward is None
    assert said in rollout.score.error


def test_the_score_stands_when_the_agent_fails_behind_it(tmp_path):
    (rollout,) = rolled(tmp_path, 'post(os.environ["TREADLE_SCORE_URL"], score=0.5); sys.exit(1)')
    assert rollout.score.reward == 0.5


def test_what_an_agent_left_running_is_ended_with_it(tmp_path):
    note = tmp_path / "child"
    program = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(note)!r}, "w").write(str(child.pid))
post(os.environ["TREADLE_SCORE_URL"], score=1)
"""
    rolled(tmp_path, program)
    pid, deadline = int(note.read_text()), time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_agent_is_ended_when_its_group_is_given_up(tmp_path):
    note = tmp_path / "agent"
    program = f"open({str(note)!r}, 'w').write(str(os.getpid())); import time; time.sleep(60)"
    (tmp_path / "agent.py").write_text(ASK + program)

    async def scenario():
        async with asyncio.timeout(30), opened(tmp_path, command=[sys.executable, str(tmp_path / "agent.py")]) as desk:
            sampling = Sampling(max_tokens=20, temperature=1.0)
            rolling = asyncio.ensure_future(roll_group(desk, Item.ask("?", answer="8"), sampling, num_rollouts=1))
            while not (note.is_file() and note.read_text()):
                await asyncio.sleep(0.02)
            rolling.cancel()
            await asyncio.wait({rolling})

    asyncio.run(scenario())
    assert not is_running(int(note.read_text()))


def is_running(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"  # ended, and nobody has asked for its exit code
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_an_engine_that_is_gone_is_not_the_agents_failure(tmp_path):
    program = """
import time
try:
    ask(*item["messages"])
except Exception:
    time.sleep(60)
"""
    started = time.monotonic()
    with pytest.raises(EngineError, match="away"):
        rolled(tmp_path, program, error=EngineError("the engine is away"))
    assert time.monotonic() - started < 30  # nobody waits for the agent then


def test_agents_that_come_by_themselves_get_the_items_and_post_the_scores(tmp_path):
    async def work(url, score):
        async with httpx.AsyncClient(base_url=url) as http:
            made = (await http.post("/sessions/create")).json()
            messages = made["item"]["messages"]
            answer = await http.post(f"{made['base_url']}/chat/completions", json={"messages": messages})
            assert answer.json()["choices"][0]["message"]["content"] == made["item"]["answer"]
            await http.post(f"/{made['uuid']}/score", json={"score": score})

    async def scenario():
        async with asyncio.timeout(30), opened(tmp_path, port=0) as desk:
            sampling = Sampling(max_tokens=20, temperature=1.0)
            item = Item.ask("What is 7 + 1?", answer="8")
            url = desk.environment.url
            rollouts, *_ = await asyncio.gather(
                roll_group(desk, item, sampling, num_rollouts=2), work(url, 1.0), work(url, 0.0)
            )
            return [rollout.score.reward for rollout in rollouts]

    assert sorted(asyncio.run(scenario())) == [0.0, 1.0]


def test_a_session_that_never_gets_its_score_is_marked_and_not_its_group(tmp_path):
    async def take(url):
        async with httpx.AsyncClient(base_url=url) as http:
            return (await http.post("/sessions/create")).json()["uuid"]

    async def scenario():
        async with asyncio.timeout(30), opened(tmp_path, port=0, time_limit_s=1) as desk:
            rolling = asyncio.ensure_future(
                roll_group(desk, Item.ask("?", answer="8"), Sampling(max_tokens=20, temperature=1.0), num_rollouts=2)
            )
            url = desk.environment.url
            first, _ = [await take(url), await take(url)]
            async with httpx.AsyncClient(base_url=url) as http:
                await http.post(f"/{first}/score", json={"score": 1.0})
            return [(rollout.score.reward, rollout.score.error) for rollout in await rolling]

    scored, marked = asyncio.run(scenario())
    assert scored == (1.0, "")
    assert marked[0] is None
    assert "no score within 1 s" in marked[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [({"comand": "x"}, "comand"), ({"port": "high"}, "port"), ({"rewards": ["exact_mach"]}, "exact_m")],
)
def test_settings_that_cannot_be_right_are_refused(args, said):
    with pytest.raises(ConfigError, match=said):
        load_environment(EnvConfig(name="agent", data="rows.jsonl", args=args))


def test_a_command_that_cannot_be_started_says_so(tmp_path):
    async def scenario():
        async with opened(tmp_path, command="no-such-program --fast") as desk:
            item = Item.ask("?", answer="8")
            return await roll_group(desk, item, Sampling(max_tokens=20, temperature=1.0), num_rollouts=1)

    (rollout,) = asyncio.run(scenario())
    assert "cannot start 'no-such-program'" in rollout.score.error
