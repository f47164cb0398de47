"""Load tasks from rows: of a file, a folder of files, a dataset by name, or several of them (envs/mix.py).

    class Trivia(DataEnvironment):
        rewards = ["exact_match"]

        def to_item(self, row: Row) -> Item:
            return Item.ask(row.text("question"), answer=row.text("answer"), system=self.system_prompt)

Unusable rows are logged with file and line, skipped and counted. Held-out rows are never trained on, nor other rows
with the same question.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from treadle.config.env import EnvConfig, labels_of_sources, parse_sources
from treadle.envs.base import Environment, Item, stable_seed, stable_shuffle
from treadle.envs.mix import Mix, in_turn, whole_weights
from treadle.envs.rows import SUFFIXES, BrokenRow, Row, RowError, parse_rows
from treadle.errors import ConfigError, MissingExtra, require
from treadle.formatting import counted
from treadle.log import get_logger

log = get_logger("env")
T = TypeVar("T")

MAX_HELD_OUT = 256  # rows to hold out if no held-out ones are given, at most one in ten
_NUM_REPORTED = 5  # broken rows that are logged individually
_PARQUET = ".parquet"  # read by the library datasets, as are datasets by their id
_HELD_OUT_NAMES = ("test", "eval", "validation", "valid", "val", "dev")


@dataclass(frozen=True)
class Splits:
    """The rows of a source; `held_out` is empty if it has no such split."""

    train: Sequence[Row | BrokenRow]
    held_out: Sequence[Row | BrokenRow] = ()


@dataclass(frozen=True)
class Data:
    """Usable items, and the broken rows."""

    train: Sequence[Item]
    held_out: Sequence[Item]
    broken: Sequence[BrokenRow] = ()
    num_kept_apart: int = 0  # training rows with the question of a held-out row
    mix: Mix | None = None  # of several sources, whose items follow each other in `train`


class DataEnvironment(Environment):
    """A subclass implements `to_item`, and may name a `dataset` to use if the user names no data."""

    dataset: ClassVar[str] = ""
    data: Data = Data((), ())  # filled by `prepare`

    def prepare(self) -> None:
        if not self.data.train:
            self.data = load_data(self.config, self.to_item, self.dataset)

    async def open(self) -> None:
        # In a thread, because it may download: signals must still be handled.
        await asyncio.to_thread(self.prepare)

    @abstractmethod
    def to_item(self, row: Row) -> Item:
        """Convert a row to an item; RowError if the row cannot be used."""

    def own_system_prompt(self) -> str:
        """The system prompt if none is configured; empty: none."""
        return ""

    @property
    def system_prompt(self) -> str:
        given = self.config.system_prompt
        return self.own_system_prompt() if given is None else given

    def train_items(self) -> Sequence[Item]:
        return self.data.train

    def eval_items(self) -> Sequence[Item]:
        """Of several sources one of each in turn."""
        return self.data.held_out

    def place_of(self, index: int) -> int:
        return super().place_of(index) if self.data.mix is None else self.data.mix.place_of(index)

    def candidate(self, index: int, number: int) -> int:
        return super().candidate(index, number) if self.data.mix is None else self.data.mix.index_like(index, number)

    @property
    def sources(self) -> Sequence[str]:
        return () if self.data.mix is None else self.data.mix.names


def load_data(config: EnvConfig, to_item: Callable[[Row], Item], dataset: str = "") -> Data:
    """Load the rows of `config.data` and `config.eval_data` as items."""
    if not (config.data or dataset):
        raise ConfigError(
            f"the environment '{config.name}' needs data", fix="pass --env.data FILE (JSONL, JSON, CSV or Parquet)"
        )
    sources = parse_sources(config.data or dataset)
    is_mix = len(sources) > 1
    given = [source.name for source in parse_sources(config.eval_data)] if config.eval_data else [""] * len(sources)
    if len(given) != len(sources):
        raise ConfigError(
            f"--env.eval-data names {counted(len(given), 'source')}, and --env.data {len(sources)}",
            fix="name one for each, in the same order, or none: each source then holds out its own",
        )
    to_item = with_columns(to_item, config.data_columns, is_mix=is_mix)
    parts = [
        _load_source(config, source.name, eval_name, to_item) for source, eval_name in zip(sources, given, strict=True)
    ]
    labels = labels_of_sources(sources) if is_mix else ("",)
    parts = [_labelled(part, label) for part, label in zip(parts, labels, strict=True)]
    asked = {question_of(item) for part in parts for item in part.held_out}
    num_kept_apart = 0
    for place, part in enumerate(parts):
        kept = [item for item in part.train if question_of(item) not in asked]
        if not kept:
            problem = f"{sources[place].name} has nothing to train on: its rows are all held out"
            raise ConfigError(problem, fix="give more rows")
        num_kept_apart += len(part.train) - len(kept) - part.num_set_aside
        parts[place] = replace(part, train=kept)
        log.info(
            "data",
            source=sources[place].name,
            train=len(kept),
            held_out=len(part.held_out),
            broken=len(part.broken),
            apart=len(part.train) - len(kept) - part.num_set_aside,
        )
    mix = None
    if is_mix:
        mix = Mix(labels, whole_weights(sources), tuple(len(part.train) for part in parts), config.seed)
    # The first held-out ones may all be of one kind.
    held_out = [stable_shuffle(part.held_out, "held-out order") for part in parts]
    remaining = list(map(iter, held_out))
    return Data(
        train=[item for part in parts for item in part.train],
        held_out=[next(remaining[number]) for number in in_turn(held_out)],
        broken=[row for part in parts for row in part.broken],
        num_kept_apart=num_kept_apart,
        mix=mix,
    )


@dataclass(frozen=True)
class _Part:
    """What one source gives; `num_set_aside`: held-out items that are among the training ones too."""

    train: Sequence[Item]
    held_out: Sequence[Item]
    broken: Sequence[BrokenRow]
    num_set_aside: int = 0


def _load_source(config: EnvConfig, name: str, eval_name: str, to_item: Callable[[Row], Item]) -> _Part:
    splits = read_splits(name, split=config.data_split, held_out_split="" if eval_name else config.eval_split)
    train, broken = convert_rows(splits.train, to_item, name)
    if eval_name:
        given = read_splits(eval_name, split=config.eval_split)
        asked_for = given.train if config.eval_split else given.held_out or given.train
        held_out, also_broken = convert_rows(asked_for, to_item, eval_name)
    elif splits.held_out:
        held_out, also_broken = convert_rows(splits.held_out, to_item, name)
    else:
        held_out = hold_out(train)
        return _Part(train, held_out, broken, num_set_aside=len(held_out))
    return _Part(train, held_out, [*broken, *also_broken])


def _labelled(part: _Part, label: str) -> _Part:
    if not label:
        return part
    train, held_out = ([replace(item, source=label) for item in items] for items in (part.train, part.held_out))
    return replace(part, train=train, held_out=held_out)


def hold_out(items: Sequence[Item]) -> list[Item]:
    """Choose held-out items: always the same ones, for every seed and order of the rows."""
    distinct = {question_of(item): item for item in items}
    count = min(MAX_HELD_OUT, max(1, len(distinct) // 10))
    chosen = sorted(distinct, key=lambda question: stable_seed("held out", question))[:count]
    return [distinct[question] for question in chosen]


def read_splits(name: str, *, split: str = "", held_out_split: str = "") -> Splits:
    """A file, a folder with train.jsonl and test.jsonl (or any files to train on), or a dataset "id" or "id:part".

    `split` is trained on, `held_out_split` is held out; empty: the usual names.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != _PARQUET:
        if split or held_out_split:
            raise ConfigError(
                f"{name} is a file, and has no split '{split or held_out_split}'",
                fix=f"leave --env.{'data' if split else 'eval'}-split out, or name a folder or a dataset",
            )
        return Splits(train=_read_files([path]))
    if path.is_dir():
        if _is_saved(path) or (not _row_files(path) and next(path.rglob(f"*{_PARQUET}"), None) is not None):
            return _read_dataset(name, split, held_out_split)
        return _read_folder(path, split, held_out_split)
    if not path.is_file() and (name.startswith((".", "/", "~")) or path.suffix in (*SUFFIXES, _PARQUET)):
        raise ConfigError(f"there is no file or folder {name}", fix="check --env.data and --env.eval-data")
    return _read_dataset(name, split, held_out_split)


