"""Rows by the id of a dataset, with the real library `datasets`: from its cache without a network, and from folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.atropos.parts import PYTHON, need_atroposlib

pytestmark = pytest.mark.slow

# The library is not part of the test environment (200 MB); atroposlib's environment has it. Everything else is ours.
LIBRARY = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
root = Path(sys.argv[2])
"""
MAKE = (
    LIBRARY
    + """
import datasets

def rows(count, part):
    fields = [{"problem": f"{part}: what is {n} + {n}?", "solution": f"Twice.\\n#### {2 * n}"} for n in range(count)]
    return datasets.Dataset.from_list(fields)

for part in ("main", "socratic"):
    made = datasets.DatasetDict({"train": rows(40, part), "test": rows(6, part)})
    files = {split: str(root / "repository" / part / f"{split}-00000-of-00001.parquet") for split in made}
    for split, file in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        made[split].to_parquet(file)
    builder = datasets.load_dataset_builder("parquet", data_files=files, cache_dir=str(root / "building"))
    builder.download_and_prepare()
    # As the library leaves a dataset that it has fetched: cache/openai___gsm8k/main/VERSION/HASH.
    version, fingerprint = Path(builder.cache_dir).parts[-2:]
    place = root / "cache" / "openai___gsm8k" / part / version / fingerprint
    place.parent.mkdir(parents=True)
    Path(builder.cache_dir).rename(place)
    for split in made:
        (place / f"parquet-{split}.arrow").rename(place / f"gsm8k-{split}.arrow")
    info = json.loads((place / "dataset_info.json").read_text())
    info |= {"dataset_name": "gsm8k", "config_name": part}
    (place / "dataset_info.json").write_text(json.dumps(info))
made.save_to_disk(str(root / "saved"))
"""
)
READ = (
    LIBRARY
    + """
from treadle.config.env import EnvConfig
from treadle.envs.base import prepare_task
from treadle.envs.base import load_environment
from treadle.errors import TreadleError

for settings in json.loads(sys.argv[3]):
    try:
        task = load_environment(EnvConfig(**settings))
        prepare_task(task)
        found = [len(task.train_items()), len(task.eval_items()), task.train_items()[3].messages[-1]["content"],
                task.train_items()[3].answer]
    except TreadleError as error:
        found = str(error)
    print("found: " + json.dumps(found))
"""
)
COLUMNS = {"name": "gsm8k", "data_columns": "question=problem answer=solution"}


def run_with_library(code: str, folder: Path, *words: str) -> list[Any]:
    [packages] = PYTHON.parents[1].glob("lib/python*/site-packages")
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder), "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(packages), str(folder), *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1", **offline},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line.removeprefix("found: ")) for line in done.stdout.splitlines() if line.startswith("found: ")]


def test_a_dataset_by_its_id_is_read_from_the_cache_and_from_folders(tmp_path: Path) -> None:
    need_atroposlib()
    run_with_library(MAKE, tmp_path)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "lines.jsonl").write_text("".join(f'{{"question": "{n} + 2?", "answer": {n + 2}}}\n' for n in range(10)))
    (folder / "table.csv").write_text("question,answer\n" + "".join(f"{n} + 3?,{n + 3}\n" for n in range(10)))
    parquet = tmp_path / "repository" / "socratic" / "train-00000-of-00001.parquet"
    sources = f"openai/gsm8k:main:3,{folder / 'lines.jsonl'}:1,{folder / 'table.csv'}:1,{parquet}:1"
    mix, by_id, part, cut, saved, cloned, one_file, no_split, no_column = run_with_library(
        READ,
        tmp_path,
        json.dumps([
            COLUMNS | {"data": sources},
            COLUMNS | {"data": "openai/gsm8k"},
            COLUMNS | {"data": "openai/gsm8k:socratic"},
            COLUMNS | {"data": "openai/gsm8k", "data_split": "train[10:20]", "eval_split": "test[:2]"},
            COLUMNS | {"data": str(tmp_path / "saved")},
            COLUMNS | {"data": str(tmp_path / "repository" / "main")},
            COLUMNS | {"data": str(tmp_path / "repository" / "main" / "train-00000-of-00001.parquet")},
            COLUMNS | {"data": "openai/gsm8k", "data_split": "validation"},
            {"name": "gsm8k", "data": "openai/gsm8k"},
        ]),
    )  # fmt: skip
    assert mix[:2] == [34 + 9 + 9 + 36, 6 + 1 + 1 + 4], "an id, JSONL, CSV and Parquet in one mix"
    # The six rows of the test split ask what the first rows of the training split ask: those are not trained on.
    assert by_id == [34, 6, "main: what is 9 + 9?", "18"], "of several parts, main is the one"
    assert part == [34, 6, "socratic: what is 9 + 9?", "18"]
    assert cut == [10, 2, "main: what is 13 + 13?", "26"]
    assert saved == [34, 6, "socratic: what is 9 + 9?", "18"]
    assert cloned == [34, 6, "main: what is 9 + 9?", "18"]
    assert one_file[:2] == [36, 4], "one row in ten is held out"
    assert no_split == "the dataset 'openai/gsm8k' has no split 'validation'\n  -> --env.data-split: it has train, test"
    assert "openai/gsm8k train[0] has no field 'question'; it has 'problem', 'solution'" in no_column
    assert "--env.data-columns question=COLUMN" in no_column
