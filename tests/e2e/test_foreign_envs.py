"""Programs and environments of others, unmodified, through the recorder to a real engine: every token is exact."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.foreign.parts import check_exact, check_turns, engine, next_batch, serving_verifiers, verifiers_command
from tests.e2e.foreign.tool_model import ANSWER, CALL, QUESTION, RESULT, write_tool_model
from tests.hub_process import HubProcess
from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Item, load_environment
from treadle.envs.chat import Model, RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.foreign.recorder import Recorder, serving
from treadle.envs.foreign.sessions import Sessions
from treadle.envs.rewards import make_scorer
from treadle.envs.rollout import EnvContext, roll_group
from treadle.envs.scoring import ScoreRules

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
BATCH_SIZE, GROUP_SIZE, NUM_STEPS = 8, 4, 2
TRAINER = {
    "wandb_group": "", "wandb_project": "", "batch_size": BATCH_SIZE, "max_token_len": 128, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": NUM_STEPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tool_model(tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture(scope="module")
def engine_url(model):
    with engine(model, model.parent / "engine.log") as url:
        yield url


@asynccontextmanager
async def context_of(config, engine_url, model):
    environment = load_environment(config)
    await environment.open()
    try:
        async with EngineClient(ServerConfig(base_url=engine_url)) as client, make_scorer("inline") as scorer:
            yield EnvContext(environment, client, ChatTokenizer.load(model), ScoreRules(environment, scorer))
    finally:
        await environment.close()


def test_the_example_agent_calls_a_tool_and_every_token_of_it_is_exact(engine_url, model, tmp_path):
    """The real client of OpenAI in a process of its own, as any user's agent."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} times 3?", "answer": str(3 * n)}) + "\n" for n in range(5)))
    config = EnvConfig(name="agent", data=str(rows), args={"command": [sys.executable, str(EXAMPLE)]})

    async def scenario():
        async with asyncio.timeout(120), context_of(config, engine_url, model) as context:
            sampling = RolloutSampling(max_tokens=90, temperature=1.0, seed=5, longest_sequence=200)
            return await roll_group(context, Item.ask(QUESTION, answer=RESULT), sampling, num_rollouts=2)

    rollouts = asyncio.run(scenario())
    assert [rollout.score.reward for rollout in rollouts] == [1.0, 1.0], [rollout.score for rollout in rollouts]
    for rollout in rollouts:
        (transcript,) = rollout.transcripts
        replies = [(message["role"], message["content"]) for message in transcript.messages]
        assert replies == [("user", QUESTION), ("assistant", CALL), ("tool", RESULT), ("assistant", ANSWER)]
        check_turns(transcript.tokens, transcript.masks, num_turns=2)
        num_sampled = check_exact(engine_url, transcript.tokens, transcript.masks, transcript.logprobs)
        assert num_sampled == len(CALL) + len(ANSWER) + 2  # a token a character, and one end for each turn


def test_branches_changed_histories_and_plain_completions_are_exact_too(engine_url, model):
    async def talk(client):
        chat, text = client.chat.completions, client.completions
        known = [{"role": "user", "content": "Say it"}]
        first = await chat.create(model="any", messages=known, max_tokens=10, n=2)
        for choice in first.choices:
            reply = {"role": "assistant", "content": choice.message.content}
            more = [*known, reply, {"role": "user", "content": "Again"}]
            await chat.create(model="any", messages=more, max_tokens=10)
        changed = [*known, {"role": "assistant", "content": "It"}, {"role": "user", "content": "Again"}]
        await chat.create(model="any", messages=changed, max_tokens=10)
        begun = await text.create(model="any", prompt="Once upon", max_tokens=6)
        await text.create(model="any", prompt=f"Once upon{begun.choices[0].text} a time", max_tokens=6)

    async def scenario():
        sessions = Sessions()
        sampling = RolloutSampling(max_tokens=20, temperature=1.0, seed=3)
        async with (
            asyncio.timeout(60),
            EngineClient(ServerConfig(base_url=engine_url)) as engine_client,
            serving(Recorder(sessions).app, "127.0.0.1", 0) as url,
        ):
            with sessions.open(
                Model(engine_client, ChatTokenizer.load(model), sampling), Item.ask("?", answer="")
            ) as one:
                async with openai.AsyncOpenAI(base_url=f"{url}/{one.key}/v1", api_key="none", max_retries=0) as client:
                    await talk(client)
                return one.model.transcripts

    transcripts = asyncio.run(scenario())
    assert len(transcripts) == 4
    for transcript in transcripts:
        check_exact(engine_url, transcript.tokens, transcript.masks, transcript.logprobs)
    for transcript in transcripts[:2]:
        check_turns(transcript.tokens, transcript.masks, num_turns=2)


def test_an_environment_of_verifiers_delivers_exact_groups_to_the_hub(engine_url, model, tmp_path):
    asked = {
        "openai.base-url": f"{engine_url}/v1", "openai.model": str(model), "env.num-eval": "0",
        "env.group-size": str(GROUP_SIZE), "env.state-dir": str(tmp_path / "state"), "env.max-num-workers": "2",
    }  # fmt: skip
    flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
    log = tmp_path / "env.log"
    with HubProcess(tmp_path) as hub:
        httpx.post(f"{hub.url}/register", json=TRAINER).raise_for_status()
        with serving_verifiers("digits_v1", hub.url, *flags, log=log) as process:
            batches = [next_batch(hub.url, process, log) for _ in range(NUM_STEPS)]
    groups = [group for batch in batches for group in batch]
    assert [len(group["tokens"]) for group in groups] == [GROUP_SIZE] * (NUM_STEPS * BATCH_SIZE // GROUP_SIZE)
    for group in groups:
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            check_turns(tokens, masks, num_turns=2)
            check_exact(engine_url, tokens, masks, logprobs)
        for messages, score in zip(group["messages"], group["scores"], strict=True):
            replies = "".join(message["content"] for message in messages if message["role"] == "assistant")
            assert score == pytest.approx(sum(map(str.isdigit, replies)) / max(1, len(replies)))


@pytest.mark.full  # the words of an error; the runs above load tasks
def test_tasks_that_cannot_be_loaded_end_it_with_their_words_and_a_remedy():
    command, env = verifiers_command("digits_v1", "validate", "--env.args", '{"taskset": {"num_tasks": 0}}')
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'digits_v1' cannot load its tasks: LookupError: the numbers are not downloaded yet" in done.stderr
    assert "digits_v1/environment.py:" in done.stderr
    assert "see to what it needs" in done.stderr
    assert "Traceback" not in done.stderr
