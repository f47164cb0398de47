"""The environment `agent`: a program per rollout, its score, its failures and its end, in real processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from env_doubles import save_tokenizer
from tokenizers import Tokenizer

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, load_environment
from treadle.envs.chat import RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.envs.foreign.agent import run_program
from treadle.envs.rewards import make_scorer
from treadle.envs.rollout import EnvContext, roll_group
from treadle.envs.scoring import ScoreRules
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

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=(), conversation=""):
        self.prompts.append(self.tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False))
        if self.error is not None:
            raise self.error
        ids = self.tokenizer.encode(self.says).ids
        return EngineResult([Completion(ids, [-0.5] * len(ids), self.says, "stop", 0)], 0.1)


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
            yield EnvContext(environment, engine, ChatTokenizer.load(folder), ScoreRules(environment, scorer))
    finally:
        await environment.close()


def rolled(tmp_path, program, *, num_rollouts=1, **more):
    """The rollouts of one item whose agent is `program`."""
    file = tmp_path / "agent.py"
    file.write_text(ASK + program)

    async def scenario():
        async with asyncio.timeout(60), opened(tmp_path, command=[sys.executable, str(file)], **more) as context:
            item = Item.ask("What is 7 + 1?", answer="8", hint="count")
            return await roll_group(
                context, item, RolloutSampling(max_tokens=20, temperature=1.0), num_rollouts=num_rollouts
            )

    return asyncio.run(scenario())


def test_each_rollout_is_a_run_of_the_program_with_the_score_that_it_posts(tmp_path):
    program = """
reply = ask(*item["messages"])
post(os.environ["TREADLE_SCORE_URL"], score=float(reply == item["answer"]), parts={"hinted": len(item["metadata"])})
"""
    rollouts = rolled(tmp_path, program, num_rollouts=2)
    assert [(rollout.score.reward, rollout.score.is_right) for rollout in rollouts] == [(1.0, True)] * 2
    assert [dict(rollout.score.parts) for rollout in rollouts] == [{"hinted": 1.0}] * 2
    assert [rollout.text for rollout in rollouts] == ["8", "8"]


def test_without_a_score_the_rewards_judge_the_last_reply(tmp_path):
    (rollout,) = rolled(tmp_path, 'ask({"role": "user", "content": "Well?"})', rewards=["exact_match"])
    assert (rollout.score.reward, rollout.score.outcome) == (1.0, "scored")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ('ask(*item["messages"])', "without posting a score"),
        ('ask(*item["messages"]); print("I am lost"); sys.exit(3)', "exited 3; it last printed: I am lost"),
        ("print('long ' * 200 + chr(10) + 'and lost'); sys.exit(3)", "exited 3; it last printed: and lost"),
        ("post(os.environ['OPENAI_BASE_URL'] + '/nowhere')", "HTTP Error 404"),
    ],
)
def test_an_agent_that_fails_marks_its_own_rollout_and_says_why(tmp_path, program, message):
    (rollout,) = rolled(tmp_path, program)
    assert rollout.score.reward is None
    assert message in rollout.score.error


def test_an_agent_that_takes_too_long_marks_its_own_rollout(tmp_path):
    (rollout,) = rolled(tmp_path, "import time; time.sleep(60)", time_limit_s=1)
    assert rollout.score.reward is None
    assert "took longer than 1 s" in rollout.score.error


def test_the_score_stands_when_the_agent_fails_behind_it(tmp_path):
    (rollout,) = rolled(tmp_path, 'post(os.environ["TREADLE_SCORE_URL"], score=0.5); sys.exit(1)')
    assert rollout.score.reward == 0.5


# A program in a session of its own, whose parent is gone: no process group leads to it.
STRAY = """
import subprocess
stray = "import os, time; open(NOTE, 'w').write(str(os.getpid())); time.sleep(60)".replace("NOTE", repr(NOTE))
between = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
subprocess.run([sys.executable, "-c", between, stray], check=True)
import time
while not (os.path.exists(NOTE) and open(NOTE).read()):
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("ending", "time_limit_s", "reward"),
    [
        ('post(os.environ["TREADLE_SCORE_URL"], score=1)', 50, 1.0),
        ("sys.exit(3)", 50, None),
        ("import signal; os.killpg(0, signal.SIGTERM)", 50, None),
        ("time.sleep(60)", 6, None),
    ],
    ids=["score", "failure", "kills its group", "time limit"],
)
def test_what_an_agent_left_running_is_ended_with_it(tmp_path, ending, time_limit_s, reward):
    note = tmp_path / "stray"
    for limit_s in (time_limit_s, 50):  # on a busy machine, the stray may not have begun within the first limit
        (rollout,) = rolled(tmp_path, f"NOTE = {str(note)!r}\n{STRAY}\n{ending}", time_limit_s=limit_s)
        if note.exists() and note.read_text():
            break
    assert rollout.score.reward == reward
    assert not is_running(int(note.read_text()))


