"""Turn rows into token sequences with a loss mask, split off held-out ones, and keep both in files.

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
    {"prompt": "2 + 3?", "completion": "5"}
    {"text": "Two and three make five."}

A chat is tokenized as an environment does it: the prompt by the chat template, each turn of the assistant by itself,
and the text between two turns by the template again. So a model is trained on the tokens that it samples later. The
loss is on the assistant's tokens and the token that ends its turn; of a plain text it is on every token but the first.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treadle.config.sft import SftConfig
from treadle.envs.base import stable_seed
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.data import convert_rows, read_splits, with_columns
from treadle.envs.rows import BrokenRow, Row, RowError
from treadle.errors import ConfigError, ModelError
from treadle.wire.groups import IGNORED, ScoredGroup

SAY_EVERY_S = 10.0
MAX_HELD_OUT = 256  # rows: the loss of more is hardly more certain, and takes time
PROMPT, COMPLETION = ("prompt", "question", "instruction"), ("completion", "answer", "response")
ROLES = ("system", "user", "assistant", "tool", "developer")
SHAPES = "a row has messages, or prompt and completion, or text; --data-columns NAME=COLUMN renames columns"
ROWS_FOLDER = "rows"  # in the folder of a run
TRAIN_ROWS, HELD_OUT_ROWS = "train", "held_out"
_FILES = ("tokens", "is_trained", "ends")


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence, and which of its tokens carry loss."""

    tokens: np.ndarray  # int32
    is_trained: np.ndarray  # bool
    is_cut_off: bool = False  # it was longer than the longest sequence
    document: bytes = b""  # of a piece of a plain text: the hash of the whole text

    @property
    def prompt(self) -> bytes:
        """What stands before the first token with a loss; of a plain text all of it, also of its pieces."""
        if self.document:
            return self.document
        first = int(self.is_trained.argmax())
        return self.tokens[: first if first > 1 else len(self.tokens)].tobytes()


@dataclass(frozen=True)
class Examples:
    train: list[Example]
    held_out: list[Example]
    broken: Sequence[BrokenRow] = ()


# ---- rows -> examples


def load_examples(
    config: SftConfig, tokenizer: ChatTokenizer, seq_len: int, say: Callable[[str], None] = lambda _: None
) -> Examples:
    """The rows of `config.data` as examples of at most `seq_len` tokens. `say` gets a line at times."""
    encode = partial(encode_row, tokenizer=tokenizer, seq_len=seq_len, system_prompt=config.system_prompt)
    convert = with_columns(_counting(encode, say), config.data_columns)
    splits = read_splits(config.data, split=config.data_split)
    train, broken = _flat(*convert_rows(splits.train, convert, config.data))
    if config.eval_data:
        given = read_splits(config.eval_data)
        held_out, also_broken = _flat(*convert_rows(given.held_out or given.train, convert, config.eval_data))
    elif splits.held_out and config.held_out > 0:
        held_out, also_broken = _flat(*convert_rows(splits.held_out, convert, config.data))
    else:
        examples = split_off(train, config.held_out)
        return Examples(examples.train, examples.held_out, broken)
    prompts = {example.prompt for example in held_out}
    kept = [example for example in train if example.prompt not in prompts]
    if not kept:
        raise ConfigError(
            f"{config.data} has nothing to train on: all its prompts are held out", fix="name other rows as --eval-data"
        )
    chosen = sorted(held_out, key=lambda example: stable_seed("held out", repr(example.prompt)))
    return Examples(kept, chosen[:MAX_HELD_OUT], [*broken, *also_broken])


def _counting(encode: Callable[[Row], list[Example]], say: Callable[[str], None]) -> Callable[[Row], list[Example]]:
    """`encode`, with a line about the number of rows every SAY_EVERY_S."""
    said_at, num_rows = time.monotonic(), 0

    def counted_encode(row: Row) -> list[Example]:
        nonlocal said_at, num_rows
        num_rows += 1
        if time.monotonic() - said_at > SAY_EVERY_S:
            said_at = time.monotonic()
            say(f"tokenizing: {num_rows:,} rows so far")
        return encode(row)

    return counted_encode


