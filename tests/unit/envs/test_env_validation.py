"""`validate`: a good task passes, and each kind of bad one is reported."""

import asyncio
import io
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from treadle.config.env import EnvConfig
from treadle.envs.validation import validate_task
from treadle.errors import ConfigError

DATA = Path(__file__).parents[2] / "data"
HEAD = """
    from treadle.envs import Environment, Item, environment

    @environment("task-{name}")
    class Task(Environment):
        def train_item(self, index):
            return Item.ask(f"Say {{index}}", answer=str(index))

        def eval_items(self):
            return [Item.ask(f"Say {{index}}", answer=str(index)) for index in range(1000, 1010)]

        def score(self, item, text, completion):
            return float(text == item.answer)
"""


def examine(max_items=20, max_seconds=60.0, **settings):
    """The exit code, and what was printed, without the breaks of its lines."""
    out = io.StringIO()
    console = Console(file=out, width=1000)
    code = asyncio.run(
        validate_task(
            EnvConfig(**settings), max_items=max_items, max_seconds=max_seconds, verbose=True, console=console
        )
    )
    printed = re.sub(r"\n +-> ", " ", out.getvalue())  # the remedy, on a line of its own
    return code, [" ".join(line.split()) for line in printed.splitlines()]


@pytest.fixture
def examine_file(tmp_path, request):
    """Examine an environment written into a file: the usual one, with more in its class."""

    def examine_class(more, **settings):
        path = tmp_path / "task.py"
        head = textwrap.dedent(HEAD.format(name=request.node.name))
        path.write_text(head + textwrap.indent(textwrap.dedent(more), "    "))
        return examine(name=str(path), **settings)

    return examine_class


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"name": "arithmetic"}, "settings ok it reads args, difficulty, max_token_length, task"),
        ({"name": "echo"}, "right answers ok 30 of 30 are right, worth 1"),
        ({"name": "gsm8k", "data": str(DATA / "gsm8k")}, "right answers ok 30 of 30 are right, worth 1"),
        ({"name": "svamp", "data": str(DATA / "svamp.json")}, "held-out items ok 2"),
    ],
)
def test_the_built_in_tasks_are_fit_to_be_trained_on(settings, line):
    code, lines = examine(**settings)
    assert code == 0, lines
    assert any(found.startswith(line) for found in lines), lines
    assert lines[-1] == f"'{settings['name']}' is fit to be trained on"


def test_a_slow_task_is_tried_on_as_many_items_as_there_is_time_for():
    code, lines = examine(name="echo", max_seconds=0.0)
    assert code == 0
    assert "items tried ok 1 of 30: stopped after 0 s" in lines


def test_the_progress_of_the_trials_is_shown(capsys):
    examine(name="echo")
    assert "items tried: 30 of 30, 239 answers scored" in capsys.readouterr().err


def test_it_is_a_command_that_leaves_with_the_verdict():
    command = [sys.executable, "-m", "treadle", "env", "echo", "validate"]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "'echo' is fit to be trained on"


def test_broken_rows_are_a_warning_with_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Q{n}?", "answer": f"A{n}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "oops\n")
    code, lines = examine(name="jsonl", data=str(path))
    assert code == 0
    assert any(line.startswith(f"rows warning 1 cannot be used: {path}:21 is not JSON") for line in lines)


def test_rows_that_all_have_one_answer_teach_that_answer(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Q{n}?", "answer": "yes" if n % 4 else "no"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, lines = examine(name="jsonl", data=str(path))
    assert code == 1
    assert any(line.startswith("always the same answer problem worth 0 to 1; pays on") for line in lines)


def test_gold_answers_that_score_low_are_a_problem(examine_file):
    code, lines = examine_file(
        """
        def score(self, item, text, completion):
            return float(text == item.answer + "!")
        """
    )
    assert code == 1
    assert any(line.startswith("right answers problem 30 of 30 are judged wrong: '") for line in lines)
    assert lines[-1].endswith("is not fit to be trained on: right answers")


def test_how_a_gold_answer_is_written_an_environment_can_say(examine_file):
    code, _ = examine_file(
        """
        def gold_completion(self, item):
            return item.answer + "!"

        def score(self, item, text, completion):
            return float(text == item.answer + "!")
        """
    )
    assert code == 0


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        ("1.0 if not text or text == item.answer else 0.0", "empty answers"),
        ("1.0 if text == item.answer else len(text) / 2_000", "very long answers"),
        ("1.0 if item.answer == text else 0.6 if len(text) in range(40, 65) else 0.0", "garbage"),
        ("1.0", "random Unicode"),
    ],
)
def test_what_pays_without_being_right_is_a_problem(examine_file, reward, name):
    code, lines = examine_file(
        f"""
        def score(self, item, text, completion):
            return {reward}
        """
    )
    assert code == 1
    assert any(line.startswith(f"{name} problem") and "pays on" in line for line in lines), lines


def test_length_pays_only_if_a_completion_may_get_that_long(examine_file):
    long_or_right = """
        def score(self, item, text, completion):
            return float(text == item.answer or len(text) > 1000)
        """
    assert any(line.startswith("very long answers problem") for line in examine_file(long_or_right)[1])
    _, lines = examine_file(long_or_right, max_token_length=8)
    assert "very long answers ok worth 0" in lines


