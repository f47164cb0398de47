"""The Python API: arguments become the settings of a run, and a run's folder can be read. Nothing is trained here."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import treadle
from bench.page_history import GROUP_SIZE
from bench.page_history import write_run as write_groups
from tests.tiny_model import write_tiny_model
from tests.written_run import write_run
from treadle.config.env import EnvConfig
from treadle.config.load import dotted_keys, save_run
from treadle.envs import Environment, Item
from treadle.envs.base import load_environment
from treadle.envs.rewards import LengthReward, registry
from treadle.errors import ConfigError
from treadle.launch.job import RunSession
from treadle.launch.notebook_inputs import NotebookInputs

ROWS = [{"prompt": f"What is {a} + 1?", "answer": a + 1, "level": a % 3} for a in range(20)]
BONUS = 0.5


def is_right(completions, answer, **kwargs):
    return [BONUS * (text == str(gold)) for text, gold in zip(completions, answer, strict=True)]


TASK = """
from treadle.envs import Environment, Item

def is_right(completions, answer, **kwargs):
    return [0.5 * (text == gold) for text, gold in zip(completions, answer)]

class Sums(Environment):
    rewards = (is_right,)

    def train_items(self):
        return [Item.ask(f"What is {a} + 1?", answer=a + 1) for a in range(2, 20)]

    def eval_items(self):
        return [Item.ask(f"What is {a} + 1?", answer=a + 1) for a in range(2)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("api") / "model", hidden_size=32, num_layers=1)


