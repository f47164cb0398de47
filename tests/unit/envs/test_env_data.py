"""Rows from files, folders and datasets: broken ones are reported and counted, held-out ones never trained on."""

import asyncio
import json
import subprocess
import sys

import pytest

from treadle import envs
from treadle.config.env import EnvConfig, ServerConfig
from treadle.config.load import load_run
from treadle.envs.base import Item, load_environment
from treadle.envs.data import hold_out, load_data, read_splits
from treadle.envs.rows import BrokenRow, Row, RowError, parse_rows
from treadle.errors import ConfigError


def to_item(row):
    return Item.ask(row.text("question"), answer=row.text("answer"))


def rows_as_bytes(count, *, start=0):
    return b"".join(b'{"question": "Q%d?", "answer": %d}\n' % (n, n) for n in range(start, start + count))


def load(source, eval_data=""):
    return load_data(EnvConfig(data=str(source), eval_data=str(eval_data)), to_item)


def questions(items):
    return {item.prompt for item in items}


# One row each


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"question": ', "is not JSON"),
        (b'{"question": "\\ud800", "answer": 1}', "is not JSON"),  # half of a letter: no tokenizer takes it
        (b'{"question": "\xff", "answer": 1}', "is not JSON"),
        (b'{"question": NaN}', "is not JSON"),
        (b"[" * 5000, "is not JSON"),
        (b'["a"]', "is no JSON object"),
        (b"7", "is no JSON object"),
    ],
)
def test_a_line_that_is_no_object_is_a_broken_row_with_its_place(line, problem):
    first, broken, last = parse_rows(b'{"a": 1}\n' + line + b'\n{"a": 2}\n', "rows.jsonl")
    assert (first, last) == (Row({"a": 1}, "rows.jsonl:1"), Row({"a": 2}, "rows.jsonl:3"))
    assert broken.place == "rows.jsonl:2"
    assert problem in broken.problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"question": "?", "a": "2"}, "has no field 'answer'; it has 'question', 'a'"),
        ({"question": "?", "answer": None}, "has no field 'answer'; it has 'question'"),
        ({}, "has no field 'question'; it has none at all"),
        ({"question": "?", "answer": " "}, "the field 'answer' is empty"),
        ({"question": "?", "answer": ["4"]}, "the field 'answer' is ['4'], not text"),
        ({"question": "?", "answer": True}, "the field 'answer' is True, not text"),
    ],
)
def test_a_missing_empty_or_wrong_field_is_reported(fields, problem):
    with pytest.raises(RowError) as error:
        to_item(Row(fields, "x:1"))
    assert str(error.value) == problem


@pytest.mark.parametrize(
    ("value", "text"),
    [(51.0, "51"), (51, "51"), (0.5, "0.5"), (-3.0, "-3"), (1e-7, "0.0000001"), (1e21, "1" + "0" * 21)],
)
def test_a_number_is_text_as_a_person_writes_it(value, text):
    assert Row({"answer": value}, "x:1").text("answer") == text


def test_what_no_reward_process_could_be_sent_is_refused():
    with pytest.raises(RowError, match="cannot be sent"):
        Row({"id": 2**80}, "x:1").rest()


# Files


def test_a_json_array_gives_every_element_its_line():
    text = '[\n {"a": 1},\n\n {"a":\n  2}, 7,\n {"a": 1}\n]'
    rows = list(parse_rows(text.encode(), "rows.json"))
    assert [row.place for row in rows] == ["rows.json:2", "rows.json:4", "rows.json:5", "rows.json:6"]
    assert rows[2] == BrokenRow("rows.json:5", "is no JSON object")
    with pytest.raises(ConfigError, match="not JSON"):
        list(parse_rows(b'[{"a": 1}, {', "rows.json"))


def test_byte_order_marks_blank_lines_and_windows_line_ends_are_accepted():
    assert list(parse_rows(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}', "r.jsonl")) == [
        Row({"a": 1}, "r.jsonl:1"),
        Row({"a": 2}, "r.jsonl:3"),
    ]


def test_csv_rows_have_the_names_of_the_first_line():
    good, long, broken = parse_rows(b'question,answer\n1 + 1?,2\n"a\nb",3\nonly one\n', "r.csv")
    assert good == Row({"question": "1 + 1?", "answer": "2"}, "r.csv:2")
    assert (long.fields["question"], long.place) == ("a\nb", "r.csv:4")
    assert broken == BrokenRow("r.csv:5", "does not have the 2 fields of the first line")


def test_broken_rows_are_skipped_and_counted_and_the_first_ones_logged(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows_as_bytes(20) + b"oops\n" * 7 + b'{"question": "no answer"}\n')
    data = load(path)
    assert len(data.train) + len(data.held_out) == 20
    assert len(data.broken) == 8
    assert str(data.broken[-1]) == f"{path}:28 has no field 'answer'; it has 'question'"
    reported = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert reported == ["row_skipped"] * 5 + ["rows_skipped"]
    assert caplog.records[0].treadle_fields["place"] == f"{path}:21"


