"""Tasks whose prompts are rows: of a file, of a folder of files, or of a dataset by name.

    class Trivia(DataEnvironment):
        rewards = ["exact_match"]

        def to_item(self, row: Row) -> Item:
            return Item.ask(row.text("question"), answer=row.text("answer"), system=self.system_prompt)

A row that cannot be used is told with its file and line, skipped and counted. What is held out is never trained on:
neither the rows themselves, nor others that ask the same.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item
from treadle.envs.rows import SUFFIXES, BrokenRow, Row, RowError, parse_rows
from treadle.envs.seeds import stable_seed, stable_shuffle
from treadle.errors import ConfigError, MissingExtra
from treadle.log import get_logger

log = get_logger("env")

MAX_HELD_OUT = 256  # rows set aside when no held-out ones are given, but never more than one in ten
_NUM_REPORTED = 5  # broken rows that get a line of their own
_HELD_OUT_NAMES = ("test", "eval", "validation", "valid", "val", "dev")


@dataclass(frozen=True)
class Splits:
    """What a source has: `held_out` is empty when it does not say."""

    train: Sequence[Row | BrokenRow]
    held_out: Sequence[Row | BrokenRow] = ()


@dataclass(frozen=True)
class Data:
    """Items ready to be asked, and what was wrong with the rest."""

    train: Sequence[Item]
    held_out: Sequence[Item]
    broken: Sequence[BrokenRow] = ()
    num_kept_apart: int = 0  # training rows that ask what another, held-out row asks


class DataEnvironment(Environment):
    """Say what item a row is (`to_item`), and in which `dataset` it is found when the user names no data."""

    dataset: ClassVar[str] = ""
    data: Data = Data((), ())  # filled by `prepare`

    def prepare(self) -> None:
        if not self.data.train:
            self.data = load_data(self.config, self.to_item, self.dataset)

    async def open(self) -> None:
        # In a thread, because it may download: the process must hear a signal meanwhile.
        await asyncio.to_thread(self.prepare)

    @abstractmethod
    def to_item(self, row: Row) -> Item:
        """What this row asks, and what is right. RowError: the row cannot be used."""

    def own_system_prompt(self) -> str:
        """What the model is told first when the user does not say; empty: nothing."""
        return ""

    @property
    def system_prompt(self) -> str:
        given = self.config.system_prompt
        return self.own_system_prompt() if given is None else given

    def train_items(self) -> Sequence[Item]:
        return self.data.train

    def eval_items(self) -> Sequence[Item]:
        return self.data.held_out


def load_data(config: EnvConfig, to_item: Callable[[Row], Item], dataset: str = "") -> Data:
    """The rows that `config.data` and `config.eval_data` name, as items."""
    name = config.data or dataset
    if not name:
        raise ConfigError(
            f"the environment '{config.name}' needs data", fix="pass --env.data FILE (JSONL, JSON or CSV)"
        )
    splits = read_splits(name)
    train, broken = _to_items(splits.train, to_item, name)
    if config.eval_data:
        given = read_splits(config.eval_data)
        held_out, also_broken = _to_items(given.held_out or given.train, to_item, config.eval_data)
    elif splits.held_out:
        held_out, also_broken = _to_items(splits.held_out, to_item, name)
    else:
        held_out, also_broken = hold_out(train), []
    num_set_aside = 0 if config.eval_data or splits.held_out else len(held_out)
    asked = {question_of(item) for item in held_out}
    kept = [item for item in train if question_of(item) not in asked]
    if not kept:
        raise ConfigError(f"{name} has nothing to train on: its rows are all held out", fix="give more rows")
    data = Data(
        train=kept,
        held_out=stable_shuffle(held_out, "held-out order"),  # or the first ones might all be of a kind
        broken=[*broken, *also_broken],
        num_kept_apart=len(train) - len(kept) - num_set_aside,
    )
    log.info(
        "data", source=name, train=len(kept), held_out=len(held_out), broken=len(data.broken), apart=data.num_kept_apart
    )
    return data


def hold_out(items: Sequence[Item]) -> list[Item]:
    """Some of the items: the same ones for ever, whatever the seed and the order of the rows."""
    distinct = {question_of(item): item for item in items}
    count = min(MAX_HELD_OUT, max(1, len(distinct) // 10))
    chosen = sorted(distinct, key=lambda question: stable_seed("held out", question))[:count]
    return [distinct[question] for question in chosen]


def read_splits(name: str) -> Splits:
    """A file, a folder with train.jsonl and test.jsonl (or any files to train on), or a dataset "name:part"."""
    path = Path(name).expanduser()
    if path.is_file():
        return Splits(train=_read_files([path]))
    if path.is_dir():
        return _read_folder(path)
    if name.startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        raise ConfigError(f"there is no file or folder {name}", fix="check --env.data and --env.eval-data")
    return _read_dataset(name)


def _read_folder(folder: Path) -> Splits:
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    held_out_name = next((name for name in _HELD_OUT_NAMES if any(_split_of(path) == name for path in files)), None)
    held_out = [path for path in files if _split_of(path) == held_out_name]
    train = [path for path in files if _split_of(path) == "train"]
    train = train or [path for path in files if _split_of(path) not in _HELD_OUT_NAMES]
    if not train:
        wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise ConfigError(f"the folder {folder} has no rows to train on", fix=f"put train.jsonl there, or any {wanted}")
    splits = Splits(train=_read_files(train), held_out=_read_files(held_out))
    if held_out and not splits.held_out:
        raise ConfigError(f"{held_out[0]} has no rows", fix="delete it to hold out some of the training rows")
    return splits


def _split_of(path: Path) -> str:
    """ "test" of test.jsonl and of test-00000-of-00002.jsonl."""
    return path.stem.partition("-")[0].lower()


def _read_files(paths: Iterable[Path]) -> list[Row | BrokenRow]:
    return [row for path in paths for row in parse_rows(path.read_bytes(), str(path))]


def _read_dataset(name: str) -> Splits:
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra(
            f"'{name}' is no file or folder here, and to fetch it as a dataset, the package datasets is missing",
            fix="pip install datasets; or save the rows as train.jsonl and test.jsonl and pass --env.data FOLDER",
        )
    # Before it is imported: versions before 4 could run a script that lies beside the rows.
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"
    load_dataset = importlib.import_module("datasets").load_dataset
    dataset, _, part = name.partition(":")
    try:
        found = load_dataset(dataset, part or None)
    except Exception as error:  # no network, no such dataset, no such part: the library has many errors
        raise ConfigError(
            f"the dataset '{name}' cannot be loaded ({type(error).__name__}: {str(error)[:200]})",
            fix="check its name (name:part), or save its rows as train.jsonl and test.jsonl and pass --env.data FOLDER",
        ) from None
    if "train" not in found:
        raise ConfigError(f"the dataset '{name}' has no split 'train'", fix=f"it has: {', '.join(found)}")
    held_out_name = next((split for split in _HELD_OUT_NAMES if split in found), None)

    def rows(split: str) -> list[Row | BrokenRow]:
        return [Row(fields, f"{name} {split}[{number}]") for number, fields in enumerate(found[split])]

    return Splits(train=rows("train"), held_out=rows(held_out_name) if held_out_name else ())


def _to_items(
    rows: Iterable[Row | BrokenRow], to_item: Callable[[Row], Item], source: str
) -> tuple[list[Item], list[BrokenRow]]:
    items: list[Item] = []
    broken: list[BrokenRow] = []
    for row in rows:
        try:
            if isinstance(row, BrokenRow):
                broken.append(row)
            else:
                items.append(to_item(row))
        except RowError as error:
            broken.append(BrokenRow(row.place, str(error), error.fix))
    for row in broken[:_NUM_REPORTED]:
        log.warning("row_skipped", place=row.place, problem=row.problem)
    if len(broken) > _NUM_REPORTED:
        log.warning("rows_skipped", source=source, count=len(broken), usable=len(items))
    if not items:
        problem = f"{source} has no usable row" + (f": {broken[0]}" if broken else ": it is empty")
        usual = "write one JSON object a line, with the fields that the environment asks for"
        raise ConfigError(problem, fix=(broken[0].fix if broken else "") or usual)
    return items, broken


def question_of(item: Item) -> str:
    """What two items that ask the same have in common, whatever they are told first and however they are spaced."""
    words = [str(message["content"]) for message in item.messages if message["role"] != "system"]
    return " ".join(" ".join(words).split()).casefold()