@pytest.fixture
def started(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, where every run is complete at the moment that its processes would start."""
    monkeypatch.setattr(RunSession, "run", lambda session, **_: setattr(session, "_is_complete", True))
    monkeypatch.setattr("treadle.launch.job.prepare_model", str)
    monkeypatch.chdir(tmp_path)
    return model


def test_importing_treadle_imports_nothing_heavy() -> None:
    code = (
        "import sys, treadle; light = set(sys.modules); treadle.train, treadle.load; import treadle.train as package\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'aiohttp', 'httpx', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)), 'pydantic' in light, callable(package), callable(treadle.train))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False True True"


def test_arguments_become_the_settings_of_a_run(started: Path) -> None:
    run = treadle.train(
        started, rewards=[is_right, "exact_match", LengthReward(target=9)], reward_weights=[1.0, 0.2, 0.1], data=ROWS,
        steps=3, learning_rate=1e-3, group_size=4, train={"batch-size": 8}, **{"env.num_eval": 2},
    )  # fmt: skip
    config = run.config
    assert (config.model, config.steps, config.train.lr, config.train.batch_size) == (str(started), 3, 1e-3, 8)
    assert (config.env.name, config.env.group_size, config.env.num_eval) == ("jsonl", 4, 2)
    parts = registry.create(config.env.rewards).rewards
    assert [(part.name, part.weight) for part in parts] == [("is_right", 1.0), ("exact_match", 0.2), ("length", 0.1)]
    assert [json.loads(line) for line in Path(config.env.data).read_text().splitlines()] == ROWS
    assert run.path.parent == Path("runs").resolve()


def test_a_class_and_its_rewards_reach_the_environment_process(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "my_sums.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path / "beside")
    config = treadle.train(started, env=importlib.import_module("my_sums").Sums, steps=1).config
    assert config.env.own_name == "sums"
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "env", config.env.name, "validate", "--env.right", "0.5", "--verbose",
         "--env.reward-workers", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 are right, worth 0.5" in done.stdout


def test_a_copied_class_may_name_itself_in_super(tmp_path: Path) -> None:
    class Selfish(Environment):
        rewards = ("exact_match",)

        def __init__(self, config: EnvConfig) -> None:
            super(Selfish, self).__init__(config)  # noqa: UP008

        def train_items(self) -> list[Item]:
            return [Item.ask("What is 1 + 1?", answer="2")]

        eval_items = train_items

    copied = NotebookInputs(tmp_path / "inputs").add_environment(Selfish)
    made = load_environment(EnvConfig(name=copied))
    assert (type(made).__name__, len(made.train_items())) == ("Selfish", 1)


def test_splits_and_paths_are_data(started: Path, tmp_path: Path) -> None:
    config = treadle.train(started, data={"train": ROWS[2:], "test": iter(ROWS[:2])}, rewards=[is_right]).config
    assert {path.name: len(path.read_text().splitlines()) for path in Path(config.env.data).iterdir()} == {
        "train.jsonl": 18, "test.jsonl": 2,
    }  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = treadle.train(started, data="mine.jsonl", eval_data=ROWS[:3]).config
    assert config.env.data == str(tmp_path / "mine.jsonl")
    assert len(Path(config.env.eval_data).read_text().splitlines()) == 3


def test_a_reward_file_is_found_on_resume_from_another_folder(started: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def is_fine(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    config = treadle.train(started, rewards=["mine.py:is_fine", "length"], data=ROWS).config
    assert [reward["type"] for reward in config.env.rewards] == [f"{tmp_path}/mine.py:is_fine", "length"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rat": 1}, "unknown key 'learning_rat' in treadle.train()"),
        ({"host": "::1"}, "did you mean 'hub.host' or 'engine.host' or 'router.host'?"),
        ({"train": {"batch_sise": 1}}, "did you mean 'batch_size'?"),
        ({"steps": 0}, "'steps' is 0 in treadle.train(): input should be greater than or equal to 1"),
        ({"data": [1, 2]}, "data[0] is 1, not a row"),
        ({"data": [{"prompt": "?", "answer": object()}]}, "data[0] cannot be written as JSON: a object is in it"),
        ({"rewards": [LengthReward]}, "make one of it: LengthReward()"),
        ({"rewards": "exact_match"}, "write rewards=[...]"),
        ({"rewards": ["exact_match"], "reward_weights": [1, 2]}, "2 reward_weights for 1 rewards"),
        ({"env": dict}, "dict is no Environment"),
        ({"env": "arithmetics"}, "did you mean 'arithmetic'?"),
    ],
)
def test_mistakes_are_refused_before_a_run_folder_exists(started: Path, arguments, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        treadle.train(started, **arguments)
    assert message in str(refused.value)
    assert not list(Path("runs").glob("2*"))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("env", "gsm8k"), ("env", Environment), ("env", {"name": "gsm8k"}), ("data", ROWS), ("eval_data", ROWS),
     ("rewards", [is_right])],
)  # fmt: skip
def test_what_is_for_one_environment_is_refused_with_several(started: Path, argument: str, value) -> None:
    Path("two.toml").write_text('[[env]]\nname = "arithmetic"\n[[env]]\nname = "svamp"\n')
    with pytest.raises(ConfigError, match=f"{argument}= is for one environment, and two.toml has 2") as refused:
        treadle.train(started, config="two.toml", **{argument: value})
    assert "[[env]]" in refused.value.fix
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("before", "message"),
    [("pass", "WARNING env row_skipped place=rows.jsonl:1"), ("logging.basicConfig()", "WARNING:treadle")],
)
def test_warnings_are_shown_in_full_unless_logging_is_set_up(before: str, message: str) -> None:
    code = (
        f"import logging; {before}\nfrom treadle.log import get_logger, show_warnings\n"
        "show_warnings(); show_warnings(); get_logger('env').warning('row_skipped', place='rows.jsonl:1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("row_skipped") == 1
    assert message in " ".join(done.stderr.split())


def test_a_process_of_a_run_that_imports_the_script_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_PARENT_PID", "1")
    with pytest.raises(ConfigError, match='if __name__ == "__main__":'):
        treadle.train()


def test_a_stopped_run_says_how_to_go_on(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunSession, "run", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt, match=r'continue with: treadle.load\("runs/\S+-arithmetic\S*"\).resume\(\)'):
        treadle.train(started)
    assert not treadle.load().is_complete


def test_settings_are_found_by_any_of_their_names() -> None:
    assert dotted_keys({"group_size": 4, "lr": 1, "env": {"num-eval": 2}, "hub.port": 3, "nonsense": 5}) == {
        "env.group_size": 4, "train.lr": 1, "env.num_eval": 2, "hub.port": 3, "nonsense": 5,
    }  # fmt: skip


def test_a_run_that_has_moved_can_be_read(tmp_path: Path) -> None:
    written = write_run(tmp_path / "there")
    save_run(written, tmp_path / "there" / "config.json")
    shutil.move(tmp_path / "there", tmp_path / "here")
    run = treadle.load(tmp_path / "here")
    assert [step["step"] for step in run.metrics] == list(range(1, 51))
    assert run.evaluations[-1].accuracy == 0.73
    assert "50 steps" in repr(run)
    assert (run.summary.steps_taken, run.is_complete) == (50, False)
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    run.plot().save(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        treadle.load(tmp_path)


def test_rollouts_are_groups_with_their_prompt_completions_and_scores(tmp_path: Path) -> None:
    write_groups(tmp_path / "run", num_steps=3, num_groups=40)
    run = treadle.load(tmp_path / "run")
    groups = run.rollouts(step=2)
    assert groups
    for group in groups:
        assert group.step == 2
        assert group.prompt.startswith("What is ")
        assert len(group.completions) == len(group.scores) == len(group.parts) == GROUP_SIZE
        assert all("The sum is" in text for text in group.completions)
        assert group.messages[0][-1]["content"] == group.completions[0]
    assert len(run.rollouts(limit=7)) == 7