def _row_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _is_saved(folder: Path) -> bool:
    """Whether the folder was written by `datasets.save_to_disk`."""
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _read_folder(folder: Path, split: str, held_out_split: str) -> Splits:
    files = _row_files(folder)
    there = list(dict.fromkeys(map(_split_of, files)))
    held_out_name = _choose_held_out(str(folder), there, split, held_out_split)
    held_out = [path for path in files if _split_of(path) == held_out_name]
    train = [path for path in files if _split_of(path) == (split or "train")]
    train = train or [path for path in files if not split and _split_of(path) not in _HELD_OUT_NAMES]
    if not train and split:
        raise ConfigError(f"the folder {folder} has no split '{split}'", fix=f"it has: {', '.join(there)}")
    if not train:
        wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise ConfigError(f"the folder {folder} has no rows to train on", fix=f"put train.jsonl there, or any {wanted}")
    splits = Splits(train=_read_files(train), held_out=_read_files(held_out))
    if held_out and not splits.held_out:
        raise ConfigError(f"{held_out[0]} has no rows", fix="delete it to hold out some of the training rows")
    return splits


def _choose_held_out(name: str, there: Sequence[str], split: str, held_out_split: str) -> str | None:
    """The split to hold out: the requested one, or the first usual name that is not trained on."""
    if held_out_split and held_out_split.partition("[")[0] not in there:
        raise ConfigError(f"{name} has no split '{held_out_split}' to hold out", fix=f"it has: {', '.join(there)}")
    trained = split.partition("[")[0] or "train"
    usual = (one for one in _HELD_OUT_NAMES if one in there and one != trained)
    return held_out_split or next(usual, None)


