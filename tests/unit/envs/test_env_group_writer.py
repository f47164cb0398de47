import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from env_doubles import EngineDouble, FlakyNetwork, save_tokenizer
from test_env_process import add

from tests.served_app import listening
from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Environment, Item, environment, load_environment
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineClient
from treadle.envs.group_file import GroupFile, read_group_file, split_text
from treadle.envs.group_writer import WriteStats, groups_path, num_groups_to_write, write_all, write_groups
from treadle.envs.main import open_context, run_until_signal
from treadle.errors import ConfigError, EngineError
from treadle.net.client import RetryPolicy
from treadle.wire.groups import ATROPOS_KEYS, ScoredGroup


@environment("hard-to-score")
class HardToScore(Environment):
    """Items 1 and 3 cannot be scored."""

    def train_item(self, index):
        return Item.ask(f"Say {index}", answer=str(index))

    def eval_items(self):
        return []

    def score(self, item, completion_text, completion):
        if item.answer in "13":
            raise RuntimeError("no idea")
        return float(completion_text == item.answer)


@environment("exactly")
class Exactly(HardToScore):
    rewards: ClassVar = ["exact_match", {"type": "length", "weight": 0.5, "params": {"target": 2}}]


def half_right(prompt, request):
    a, b = map(int, re.findall(r"\d+", prompt)[:2])
    return [str(a + b) if i % 2 else "äö?" for i in range(request.n)]


def process(tmp_path, write, **settings):
    engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
    engine.policy_version = lambda: 7
    settings = {"group_size": 4, "total_steps": 3, "data_path_to_save_groups": tmp_path / "out" / "g.jsonl"} | settings
    with listening(engine.app) as url:
        code = run_until_signal(write_groups(EnvConfig(**settings), ServerConfig(base_url=f"{url}/v1")))
    return code, engine


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_line_is_a_group_as_atropos_writes_it_and_more(tmp_path, capsys):
    code, engine = process(tmp_path, half_right, seed=5)
    assert code == 0
    lines = lines_of(tmp_path / "out" / "g.jsonl")
    assert [line["item"] for line in lines] == [0, 1, 2]
    assert all(set(ATROPOS_KEYS) <= set(line) for line in lines)
    item = load_environment(EnvConfig(seed=5)).train_item(2)
    prompt = ChatTokenizer.load(engine.folder).encode_chat(item.messages)
    last = lines[2]
    sampled = engine.tokenizer.encode(item.answer).ids
    assert last["tokens"][1] == prompt + sampled
    assert last["masks"][1] == [-100] * len(prompt) + sampled
    assert last["inference_logprobs"][1] == [1.0] * len(prompt) + [-0.5] * len(sampled)
    assert last["scores"] == [0.0, 1.0, 0.0, 1.0]
    assert last["messages"][1] == [*item.messages, {"role": "assistant", "content": item.answer}]
    assert (last["answer"], last["policy_version"]) == (item.answer, 7)
    assert [verdict["is_right"] for verdict in last["verdicts"]] == [False, True, False, True]
    assert last["pieces"][0] == ["", "ä", "", "ö", "?"], "one token a byte, two bytes a character"
    printed = capsys.readouterr()
    assert "3 groups, 12 rollouts: mean score 0.500, 50.0% right, " in printed.out
    assert f"written to {tmp_path}/out/g.jsonl\nto look at: {tmp_path}/out/g.html\n" in printed.out
    assert "groups: 3 of 3" in printed.err
    assert (tmp_path / "out" / "g.html").is_file()


def test_the_same_seed_asks_for_the_same_groups_in_the_same_order(tmp_path):
    process(tmp_path, half_right, total_steps=12)
    process(tmp_path, half_right, total_steps=12)
    written = [lines_of(tmp_path / "out" / name) for name in ("g.jsonl", "g_1.jsonl")]
    assert [line["item"] for line in written[0]] == list(range(12))
    assert [line["tokens"] for line in written[0]] == [line["tokens"] for line in written[1]]


def test_groups_of_equal_scores_are_written(tmp_path):
    process(tmp_path, add, ensure_scores_are_not_same=True)
    assert [line["scores"] for line in lines_of(tmp_path / "out" / "g.jsonl")] == [[1.0] * 4] * 3


def test_what_each_reward_gave_is_written(tmp_path):
    process(tmp_path, lambda _, request: ["0", "??"] * 2, name="exactly", task="", total_steps=1)
    (line,) = lines_of(tmp_path / "out" / "g.jsonl")
    assert [verdict["parts"] for verdict in line["verdicts"][:2]] == [
        {"exact_match": 1.0, "length": 0.5},
        {"exact_match": 0.0, "length": 1.0},
    ]
    assert line["scores"] == [1.25, 0.5] * 2


def test_groups_that_could_not_be_scored_are_dropped_and_reported(tmp_path, capsys):
    code, _ = process(tmp_path, lambda _, request: ["0"] * request.n, name="hard-to-score", task="", total_steps=4)
    assert code == 0
    assert [line["item"] for line in lines_of(tmp_path / "out" / "g.jsonl")] == [0, 2]
    printed = capsys.readouterr().out
    assert "2 groups, 8 rollouts: mean score 0.500, 50.0% right" in printed
    assert "dropped groups: 2 (unscored: 2)" in printed