def test_a_file_without_any_good_row_is_refused_with_the_first_problem(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match=r"no usable row: .*rows.jsonl:1 has no field 'answer'"):
        load(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="it is empty"):
        load(path)


@pytest.mark.parametrize("name", ["./nothing", "nothing.jsonl", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_no_dataset(name):
    with pytest.raises(ConfigError, match="no file or folder"):
        read_splits(name)


def test_no_data_at_all_is_reported_with_the_flag():
    with pytest.raises(ConfigError, match=r"--env\.data"):
        load_data(EnvConfig(name="jsonl"), to_item)


# What is held out


def test_a_folder_trains_on_train_and_holds_out_test(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(rows_as_bytes(5))
    (tmp_path / "test.jsonl").write_bytes(rows_as_bytes(3, start=10))
    (tmp_path / "notes.jsonl").write_bytes(rows_as_bytes(2, start=20))
    data = load(tmp_path)
    assert questions(data.train) == {f"Q{n}?" for n in range(5)}
    assert questions(data.held_out) == {"Q10?", "Q11?", "Q12?"}


def test_a_folder_without_train_trains_on_all_its_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows_as_bytes(5))
    (tmp_path / "b.json").write_text('[{"question": "B?", "answer": "b"}]')
    (tmp_path / "test.csv").write_text("question,answer\nT?,t\n")
    data = load(tmp_path)
    assert questions(data.train) == {*(f"Q{n}?" for n in range(5)), "B?"}
    assert questions(data.held_out) == {"T?"}
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "b.json").unlink()
    with pytest.raises(ConfigError, match="no rows to train on"):
        load(tmp_path)


def test_given_held_out_rows_win_over_a_test_split(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(rows_as_bytes(5))
    (tmp_path / "test.jsonl").write_bytes(rows_as_bytes(3, start=10))
    (tmp_path / "mine.jsonl").write_bytes(rows_as_bytes(2, start=30))
    assert questions(load(tmp_path, tmp_path / "mine.jsonl").held_out) == {"Q30?", "Q31?"}


def test_a_training_row_with_a_held_out_question_is_not_trained_on(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "who  is it?", "answer": 1}\n{"question": "B?", "answer": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "Who is it?\\n", "answer": 1}\n')
    data = load(tmp_path)
    assert questions(data.train) == {"B?"}
    assert data.num_kept_apart == 1
    (tmp_path / "train.jsonl").write_text('{"question": "Who is it?", "answer": 1}\n')
    with pytest.raises(ConfigError, match="all held out"):
        load(tmp_path)


def test_without_a_test_split_a_tenth_is_held_out_for_any_seed_and_order(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = rows_as_bytes(100).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[0], lines[1]]))
    data = load(path)
    path.write_bytes(b"".join(reversed(lines)))
    again = load_data(EnvConfig(data=str(path), seed=7), to_item)
    assert len(data.held_out) == 10
    assert questions(data.held_out) == questions(again.held_out)
    assert not questions(data.held_out) & questions(data.train)
    assert len(data.train) + data.num_kept_apart == 92


def test_the_system_prompt_does_not_change_what_is_held_out():
    plain = [Item.ask(f"Q{n}?", answer=str(n)) for n in range(50)]
    reported = [Item.ask(f"Q{n}?", answer=str(n), system="Be brief.") for n in range(50)]
    assert [item.answer for item in hold_out(plain)] == [item.answer for item in hold_out(reported)]


def test_at_most_256_rows_are_set_aside_and_at_least_one():
    items = [Item.ask(f"Q{n}?", answer="1") for n in range(5000)]
    assert len(hold_out(items)) == 256
    assert len(hold_out(items[:2])) == 1


def test_columns_get_the_names_that_the_environment_looks_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"problem": "Q{n}?", "solution": {n}, "id": {n}}}\n' for n in range(20)))
    data = load_data(EnvConfig(data=str(path), data_columns="question=problem answer=solution"), to_item)
    assert questions([*data.train, *data.held_out]) == {f"Q{n}?" for n in range(20)}
    with pytest.raises(ConfigError, match="has no field 'text'; it has 'problem', 'solution', 'id'") as caught:
        load_data(EnvConfig(data=str(path), data_columns="question=text answer=solution"), to_item)
    assert caught.value.fix == "check --env.data-columns NAME=COLUMN"
    with pytest.raises(ConfigError, match="'problem' is not NAME=COLUMN"):
        load_run(None, {"env.data_columns": "problem"})