def _split_of(path: Path) -> str:
    """ "test" for test.jsonl and test-00000-of-00002.jsonl."""
    return path.stem.partition("-")[0].lower()


def _read_files(paths: Iterable[Path]) -> list[Row | BrokenRow]:
    return [row for path in paths for row in parse_rows(path.read_bytes(), str(path))]


def _read_dataset(name: str, split: str, held_out_split: str) -> Splits:
    """Read a dataset from the library's cache, else from the network; or from Parquet files."""
    try:
        require("data", "datasets")
    except MissingExtra as error:
        what = (
            "holds a dataset" if Path(name).expanduser().exists() else "is no file or folder here, so it is a dataset"
        )
        raise MissingExtra(
            f"'{name}' {what}, and the package datasets, which reads it, is missing",
            fix=f"{error.fix}; or save the rows as train.jsonl and test.jsonl and pass --env.data FOLDER",
        ) from None
    # Before the import: versions before 4 could run a script of the dataset.
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"
    load = _dataset_loader(name)
    try:
        found = load(None)
        there = list(found)
        if (split.partition("[")[0] or "train") not in there:
            problem = f"the dataset '{name}' has no split '{split or 'train'}'"
            raise ConfigError(problem, fix=f"--env.data-split: it has {', '.join(there)}")
        held_out_name = _choose_held_out(f"the dataset '{name}'", there, split, held_out_split)

        def rows(one: str) -> list[Row | BrokenRow]:
            rows_of = found[one] if one in there else load(one)  # the library slices train[:500]
            return [Row(fields, f"{name} {one}[{number}]") for number, fields in enumerate(rows_of)]

        return Splits(train=rows(split or "train"), held_out=rows(held_out_name) if held_out_name else ())
    except ConfigError:
        raise
    except Exception as error:  # no network, no such dataset, no such part: the library has many errors
        raise ConfigError(
            f"the dataset '{name}' cannot be loaded ({type(error).__name__}: {str(error)[:200]})",
            fix="check its name (id, or id:part), or save its rows as train.jsonl and test.jsonl and pass "
            "--env.data FOLDER",
        ) from None


