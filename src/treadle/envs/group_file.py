"""Write and read files of groups: one JSON object per line with Atropos' group fields and further details.

Each line is flushed, so the file of a killed process is readable except, at worst, for its last line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from treadle.envs.base import Item
from treadle.envs.rollout import Rollout
from treadle.errors import ConfigError
from treadle.wire.groups import ScoredGroup

Decode = Callable[[Sequence[int]], str]

_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Verdict(msgspec.Struct, kw_only=True):
    """The score of one sequence and its reasons."""

    rollout: int  # several sequences may belong to one rollout
    is_right: bool
    reward: float | None  # None: it could not be scored; its score in the group is the others' mean
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    outcome: str = "scored"
    error: str = ""
    finish_reason: str = "stop"


class WrittenGroup(ScoredGroup, kw_only=True):
    """A line of the file. Other programs write only the fields of ScoredGroup."""

    answer: str = ""
    verdicts: list[Verdict] = msgspec.field(default_factory=list)  # one per sequence
    # per sequence: the text of each sampled token, "" within a character
    pieces: list[list[str]] = msgspec.field(default_factory=list)


class GroupFile(AbstractContextManager["GroupFile"]):
    """Opens a new file; one that exists is never touched: `data/gsm8k.jsonl`, then `data/gsm8k_1.jsonl`."""

    def __init__(self, wanted: Path) -> None:
        if wanted.is_dir():
            raise ConfigError(f"{wanted} is a folder", fix=f"name a file: {wanted / 'groups.jsonl'}")
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            self.path = wanted.with_stem(f"{wanted.stem}_{number}") if number else wanted
            if self.page.exists():
                continue
            try:
                self._file = self.path.open("xb")
            except FileExistsError:
                continue
            return

    @property
    def page(self) -> Path:
        """The HTML file beside it."""
        return self.path.with_suffix(".html")

    def write(self, group: ScoredGroup) -> None:
        self._file.write(msgspec.json.encode(group) + b"\n")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_group_file(path: Path) -> Iterator[WrittenGroup]:
    """Read the groups of a file. A truncated last line is skipped; any other invalid line is an error."""
    decoder = msgspec.json.Decoder(WrittenGroup)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    return
                problem = f"line {number} of {path} is no group: {error}"
                raise ConfigError(problem, fix="name a file that holds a group in each line") from None


def as_written(group: ScoredGroup, item: Item, rollouts: Sequence[Rollout], decode: Decode) -> WrittenGroup:
    """Add the verdicts and token texts of `rollouts` to the group that was built from them."""
    pairs = [(i, rollout, transcript) for i, rollout in enumerate(rollouts) for transcript in rollout.transcripts]
    return WrittenGroup(
        **{field: getattr(group, field) for field in group.__struct_fields__},
        answer=item.answer,
        verdicts=[
            Verdict(
                rollout=i,
                is_right=rollout.score.is_right,
                reward=rollout.score.reward,
                parts=dict(rollout.score.parts),
                outcome=rollout.score.outcome,
                error=rollout.score.error,
                finish_reason=transcript.finish_reason,
            )
            for i, rollout, transcript in pairs
        ],
        pieces=[split_text([token for token in mask if token >= 0], decode) for mask in group.masks],
    )


def split_text(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds. A token that ends within a character adds "".

    Each token is decoded together with the one before it, because some tokenizers decode a first token differently.
    """
    pieces: list[str] = []
    context, done = 0, 0  # decoded from `context` on; the text up to `done` has been given out
    for place in range(len(token_ids)):
        known = decode(token_ids[context:done])
        text = decode(token_ids[context : place + 1])
        if text.endswith(_HALF_A_CHARACTER) and place + 1 < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        context, done = done, place + 1
    return pieces