def test_nothing_written_is_no_success_and_says_why(tmp_path, capsys):
    @environment("impossible")
    class Impossible(HardToScore):
        def score(self, item, completion_text, completion):
            raise RuntimeError("no idea")

    code, _ = process(tmp_path, lambda _, request: ["0"] * request.n, name="impossible", task="", total_steps=2)
    assert code == 1
    printed = capsys.readouterr().out
    assert printed.startswith("no group was fit to be written\n")
    assert re.search(r"the first that could not be scored: RuntimeError: no idea, at \S*\.py:\d+\n", printed)
    assert "written to" not in printed
    assert "to look at" not in printed
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_file_is_never_touched(tmp_path):
    (tmp_path / "g.jsonl").write_text("precious\n")
    (tmp_path / "g_1.html").write_text("also precious")
    with GroupFile(tmp_path / "g.jsonl") as file:
        file.write(ScoredGroup(tokens=[[1]], masks=[[1]], scores=[0.0]))
    assert (file.path.name, file.page.name) == ("g_2.jsonl", "g_2.html")
    assert (tmp_path / "g.jsonl").read_text() == "precious\n"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder") as caught:
        GroupFile(tmp_path)
    assert caught.value.fix == f"name a file: {tmp_path}/groups.jsonl"


def test_a_line_is_on_its_way_when_it_is_written(tmp_path):
    with GroupFile(tmp_path / "g.jsonl") as file:
        file.write(ScoredGroup(tokens=[[1]], masks=[[1]], scores=[0.5]))
        assert [group.scores for group in read_group_file(file.path)] == [[0.5]], "before it is closed"


def test_a_line_that_was_cut_off_is_left_out_and_a_wrong_one_is_reported(tmp_path):
    file = tmp_path / "g.jsonl"
    whole = b'{"tokens": [[1]], "masks": [[1]], "scores": [1.0]}\n'
    file.write_bytes(whole + whole[:20])
    assert len(list(read_group_file(file))) == 1
    file.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(ConfigError, match=r"line 1 of .* is no group"):
        list(read_group_file(file))


@pytest.mark.parametrize("text", ["plain", "a 🌍 of 日本語\n", "", "é"])
def test_the_pieces_of_a_text_are_the_text(tmp_path, text):
    folder = save_tokenizer(tmp_path)
    ids = EngineDouble(folder, add).tokenizer.encode(text).ids
    pieces = split_text(ids, ChatTokenizer.load(folder).decode)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


@pytest.mark.parametrize(("total_steps", "expected"), [(-1, 16), (1, 1), (200, 200)])
def test_how_many_groups(total_steps, expected):
    assert num_groups_to_write(EnvConfig(total_steps=total_steps)) == expected


@pytest.mark.parametrize("total_steps", [0, -2])
def test_no_groups_at_all_is_refused(total_steps):
    with pytest.raises(ConfigError, match="nothing to write") as caught:
        run_until_signal(write_groups(EnvConfig(total_steps=total_steps), ServerConfig()))
    assert "--env.total-steps 16" in caught.value.fix


def test_the_file_is_named_after_the_environment():
    assert str(groups_path(EnvConfig(name="./tasks/my_env.py"))) == "data/my_env.jsonl"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_an_interrupted_process_has_written_can_be_looked_at(tmp_path, number):
    enough, go_on = threading.Event(), threading.Event()

    def write(prompt, request):
        if len(engine.requests) > 3:
            enough.set()
            go_on.wait(20)  # the engine hangs
        return add(prompt, request)

    engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
    with listening(engine.app) as url:
        command = [sys.executable, "-m", "treadle", "env", "arithmetic", "process", "--env.max-num-workers", "1"]
        process = subprocess.Popen([*command, "--openai.base-url", url], cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            assert enough.wait(30)
            file = tmp_path / "data" / "arithmetic.jsonl"
            deadline = time.monotonic() + 60
            while len(lines_of(file)) < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            _, log = process.communicate(timeout=30)
        finally:
            process.kill()
            go_on.set()
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), log.decode()
    assert [line["item"] for line in lines_of(file)] == [0, 1, 2]
    page = file.with_suffix(".html")
    assert page.exists() == (number == signal.SIGTERM)
    subprocess.run([sys.executable, "-m", "treadle.envs.group_writer", str(file)], check=True, capture_output=True)
    assert '"item":2' in page.read_text()


def test_an_engine_that_goes_away_leaves_what_was_written(tmp_path):
    def write(prompt, request):
        if len(engine.requests) == 2:
            network.losses["/generate"] = 1000  # from the third on
        return add(prompt, request)

    engine = EngineDouble(save_tokenizer(tmp_path / "model"), write)
    network = FlakyNetwork(engine.app)
    config = EnvConfig(group_size=2, max_num_workers=1)

    async def work():
        retry_policy = RetryPolicy(give_up_after_s=0.1, first_pause_s=0.01, longest_pause_s=0.02)
        async with EngineClient(ServerConfig(), retry_policy=retry_policy, transport=network) as client:
            tokenizer = ChatTokenizer.load(engine.folder)
            async with open_context(load_environment(config), client, tokenizer) as context:
                with GroupFile(tmp_path / "g.jsonl") as file:
                    await write_all(context, file, 10, WriteStats(), lambda done, note: None)

    with pytest.raises(EngineError):
        asyncio.run(work())
    assert [line["item"] for line in lines_of(tmp_path / "g.jsonl")] == [0, 1]