def test_splits_of_a_folder_are_chosen_by_name(tmp_path):
    for split, start in (("train", 0), ("extra", 20), ("test", 40), ("hard", 60)):
        (tmp_path / f"{split}.jsonl").write_bytes(rows_as_bytes(5, start=start))

    def chosen(**settings):
        data = load_data(EnvConfig(data=str(tmp_path), **settings), to_item)
        return min(int(item.answer) for item in data.train), min(int(item.answer) for item in data.held_out)

    assert chosen() == (0, 40)
    assert chosen(data_split="extra") == (20, 40)
    assert chosen(data_split="test", eval_split="hard") == (40, 60)
    assert chosen(eval_data=str(tmp_path), eval_split="extra") == (0, 20)
    for settings in ({"data_split": "validation"}, {"eval_split": "validation"}):
        with pytest.raises(ConfigError, match="has no split 'validation'") as caught:
            chosen(**settings)
        assert caught.value.fix == "it has: extra, hard, test, train"
    with pytest.raises(ConfigError, match="is a file, and has no split 'train'"):
        load_data(EnvConfig(data=str(tmp_path / "train.jsonl"), data_split="train"), to_item)


# Datasets by name


def test_without_the_package_a_dataset_names_the_remedy():
    script = (
        "import sys\n"
        "sys.modules['datasets'] = None\n"
        "from treadle.envs.data import read_splits\n"
        "read_splits('openai/gsm8k:main')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert "MissingExtra" in run.stderr
    assert "pip install 'treadle[data]'" in run.stderr
    assert "--env.data FOLDER" in run.stderr


def test_a_dataset_is_loaded_by_name_and_part(tmp_path):
    """With a double of the package `datasets`, found before the real one."""
    (tmp_path / "datasets.py").write_text(
        "import os\n"
        "assert os.environ['HF_DATASETS_TRUST_REMOTE_CODE'] == '0'\n"  # no script of a dataset is run
        "def load_dataset(name, part=None, split=None):\n"
        "    if name != 'openai/gsm8k': raise FileNotFoundError('no such dataset: ' + name)\n"
        "    if part is None: raise ValueError(\"Config name is missing: pick one of ['main', 'socratic']\")\n"
        "    rows = [{'question': 'Q%d?' % n, 'answer': part} for n in range(4)]\n"
        "    return {'train': rows[:3], 'test': rows[3:]}\n"
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import json\n"
        "from treadle.envs.data import read_splits\n"
        "splits = read_splits('openai/gsm8k:main')\n"
        "print(json.dumps([len(splits.train), len(splits.held_out), splits.train[2].place, splits.train[2].fields]))\n"
        "assert read_splits('openai/gsm8k').train[2].fields == splits.train[2].fields\n"
        "read_splits('openai/gsm9k')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    fields = {"question": "Q2?", "answer": "main"}
    assert json.loads(run.stdout) == [3, 1, "openai/gsm8k:main train[2]", fields]
    assert "ConfigError" in run.stderr
    assert "no such dataset: openai/gsm9k" in run.stderr


# Before anything is started

NOWHERE = ServerConfig(base_url="http://127.0.0.1:9")


@pytest.mark.parametrize("action", ["serve", "process", "evaluate"])
def test_data_that_is_not_there_is_reported_before_an_engine_is_waited_for(action):
    with pytest.raises(ConfigError, match="needs data"):
        envs.run_action(action, EnvConfig(name="jsonl"), NOWHERE)


def test_a_run_whose_data_is_not_there_ends_before_anything_is_started(tmp_path):
    words = ["run", "--plain", "--output", str(tmp_path / "runs"), "--env.name", "jsonl"]
    code = (
        "import sys\nfrom treadle.cli import main\n"
        f"try:\n    main({[*words, '--env.data', str(tmp_path / 'rows.jsonl')]!r})\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"there is no file or folder {tmp_path / 'rows.jsonl'}" in ended.stderr
    assert "--resume" not in ended.stderr
    assert ended.stdout.split() == ["False"], "torch was loaded to look at a file"
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_for_a_dataset_is_said_before_a_run_starts(tmp_path):
    words = ["run", "--plain", "--output", str(tmp_path / "runs"), "--env.name", "jsonl", "--env.data", "openai/gsm8k"]
    code = f"import sys\nsys.modules['datasets'] = None\nfrom treadle.cli import main\nmain({words!r})"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "'openai/gsm8k' is no file or folder here, so it is a dataset, and the package datasets" in ended.stderr
    assert "-> pip install 'treadle[data]'" in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_data_is_read_once_though_it_is_prepared_twice(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"question": "{n}?", "answer": "{n}"}}' for n in range(20)))
    task = load_environment(EnvConfig(name="jsonl", data=str(tmp_path / "rows.jsonl")))
    task.prepare()
    (tmp_path / "rows.jsonl").unlink()
    asyncio.run(task.open())
    assert len(task.train_items()) == 18