def _dataset_loader(name: str) -> Callable[[str | None], Any]:
    """Returns a function that loads one split, or with None all splits by name."""
    library = importlib.import_module("datasets")
    folder = Path(name).expanduser()
    if folder.is_file():
        return lambda split: library.load_dataset("parquet", data_files={"train": str(folder)}, split=split)
    if _is_saved(folder):
        saved = library.load_from_disk(str(folder))
        splits = saved if isinstance(saved, dict) else {"train": saved}
        return lambda split: splits if split is None else splits[split]
    if folder.is_dir():
        return lambda split: library.load_dataset(str(folder), split=split)
    dataset, _, part = name.partition(":")
    # A dataset with several parts needs a name; "main" is the usual one, also for openai/gsm8k.
    parts = (part,) if part else (None, "main")
    cached = next((found for one in parts if (found := _cached(dataset, one)) is not None), None)
    if cached is not None:
        return lambda split: cached.as_dataset(split=split)

    def fetch(split: str | None) -> Any:
        try:
            return library.load_dataset(dataset, parts[0], split=split)
        except ValueError as error:
            if part or "main" not in str(error):
                raise
            return library.load_dataset(dataset, "main", split=split)

    return fetch


def _cached(dataset: str, part: str | None) -> Any:
    """The library's builder for a cached dataset; None if it is not cached.

    `load_dataset` tries the network first and, without one, retries for a minute.
    """
    try:
        cache = importlib.import_module("datasets.packaged_modules.cache.cache").Cache
        found = cache(
            repo_id=dataset,
            dataset_name=dataset.rsplit("/", maxsplit=1)[-1],
            config_name=part,
            version="auto",
            hash="auto",
        )
    except (ImportError, ValueError, OSError):
        return None
    log.info("dataset_from_cache", dataset=dataset, part=found.config.name, folder=str(found.cache_dir))
    return found


def with_columns(convert: Callable[[Row], T], pairs: Sequence[str], *, is_mix: bool = False) -> Callable[[Row], T]:
    """`convert` with renamed columns; `pairs` are ("question=problem", "answer=solution").

    Of several sources, a pair is for those that have its column.
    """
    wanted = dict(pair.split("=", 1) for pair in pairs)

    def renamed(row: Row) -> T:
        missing = [column for column in wanted.values() if row.has(column) is None]
        if missing and not is_mix:
            raise RowError(row.lacks(*missing), fix="check --env.data-columns NAME=COLUMN")
        columns = {name: column for name, column in wanted.items() if column not in missing}
        own = {name: value for name, value in row.fields.items() if name not in columns.values()}
        return convert(Row({**own, **{name: row.fields[column] for name, column in columns.items()}}, row.place))

    return renamed if wanted else convert


def convert_rows(
    rows: Iterable[Row | BrokenRow], convert: Callable[[Row], T], source: str
) -> tuple[list[T], list[BrokenRow]]:
    """The converted rows, and those that cannot be used; ConfigError if no row can be."""
    items: list[T] = []
    broken: list[BrokenRow] = []
    for row in rows:
        try:
            if isinstance(row, BrokenRow):
                broken.append(row)
            else:
                items.append(convert(row))
        except RowError as error:
            broken.append(BrokenRow(row.place, str(error), error.fix))
    for row in broken[:_NUM_REPORTED]:
        log.warning("row_skipped", place=row.place, problem=row.problem)
    if len(broken) > _NUM_REPORTED:
        log.warning("rows_skipped", source=source, count=len(broken), usable=len(items))
    if not items:
        problem = f"{source} has no usable row" + (f": {broken[0]}" if broken else ": it is empty")
        usual = "write one JSON object a line, with the fields that are asked for"
        raise ConfigError(problem, fix=(broken[0].fix if broken else "") or usual)
    return items, broken


def question_of(item: Item) -> str:
    """The question, normalized: without system messages, white space differences and case."""
    words = [str(message["content"]) for message in item.messages if message["role"] != "system"]
    return " ".join(" ".join(words).split()).casefold()