def _flat(converted: list[list[Example]], broken: list[BrokenRow]) -> tuple[list[Example], list[BrokenRow]]:
    return [example for examples in converted for example in examples], broken


def split_off(examples: Sequence[Example], share: float) -> Examples:
    """Hold out all examples of some prompts or texts: always the same ones, for every seed and order of the rows."""
    prompts = sorted({example.prompt for example in examples}, key=lambda prompt: stable_seed("held out", repr(prompt)))
    count = min(round(share * len(prompts)) or 1, len(prompts) - 1, MAX_HELD_OUT) if share > 0 else 0
    chosen = set(prompts[:count])
    held_out = [example for example in examples if example.prompt in chosen]
    return Examples([example for example in examples if example.prompt not in chosen], held_out[:MAX_HELD_OUT])


def encode_row(row: Row, *, tokenizer: ChatTokenizer, seq_len: int, system_prompt: str = "") -> list[Example]:
    """The example of a row; a text that is too long gives several."""
    try:
        if row.has("messages"):
            messages = _messages_in(row, "messages")
            return [encode_chat(tokenizer, messages, seq_len, tools=row.fields.get("tools") or ())]
        if row.has(*PROMPT):
            return [_encode_pair(row, tokenizer, seq_len, system_prompt)]
        if row.has("text"):
            return encode_plain(tokenizer, row.text("text"), seq_len)
    except ModelError as error:
        raise RowError(error.message, fix=error.fix) from None
    raise RowError(row.lacks("messages", "prompt", "text"), fix=SHAPES)


def _encode_pair(row: Row, tokenizer: ChatTokenizer, seq_len: int, system_prompt: str) -> Example:
    name = row.has(*PROMPT) or ""
    completion = row.has(*COMPLETION)
    if completion is None:
        raise RowError(row.lacks(*COMPLETION), fix=SHAPES)
    if isinstance(row.fields[name], list):  # conversational: both are messages
        before = _messages_in(row, name)
        written = _messages_in(row, completion)
        return encode_chat(tokenizer, [*before, *written], seq_len, first_trained=len(before))
    system = row.text("system") if row.has("system") else system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": row.text(name)}, {"role": "assistant", "content": row.text(completion)}]
    return encode_chat(tokenizer, messages, seq_len)


def _messages_in(row: Row, name: str) -> list[dict[str, Any]]:
    """The messages in a column, without the empty fields that a table has in every row."""
    value = row.fields[name]
    if isinstance(value, str):  # JSON in a column of CSV
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            value = None
    messages = list(value) if isinstance(value, (list, tuple, np.ndarray)) else []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            problem = f"message {number + 1} of '{name}' has the role {role!r}"
            raise RowError(problem, fix=f"write messages as {{role, content}}, with the roles {', '.join(ROLES)}")
    if not messages:
        raise RowError(f"the field '{name}' is {row.fields[name]!r:.60}, and no list of messages", fix=SHAPES)
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    seq_len: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    first_trained: int = 0,
) -> Example:
    """`first_trained`: turns of the assistant before this message carry no loss."""
    tokens: list[int] = []
    is_trained: list[bool] = []
    next_unread = 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if tokens:
            read = tokenizer.encode_next_turn(messages[next_unread:place], after=tokens[-1], tools=tools)
        else:
            read = tokenizer.encode_chat(messages[:place], tools=tools)
        written = tokenizer.encode_turn(messages[: place + 1], tools=tools)
        tokens += [*read, *written]
        is_trained += [False] * len(read) + [place >= first_trained] * len(written)
        next_unread = place + 1
    if not any(is_trained):
        raise RowError("has no turn of the assistant", fix="add a message with the role assistant")
    return _cut(tokens, is_trained, seq_len)