def test_an_environment_that_is_killed_takes_its_agents_with_it(tmp_path):
    note = tmp_path / "stray"
    (tmp_path / "agent.py").write_text(f"import os, sys\nNOTE = {str(note)!r}\n{STRAY}\ntime.sleep(60)")
    environment = f"""
import asyncio, sys
from treadle.envs.foreign.agent import run_program
command = [sys.executable, {str(tmp_path / "agent.py")!r}]
asyncio.run(run_program(command, stdin=b"", environment={{}}, time_limit_s=60))
"""
    with subprocess.Popen([sys.executable, "-c", environment]) as process:
        wait_until(lambda: note.is_file() and note.read_text())
        process.kill()
    wait_until(lambda: not is_running(int(note.read_text())))


def test_an_agent_gets_the_environment_without_what_is_meant_for_treadle(tmp_path, monkeypatch):
    monkeypatch.setenv("TREADLE_HUB_ADMIN_TOKEN", "hub-admin-secret-hub-admin-secret")
    monkeypatch.setenv("TREADLE_ENGINE_TOKEN", "engine-secret-engine-secret")
    monkeypatch.setenv("SETTING_OF_THE_AGENT", "7")
    program = """
ours = sorted(name for name in os.environ if name.startswith("TREADLE_"))
assert ours == ["TREADLE_ITEM", "TREADLE_SCORE_URL"], ours
assert "secret" not in str(os.environ)
post(os.environ["TREADLE_SCORE_URL"], score=float(os.environ["SETTING_OF_THE_AGENT"]))
"""
    (rollout,) = rolled(tmp_path, program)
    assert rollout.score.reward == 7.0, rollout.score.error


def test_of_what_an_agent_prints_only_the_end_is_kept():
    program = "import os; [os.write(1, bytes(1 << 20)) for _ in range(200)]; print('the end'); raise SystemExit(3)"
    command = [sys.executable, "-c", program]
    ended = asyncio.run(run_program(command, stdin=b"", environment={}, time_limit_s=60))
    assert ended.exit_code == 3
    assert ended.tail.endswith("the end")
    assert len(ended.tail) < 2000


def test_an_agent_is_ended_when_its_group_is_given_up(tmp_path):
    note = tmp_path / "agent"
    program = f"open({str(note)!r}, 'w').write(str(os.getpid())); import time; time.sleep(60)"
    (tmp_path / "agent.py").write_text(ASK + program)

    async def scenario():
        async with (
            asyncio.timeout(60),
            opened(tmp_path, command=[sys.executable, str(tmp_path / "agent.py")]) as context,
        ):
            sampling = RolloutSampling(max_tokens=20, temperature=1.0)
            rolling = asyncio.ensure_future(roll_group(context, Item.ask("?", answer="8"), sampling, num_rollouts=1))
            while not (note.is_file() and note.read_text()):
                await asyncio.sleep(0.02)
            rolling.cancel()
            await asyncio.wait({rolling})

    asyncio.run(scenario())
    assert not is_running(int(note.read_text()))


