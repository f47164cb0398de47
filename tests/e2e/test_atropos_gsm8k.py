"""Grade-school math on the real atroposlib, in one turn and in several, against our hub and engine."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.atropos.parts import HERE, Env, MathEnv, RetryEnv, engine, json_lines, need_atroposlib, wait_until
from tests.e2e.foreign.chain_model import write_chain_model
from tests.e2e.foreign.parts import END, TURN, check_exact
from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from treadle.envs.chat_format import ChatTokenizer

# test_atropos.py: the same library, clients and wire with a simpler task.
pytestmark = [pytest.mark.slow, pytest.mark.full]
# It says `\boxed{3}`, now and then 5, seldom 7, behind some blanks: so answers differ in length as well.
NEXT = {"<turn>": " \\", " ": " \\", "{": "357", "}": ["<end>"]}
NEXT |= {last: [follower] for last, follower in zip("\\boxed357", "boxed{}}}", strict=True)}
ROWS = HERE / "gsm8k_rows.jsonl"
GROUP_SIZE, BATCH_SIZE, MAX_TOKEN_LENGTH, LONGEST_SEQUENCE = 4, 8, 256, 512


@dataclass(frozen=True)
class Run:
    """What both environments sent, and what our trainer's side of the hub gave out."""

    envs: dict[str, Env]
    groups: list[dict[str, Any]]
    status: dict[str, Any]
    engine_url: str
    tokenizer: ChatTokenizer
    folder: Path

    def of(self, name: str) -> list[dict[str, Any]]:
        ids = {env["env_id"] for env in self.status["envs"] if env["name"] == f"{name}_0"}
        return [group for group in self.groups if group["env_id"] in ids]

    def texts(self, group: dict[str, Any]) -> list[str]:
        return [self.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in group["tokens"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    need_atroposlib()
    folder = tmp_path_factory.mktemp("gsm8k")
    model = write_chain_model(folder / "model", NEXT, step=1.5)
    port = free_port()
    engine_url = f"http://127.0.0.1:{port}/v1"
    with (
        HubProcess(folder) as hub,
        MathEnv("math", folder, hub.url, engine_url, model, *flags(folder, "math")) as math,
        RetryEnv("retry", folder, hub.url, engine_url, model, *flags(folder, "retry")) as retry,
        engine(model, folder / "engine.log", port),  # last: the environments take longer to begin, and wait for it
    ):
        trainer = OurTrainer(hub, folder)

        def has_enough() -> bool:
            trainer.take()
            num_groups = Counter(group["env_id"] for group in trainer.groups)
            is_some_by_length = any(0 < score < 1 for group in trainer.groups for score in group["scores"])
            is_evaluated = all((folder / f"{name}_evals" / "metrics.json").is_file() for name in ("math", "retry"))
            return len(num_groups) == 2 and min(num_groups.values()) >= 4 and is_some_by_length and is_evaluated

        wait_until(has_enough, "groups of both", hub.log_file, math.log, retry.log)
        for env in (math, retry):
            env.end()
        trainer.take_the_rest()
        status = httpx.get(f"{hub.url}/v1/status").json()
        yield Run(
            {"math": math, "retry": retry}, trainer.groups, status, engine_url.removesuffix("/v1"),
            ChatTokenizer.load(model), folder,
        )  # fmt: skip


def flags(folder: Path, name: str) -> list[str]:
    """Those that make an environment ours, beside the URLs; and two of its own."""
    ours = ["--openai.server_type=vllm", "--openai.api_key=none", "--env.use_wandb=False"]
    return [*ours, f"--env.data_file={ROWS}", f"--env.data_dir_to_save_evals={folder / f'{name}_evals'}"]


class OurTrainer:
    """Leases and acknowledges, as our trainer does."""

    def __init__(self, hub: HubProcess, folder: Path) -> None:
        self.groups: list[dict[str, Any]] = []
        self._hub = hub.client()
        self._step = 0
        about = {"wandb_group": "", "wandb_project": "", "batch_size": BATCH_SIZE, "max_token_len": LONGEST_SEQUENCE}
        about |= {"checkpoint_dir": str(folder), "save_checkpoint_interval": 2, "starting_step": 0, "num_steps": 1000}
        self._hub.post("/register", json=about).raise_for_status()

    def take(self) -> bool:
        lease = {"step": self._step + 1, "holder": "trainer"}
        batch = self._hub.post("/v1/lease", json=lease).raise_for_status().json()["batch"]
        if batch is None:
            return False
        assert sum(len(group["tokens"]) for group in batch["groups"]) == BATCH_SIZE
        self._step += 1
        self._hub.post(f"/v1/batches/{self._step}/ack", json={"token": batch["token"]}).raise_for_status()
        self.groups += batch["groups"]
        return True

    def take_the_rest(self) -> None:
        while self.take():
            pass


@pytest.mark.parametrize("name", ["math", "retry"])
def test_tokens_masks_and_logprobs_are_as_the_engine_gave_them(run, name):
    for group in run.of(name):
        assert len(group["tokens"]) == GROUP_SIZE
        assert group["policy_version"] is None  # Atropos' wire has no word for it
        for sequence in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert check_exact(run.engine_url, *sequence) >= 10


def test_scores_use_the_last_answer_and_the_length_penalty(run):
    gold = {row["question"]: row["answer"].split("#### ")[1] for row in json_lines(ROWS)}
    half = MAX_TOKEN_LENGTH / 2
    kinds = Counter()
    for group in run.groups:
        texts = run.texts(group)
        (answer,) = {gold[question] for text in texts for question in gold if question in text}
        assert answer != "1,003"  # which nobody finds: all are wrong, and there is nothing to learn
        right = [re.findall(r"\\boxed\{(.*?)\}", text)[-1] == answer for text in texts]
        shortness = [1 - min(1.0, max(0.0, (len(tokens) - half) / half)) for tokens in group["tokens"]]
        wanted = shortness if all(right) else [1.0 if is_right else -1.0 for is_right in right]
        assert group["scores"] == pytest.approx(wanted)
        assert len(set(group["scores"])) > 1
        kinds["by length" if all(right) else "by answer"] += 1
    print(dict(kinds))
    assert min(kinds["by length"], kinds["by answer"]) > 0


def test_one_turn_is_one_trained_stretch(run):
    for group in run.of("math"):
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
            start = tokens.index(TURN) + 1
            assert [mask != -100 for mask in masks] == [place >= start for place in range(len(tokens))]
            assert END not in tokens[start:-1], "at most once, at the end: some answers are cut off"


def test_a_second_turn_extends_the_first_and_both_are_trained(run):
    """Only who was wrong got one. Between the answers stands what was read: the user's words, and before them the end
    of the turn, a second time: atroposlib's client puts the template's own behind the one that was sampled.
    """
    lengths = set()
    for group in run.of("retry"):
        for text, tokens, masks in zip(run.texts(group), group["tokens"], group["masks"], strict=True):
            if tokens[-1] != END:
                continue  # cut off
            trained = run.tokenizer.decode([mask for mask in masks if mask != -100], skip_special_tokens=False)
            first, *second = trained.split("<end>")[:-1]
            assert trained == "".join(f"{answer}<end>" for answer in (first, *second))
            between = f"<turn>{first}<end><end>That is wrong. Correct your answer. <turn>"
            assert text.endswith(f"{between}{second[0]}<end>" if second else f"<turn>{first}<end>")
            # Of what was read: the model, which knows nothing, may say the token by itself.
            read = [token for token, mask in zip(tokens, masks, strict=True) if mask == -100]
            assert read.count(TURN) == 1 + len(second)
            lengths.add(1 + len(second))
    assert lengths == {1, 2}


def test_all_sent_groups_are_delivered_unchanged_in_order(run):
    kept = ("tokens", "masks", "scores", "inference_logprobs")
    num_left = 0
    for name, env in run.envs.items():
        sent, taken = env.groups(), run.of(name)
        assert [[group[key] for key in kept] for group in taken] == [
            [group[key] for key in kept] for group in sent[: len(taken)]
        ]
        num_left += len(sent) - len(taken)
        print(f"{name}: {len(sent)} sent, {len(taken)} taken")
    waiting = run.status["queued_groups"]
    assert run.status["accepted_groups"] == len(run.groups) + waiting
    assert 0 <= num_left - waiting <= len(run.envs)  # an environment that is ended may have one under way


def test_they_evaluate_and_save_at_the_steps_of_our_trainer(run):
    for name in run.envs:
        results = json.loads((run.folder / f"{name}_evals" / "metrics.json").read_text())["results"]["all"]
        assert results["eval/percent_correct"] in (0.0, 0.5, 1.0)
        saved = list((run.folder / "env_checkpoints" / f"{name}_0").glob("step-*.json"))
        assert saved
        assert all(json.loads(file.read_text())["iter"] > 0 for file in saved)