def encode_plain(tokenizer: ChatTokenizer, text: str, seq_len: int) -> list[Example]:
    """A text and the token that ends it, in pieces of `seq_len` tokens."""
    tokens = tokenizer.encode_text(text)
    tokens = tokens if tokens[-1:] == [tokenizer.end_of_turn] else [*tokens, tokenizer.end_of_turn]
    pieces = [tokens[start : start + seq_len] for start in range(0, len(tokens), seq_len)]
    examples = [_cut(piece, [False, *[True] * (len(piece) - 1)], seq_len) for piece in pieces if len(piece) > 1]
    if len(examples) < 2:
        return examples
    document = hashlib.sha256(np.array(tokens, dtype=np.int32).tobytes()).digest()
    return [replace(example, document=document) for example in examples]


def _cut(tokens: Sequence[int], is_trained: Sequence[bool], seq_len: int) -> Example:
    """At most the first `seq_len` tokens: a chat that is too long loses its end, and the end of its turn with it."""
    example = Example(
        np.array(tokens[:seq_len], dtype=np.int32),
        np.array([False, *is_trained[1:seq_len]]),  # nothing predicts the first token
        is_cut_off=len(tokens) > seq_len,
    )
    if not example.is_trained.any():
        raise RowError(f"its prompt fills the {seq_len} tokens of a sequence", fix=f"--train.seq-len {2 * seq_len}")
    return example


# ---- files


@dataclass(frozen=True, eq=False)
class ExampleFile:
    """Examples in three arrays on disk, read by all ranks: `ExampleFile.open(Path("RUN/rows/train"))`."""

    tokens: np.ndarray
    is_trained: np.ndarray
    ends: np.ndarray  # of each example in the two others

    @classmethod
    def open(cls, folder: Path) -> ExampleFile:
        try:
            return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _FILES))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the rows of this run in {folder} cannot be read: {error}", fix="start a new run from the same data"
            ) from None

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def group(self, place: int) -> ScoredGroup:
        """An example as the training loop takes it: a group of one, with the same advantage for each trained token.

        With that the CISPO surrogate is the cross entropy: a token that counts as sampled just now has the ratio 1.
        """
        start, end = int(self.ends[place - 1]) if place else 0, int(self.ends[place])
        tokens, is_trained = self.tokens[start:end], self.is_trained[start:end]
        return ScoredGroup(
            tokens=[tokens.tolist()],
            masks=[np.where(is_trained, tokens, IGNORED).tolist()],
            scores=[1.0],
            advantages=[np.ones(len(tokens)).tolist()],
        )


def save_examples(examples: Sequence[Example], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", _joined([example.tokens for example in examples], np.int32))
    np.save(folder / "is_trained.npy", _joined([example.is_trained for example in examples], np.bool_))
    np.save(folder / "ends.npy", np.cumsum([len(example.tokens) for example in examples], dtype=np.int64))


def _joined(arrays: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=kind)


# ---- batches


def shared_start(examples: Sequence[Example]) -> float:
    """The share of all tokens that every example begins with, for example a system message."""
    num_tokens = sum(len(example.tokens) for example in examples)
    first = min((example.tokens for example in examples), key=len)
    for example in examples:
        differs = np.flatnonzero(first != example.tokens[: len(first)])
        first = first[: differs[0]] if len(differs) else first
    return len(first) * len(examples) / num_tokens


def num_steps(num_rows: int, batch_size: int, epochs: int) -> int:
    """
    >>> num_steps(10, 4, epochs=2)
    5
    """
    return -(-num_rows * epochs // batch_size)


def rows_of_step(step: int, num_rows: int, batch_size: int, *, end: int, seed: int) -> list[int]:
    """The rows of step `step`, counted from 1. `end`: number of rows of all steps; the last batch may be smaller."""
    places = range((step - 1) * batch_size, min(step * batch_size, end))
    return [int(_order(seed, place // num_rows, num_rows)[place % num_rows]) for place in places]


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng(stable_seed("rows", seed, epoch)).permutation(num_rows)