def wait_until(is_so, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
            (await http.post(made["score_url"], json={"score": score})).raise_for_status()

    async def scenario():
        async with asyncio.timeout(60), opened(tmp_path, port=0) as context:
            sampling = RolloutSampling(max_tokens=20, temperature=1.0)
            item = Item.ask("What is 7 + 1?", answer="8")
            url = context.environment.url
            rollouts, *_ = await asyncio.gather(
                roll_group(context, item, sampling, num_rollouts=2), work(url, 1.0), work(url, 0.0)
            )
            return [rollout.score.reward for rollout in rollouts]

    assert sorted(asyncio.run(scenario())) == [0.0, 1.0]


def test_a_session_that_never_gets_its_score_is_marked_and_not_its_group(tmp_path):
    async def take(url):
        async with httpx.AsyncClient(base_url=url) as http:
            return (await http.post("/sessions/create")).json()["score_url"]

    async def scenario():
        async with asyncio.timeout(60), opened(tmp_path, port=0, time_limit_s=3) as context:
            rolling = asyncio.ensure_future(
                roll_group(
                    context, Item.ask("?", answer="8"), RolloutSampling(max_tokens=20, temperature=1.0), num_rollouts=2
                )
            )
            url = context.environment.url
            first, _ = [await take(url), await take(url)]
            async with httpx.AsyncClient(base_url=url) as http:
                await http.post(first, json={"score": 1.0})
            return [(rollout.score.reward, rollout.score.error) for rollout in await rolling]

    scored, marked = asyncio.run(scenario())
    assert scored == (1.0, "")
    assert marked[0] is None
    assert "no score within 3 s" in marked[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [({"comand": "x"}, "comand"), ({"port": "high"}, "port"), ({"rewards": ["exact_mach"]}, "exact_m")],
)
def test_settings_that_cannot_be_right_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvConfig(name="agent", data="rows.jsonl", args=args))


@pytest.mark.parametrize(
    ("command", "message"),
    [("python 'x", "No closing quotation"), ("   ", "names no program"), ([""], "names no program"), ("a\0b", "zero")],
)
def test_a_command_that_is_none_is_refused(command, message):
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvConfig(name="agent", data="rows.jsonl", args={"command": command}))


@pytest.mark.parametrize("command", ["no-such-program --fast", "./no-such-program", "README.txt"])
def test_a_command_that_cannot_be_started_is_found_before_any_rollout(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.txt").write_text("no program")

    async def scenario():
        async with opened(tmp_path, command=command):
            pass

    with pytest.raises(ConfigError, match="cannot start"):
        asyncio.run(scenario())


def test_a_program_runs_in_the_folder_where_its_command_was_given(tmp_path, monkeypatch):
    begun_in = tmp_path / "begun in"
    begun_in.mkdir()
    program = begun_in / "agent"
    program.write_text(
        f"#!{sys.executable}\n{ASK}\npost(os.environ['TREADLE_SCORE_URL'], score=float(open('s').read()))"
    )
    program.chmod(0o755)
    (begun_in / "s").write_text("0.25")

    async def scenario(**args):
        async with asyncio.timeout(60), opened(tmp_path, **args) as context:
            sampling = RolloutSampling(max_tokens=20, temperature=1.0)
            (rollout,) = await roll_group(context, Item.ask("?", answer="8"), sampling, num_rollouts=1)
            return rollout.score.reward, context.environment.config.args

    monkeypatch.chdir(begun_in)
    reward, settled = asyncio.run(scenario(command="./agent"))
    assert (reward, settled) == (0.25, {"command": "./agent", "working_dir": str(begun_in)})
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(scenario(**settled)) == (0.25, settled)  # as a resumed run starts it
    assert asyncio.run(scenario(command="./agent", working_dir="begun in")) == (0.25, settled)
    begun_in.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"there is no folder .*begun in, in which the agent's command is to run"):
        asyncio.run(scenario(**settled))


@pytest.mark.parametrize(("token", "api_key"), [(None, "any"), ("s" * 40, "the value of TREADLE_RECORDER_TOKEN")])
def test_without_a_command_it_says_where_agents_come_and_with_which_key(tmp_path, caplog, monkeypatch, token, api_key):
    caplog.set_level("INFO", logger="treadle")
    monkeypatch.delenv("TREADLE_RECORDER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("TREADLE_RECORDER_TOKEN", token)

    async def scenario():
        async with opened(tmp_path, port=0) as context:
            return context.environment.url

    url = asyncio.run(scenario())
    (reported,) = [r.treadle_fields for r in caplog.records if r.getMessage() == "agents_come_by_themselves"]
    assert reported["ask"] == f"POST {url}/sessions/create"
    assert reported["base_url"] == f"{url}/UUID/v1"
    assert reported["api_key"] == api_key
    assert "command" in reported["fix"]
    assert token is None or token not in str(reported)


def test_a_command_that_cannot_be_started_is_reported_first(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    config = EnvConfig(name="agent", data=str(tmp_path / "rows.jsonl"), args={"command": "no-such-program"})
    with pytest.raises(ConfigError, match="there is no such program here"):
        load_environment(config).prepare()