@pytest.mark.parametrize("answer", ["o", "or", "Word", "word"])
def test_a_long_answer_does_not_hold_the_right_one_by_chance(examine_file, answer):
    _, lines = examine_file(
        f"""
        def train_item(self, index):
            return Item.ask(f"Say {{index}}", answer="{answer}")

        def score(self, item, text, completion):
            return float(item.answer.lower() in text.lower())
        """
    )
    assert "very long answers ok worth 0" in lines


def test_a_score_that_raises_on_strange_text_is_reported_with_the_text(examine_file):
    code, lines = examine_file(
        """
        def score(self, item, text, completion):
            return float(int(text) == int(item.answer))
        """
    )
    assert code == 1
    (line,) = [line for line in lines if line.startswith("scoring problem")]
    assert "raised" in line
    assert "first the empty answer '': ValueError" in line


@pytest.mark.parametrize("where", ["score", "reward", "rollout"])
def test_an_error_of_the_code_is_reported_once_with_its_line(tmp_path, examine_file, caplog, where):
    (tmp_path / "slip.py").write_text("def slip(completion):\n    return completion.txt == completion.answer\n")
    inside = {
        "score": "def score(self, item, text, completion):\n    return completion.txt == item.answer\n",
        "reward": f"rewards = ['{tmp_path / 'slip.py'}:slip']\n",
        "rollout": "async def rollout(self, item, model):\n    return model.nothing\n",
    }[where]
    code, lines = examine_file(inside)
    assert code == 1
    (line,) = [line for line in lines if line.startswith("scoring problem raised")]
    assert "AttributeError: " in line
    place = r"slip\.py:2" if where == "reward" else r"task\.py:\d+"
    assert re.search(rf"its code failed at \S*{place}$", line), line
    assert any(
        re.match(r"right answers problem \d+ of \d+ could not be scored see what is said of", line) for line in lines
    )
    assert any("stopped after" in line and "failures of scoring" in line for line in lines)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_reward_that_never_ends_is_killed_and_reported(tmp_path, examine_file):
    (tmp_path / "slow.py").write_text(
        "def slow(completion):\n"
        "    while len(completion.text) > 1000:\n"
        "        pass\n"
        "    return completion.text == completion.answer\n"
    )
    code, lines = examine_file(f"rewards = ['{tmp_path / 'slow.py'}:slow']", reward_timeout_s=1.0, max_items=1)
    assert code == 1
    (line,) = [line for line in lines if line.startswith("scoring problem timed_out")]
    assert "the very long answer" in line
    assert line.endswith("make it quicker, or raise --env.reward-timeout-s")


def test_items_that_change_when_asked_again_are_a_problem(examine_file):
    code, lines = examine_file(
        """
        def train_item(self, index):
            self.asked = getattr(self, "asked", 0) + 1
            return Item.ask(f"Say {self.asked}", answer=str(self.asked))
        """
    )
    assert code == 1
    assert any(line.startswith("repeatable problem") and "config.seed" in line for line in lines)


def test_items_that_are_listed_in_another_order_each_time_are_a_problem(examine_file):
    code, lines = examine_file(
        """
        train_item = Environment.train_item

        def train_items(self):
            self.start = getattr(self, "start", 0) + 1
            return [Item.ask(f"Say {(self.start + n) % 50}", answer=str((self.start + n) % 50)) for n in range(50)]
        """
    )
    assert code == 1
    assert any(line.startswith("repeatable problem") for line in lines)


def test_prompts_without_words_are_a_problem(examine_file):
    code, lines = examine_file(
        """
        def train_item(self, index):
            return Item.ask(" ", answer=str(index))
        """
    )
    assert code == 1
    assert any(line.startswith("prompts problem no prompt") for line in lines)


def test_code_that_raises_is_a_problem_and_no_crash(examine_file):
    code, lines = examine_file(
        """
        async def open(self):
            raise KeyError("no such table")
        """
    )
    assert code == 1
    (line,) = [line for line in lines if line.startswith("its own code problem KeyError: 'no such table'")]
    assert re.search(r"its code failed at \S*task\.py:\d+$", line)


def test_no_items_at_all_is_an_error_of_the_configuration(examine_file):
    with pytest.raises(ConfigError, match="no training items"):
        examine_file(
            """
            train_item = Environment.train_item

            def train_items(self):
                return []
            """
        )


TURNS = """
    async def rollout(self, item, model):
        chat = model.chat(item.messages)
        first = await chat.ask()
        chat.add({"role": "user", "content": "Are you sure?"})
        last = await chat.ask()
        return float(first.text == last.text == item.answer)
"""


def test_turns_are_played_by_a_script_without_any_model(examine_file):
    code, lines = examine_file(TURNS)
    assert code == 0, lines
    assert any(line.startswith("right answers ok 10 of 10") for line in lines)
    assert any(line.startswith("scoring ok 80 answers scored") for line in lines)


def test_turns_whose_right_answer_takes_more_than_one_text_are_a_warning(examine_file):
    code, lines = examine_file(TURNS.replace("first.text == last.text ==", "first.text != last.text =="))
    assert code == 0
    assert any(line.startswith("right answers warning") and "gold_completion" in line for line in lines)


def test_a_rollout_that_raises_is_reported(examine_file):
    code, lines = examine_file(
        TURNS.replace("Are you sure?", "").replace("float(", "float(1 / len(last.text)) * float(")
    )
    assert code == 1
    assert any("first the empty answer '': ZeroDivisionError" in line for line in lines)
