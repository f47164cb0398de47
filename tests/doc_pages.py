"""Read README.md, docs/ and recipes/ as a user does: the commands, the snippets, the links and the names in them.

A block that is not run says why in a comment right before it: <!-- not run: it needs a GPU -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHELLS = ("bash", "sh", "console")
PROGRAMS = ("treadle", "run-api", "curl", "pip", "python", "torchrun")  # what a command of these pages begins with
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- not run: (?P<reason>.+?) -->\s*\Z")
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LOOKS_LIKE_COMMAND = re.compile(rf"^\s*(?:\$ )?(?:\./|(?:{'|'.join(PROGRAMS)}) )", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command line. `shown` is what the page prints after it, `reason` why it is not run."""

    where: str
    line: str
    reason: str = ""
    shown: str = ""

    @cached_property
    def words(self) -> list[str]:
        """Without comments, redirections and what follows a pipe."""
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;<>"):
                return words[:-1] if words and words[-1] in ("1", "2") else words
            words.append(word)
        return words


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line_number: int
    language: str
    text: str
    reason: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line_number}"

    @property
    def commands(self) -> list[Command]:
        """Of a console, lines after `$ `, and what they printed; else every line."""
        found: list[Command] = []
        if self.language not in SHELLS:
            return found
        is_console = self.language == "console"
        for number, line in enumerate(re.sub(r"\\\n *", "", self.text).splitlines(), start=self.line_number + 1):
            where = f"{self.page}:{number}"
            if is_console and not line.startswith("$ "):
                last = found.pop()
                found.append(Command(last.where, last.line, last.reason, f"{last.shown}{line}\n"))
            elif line.strip() and not line.lstrip().startswith("#"):
                found.append(Command(where, line.removeprefix("$ ").strip(), self.reason))
        return found


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in _FENCE.finditer(self.text):
            mark = _MARK.search(self.text[: match.start()])
            line_number = self.text.count("\n", 0, match.start()) + 1
            reason = mark["reason"] if mark else ""
            found.append(Block(self.name, line_number, match["language"], match["text"], reason))
        return found

    @cached_property
    def prose(self) -> str:
        """The page without its fenced blocks."""
        return _FENCE.sub("", self.text)

    def section(self, title: str) -> str:
        """What follows a heading, up to the next one."""
        return re.split(rf"(?m)^#+ {re.escape(title)}$", self.text)[1].split("\n#")[0]

    @property
    def spans(self) -> list[str]:
        """What stands between single backquotes."""
        return spans_of(self.prose)

    @property
    def commands_in_prose(self) -> list[Command]:
        """Those in sentences and tables; they may be fragments."""
        first_words = ("treadle ", "run-api", "curl ", "pip ")
        return [Command(self.name, span) for span in self.spans if span.startswith(first_words)]

    @property
    def links(self) -> list[str]:
        return [target for target in _LINK.findall(self.prose) if "://" not in target]

    @property
    def anchors(self) -> set[str]:
        """As GitHub makes them of headings."""
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(self.prose)}

    @property
    def hidden_commands(self) -> list[str]:
        """Commands in blocks without a language, or in indented ones: nothing would look at them."""
        fenced = [block.text for block in self.blocks if not block.language]
        indented = re.findall(r"(?:^    .*\n)+", self.prose, re.MULTILINE)
        return [text for text in [*fenced, *indented] if _LOOKS_LIKE_COMMAND.search(text)]


def spans_of(text: str) -> list[str]:
    return [" ".join(span.split()) for span in _SPAN.findall(text)]


def read_pages() -> list[Page]:
    return [
        Page(path)
        for path in (
            ROOT / "README.md",
            *sorted((ROOT / "docs").glob("*.md")),
            *sorted((ROOT / "recipes").rglob("*.md")),
        )
    ]
