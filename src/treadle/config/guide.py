"""The help that somebody reads first: what a command does, examples, and the few flags that most people need."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NARROWEST = 60
WIDEST_FLAG = 30
_KEPT = "\0"  # a space that no line ends at


@dataclass(frozen=True)
class Guide:
    """`flags`: the most used ones, under headings; `examples`: what is typed -> what it does."""

    usage: str
    about: str
    examples: Mapping[str, str]
    flags: Mapping[str, tuple[str, ...]]

    def render(self, prog: str, actions: Sequence[argparse.Action]) -> str:
        """The help as text, for a parser that has these actions."""
        width = max(NARROWEST, shutil.get_terminal_size().columns) - 2
        known = {spelling: action for action in actions for spelling in action.option_strings}
        shown = {heading: [(flag, known[flag]) for flag in flags] for heading, flags in self.flags.items()}
        num_flags = sum(bool(action.option_strings) for action in actions)
        column = min(WIDEST_FLAG, max(len(_typed(*one)) for group in shown.values() for one in group))
        lines = [f"usage: {prog} {self.usage}", "", *textwrap.wrap(self.about, width), "", "examples:"]
        lines += _examples(self.examples, width)
        for heading, group in shown.items():
            lines += ["", f"{heading}:"]
            lines += [line for flag, action in group for line in _flag(flag, action, column, width)]
        lines += ["", *textwrap.wrap(f"{prog} --help-all lists all {num_flags} flags.", width)]
        return "\n".join(lines) + "\n"


def _examples(examples: Mapping[str, str], width: int) -> list[str]:
    column = max(map(len, examples))
    if column + max(map(len, examples.values())) + 6 <= width:
        return [f"  {command:<{column}}  # {what}" for command, what in examples.items()]
    return [line for command, what in examples.items() for line in (f"  # {what}", f"  {command}")]


def _flag(flag: str, action: argparse.Action, column: int, width: int) -> list[str]:
    """The help text up to its first semicolon, wrapped beside the flag; --help-all shows the rest."""
    typed = _typed(flag, action)
    said = _said(action).replace("(default: ", f"(default:{_KEPT}")
    text = textwrap.wrap(said, width - column - 4, break_long_words=False, break_on_hyphens=False)
    text = [line.replace(_KEPT, " ") for line in text]
    first, *more = text if len(typed) <= column else ["", *text]
    return [f"  {typed:<{column}}  {first}".rstrip(), *(f"  {'':<{column}}  {line}" for line in more)]


def _typed(flag: str, action: argparse.Action) -> str:
    """A boolean needs no value: `--train.lora`; a value that may be left out is in brackets: `--resume [RUN]`."""
    if not action.metavar or action.const == "true":
        return flag
    return f"{flag} [{action.metavar}]" if action.nargs == "?" else f"{flag} {action.metavar}"


def _said(action: argparse.Action) -> str:
    """The help text and the default."""
    words, mark, default = (action.help or "").replace("%%", "%").partition(" (default: ")
    return words.partition(";")[0] + mark + default
