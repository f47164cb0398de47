"""Make command-line flags from the typed configuration: one definition of a setting, two ways to give it.

Sections given with a prefix take dotted flags (`--train.lr 1e-5`, `--env.group_size 4`); the section given without one
takes plain flags. Dashes and underscores are the same; a boolean alone means true (`--train.lora`), and takes a value
(`--train.normalize-std false`). --help shows a `Guide`: what a command does, examples and the most used flags.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from treadle.config.atropos import SHORTHANDS
from treadle.config.cluster import Scheduler
from treadle.config.files import RUN_SECTIONS, SECTIONS
from treadle.config.load import suggest
from treadle.config.schema import RunConfig
from treadle.config.section import default_text_of, spellings_of

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


# ---- the parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class _GuideAction(argparse.Action):
    """Prints the guide and ends, as argparse's own help does."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, guide: Guide, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._guide = guide

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        sys.stdout.write(self._guide.render(parser.prog, parser._actions))
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """argparse without guessing: no abbreviations, and an unknown flag is answered with the nearest known one.

    --help-all lists every flag; --help does so too, unless there is a guide for it to show.
    """

    def __init__(self, *, guide: Guide | None = None, **kwargs: Any) -> None:
        if guide is not None:
            kwargs |= {"usage": f"{kwargs['prog']} {guide.usage}", "description": guide.about}
        super().__init__(allow_abbrev=False, formatter_class=_Help, add_help=False, **kwargs)
        if guide is None:
            self.add_argument("-h", "--help", "--help-all", action="help", help="every flag")
        else:
            self.add_argument("-h", "--help", action=_GuideAction, guide=guide, help="what most people need")
            self.add_argument("--help-all", action="help", help="every flag")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        values, unknown = self.parse_known(sys.argv[1:] if args is None else args, namespace)
        self.refuse(unknown)
        return values

    def parse_known(self, words: Sequence[str], namespace: Any = None) -> tuple[Any, list[str]]:
        """The values, and the words that are no flags of this parser's: somebody else's, or mistakes (`refuse`)."""
        return self.parse_known_args([_dashed(word) for word in words], namespace)

    def refuse(self, unknown: Sequence[str]) -> None:
        for word in unknown:
            if word.startswith("--"):
                flag = word.split("=")[0]
                self.error(f"unknown flag {flag}; {self._nearest(flag) or 'see --help'}")
        if unknown:
            self.error(f"unexpected argument '{unknown[0]}'; see --help")

    def _nearest(self, flag: str) -> str:
        """`--lr` is near `--train.lr`: the section is what is left out most often."""
        name = flag.removeprefix("--")
        known = [option.removeprefix("--") for option in self._option_string_actions]
        in_a_section = [option for option in known if option.rpartition(".")[2] == name]
        near = f"did you mean '{in_a_section[0]}'?" if in_a_section else suggest(name, known)
        return near.replace("mean '", "mean '--")

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(2)


def add_flags(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    *,
    prefix: str = "",
    dotted: bool = False,
    only: Collection[str] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add one flag per field of `model`; its value lands under `prefix + field` in `given()`. `only`: of these fields;
    `defaults`: what the verb takes instead of the field's own default, in words.

    The help shows a group for each class that the fields come from: the model's own first, then its bases as listed.
    """
    by_class = _by_class(model)
    section = prefix.rstrip(".") if dotted else ""
    for kind, fields in by_class.items():
        group: argparse._ActionsContainer = parser
        if kind is not model:
            topic = kind.__name__.removesuffix("Options").lower()
            group = parser.add_argument_group(f"{section}: {topic}" if section else topic, kind.__doc__)
        elif section:
            group = parser.add_argument_group(section, kind.__doc__)
        elif len(by_class) > 1:
            group = parser.add_argument_group("the run")
        for name, field in fields.items():
            if only and name not in only:
                continue
            default = defaults.get(name, "")
            _add_flag(group, name, field, flag_prefix=prefix if dotted else "", key=prefix + name, default=default)
    if model is SECTIONS["train"]:
        _add_shorthands(parser, prefix=prefix, dotted=dotted)


def _add_shorthands(parser: argparse.ArgumentParser, *, prefix: str, dotted: bool) -> None:
    title = f"{prefix.rstrip('.')}: shorthands" if dotted else "shorthands"
    group = parser.add_argument_group(title, "Flags that set other flags: those of Atropos, and DeepSpeed's file.")
    for name, shorthand in SHORTHANDS.items():
        takes: dict[str, Any] = {"nargs": "?", "const": "true"} if "|" in shorthand.metavar else {}
        flag = f"--{prefix if dotted else ''}{name}".replace("_", "-")
        group.add_argument(
            flag, dest=prefix + name, default=argparse.SUPPRESS, metavar=shorthand.metavar, help=shorthand.help, **takes
        )


def _by_class(model: type[BaseModel]) -> dict[type[BaseModel], dict[str, FieldInfo]]:
    """The fields that are no sections, under the class that declares them."""
    classes = [kind for kind in model.__mro__ if issubclass(kind, BaseModel) and kind is not BaseModel]
    # The classes come from the model down to what it is made of: the last that knows a field declares it.
    owners = {name: kind for kind in classes for name in kind.model_fields}
    fields: dict[type[BaseModel], dict[str, FieldInfo]] = {kind: {} for kind in classes}
    for name, field in model.model_fields.items():
        if not _is_section(field):
            fields[owners[name]][name] = field
    return {kind: found for kind, found in fields.items() if found}


def _add_flag(
    group: argparse._ActionsContainer, name: str, field: FieldInfo, *, flag_prefix: str, key: str, default: str
) -> None:
    flags = [f"--{flag_prefix}{spelling}".replace("_", "-") for spelling in spellings_of(name)]
    default = default or default_text_of(field) or _as_typed(field.default)
    group.add_argument(
        *flags,
        dest=key,
        default=argparse.SUPPRESS,
        **_values_taken(field),
        metavar=_metavar(name, field),
        help=(field.description or "").replace("%", "%%") + _choices(field) + (default and f" (default: {default})"),
    )


def given(values: argparse.Namespace) -> dict[str, Any]:
    """The flags the user really gave: {"train.lr": "1e-5"}; "None" means empty, as Atropos' clients write it."""
    return {key: _plain(value) for key, value in vars(values).items() if not key.startswith("_")}


def _plain(value: Any) -> Any:
    text = " ".join(value) if isinstance(value, list) else value
    return None if text == "None" else text


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _plain_kind(kind: Any) -> Any:
    """The type of a value, where there is one: `Annotated[float, ...] | None` is a float."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, UnionType):
            kind = next(other for other in get_args(kind) if other is not NoneType)
        else:
            return kind


def _choices(field: FieldInfo) -> str:
    """The values a setting can have, where they can be listed."""
    kind = _plain_kind(field.annotation)
    return f": {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else ""


def _metavar(name: str, field: FieldInfo) -> str:
    """What to put there: `--normalize-std [TRUE|FALSE]`, `--steps N`, `--lr X`, `--metrics-file FILE`."""
    kind, last_word = _plain_kind(field.annotation), name.rpartition("_")[2].upper()
    if get_origin(kind) is tuple:
        return {int: "RANGE", float: "X"}.get(_plain_kind(get_args(kind)[0]), "URL" if last_word == "URL" else "NAME")
    if get_origin(kind) is Literal:
        return "NAME"
    if kind is Path:
        return last_word if last_word in ("FILE", "PATH") else "PATH"
    return {bool: "TRUE|FALSE", int: "N", float: "X"}.get(kind, last_word)


def _values_taken(field: FieldInfo) -> dict[str, Any]:
    """Several words may follow a list (`--lora-target-modules q_proj v_proj`), none need follow a boolean."""
    kind = _plain_kind(field.annotation)
    if get_origin(kind) is tuple:
        return {"nargs": "+"}
    return {"nargs": "?", "const": "true"} if kind is bool else {}


def _as_typed(value: Any) -> str:
    """A value as its flag takes it; "" for none."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def _is_section(field: FieldInfo) -> bool:
    """Also of several sections, which files have and flags do not."""
    kind = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else field.annotation
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


def add_run_flags(parser: FlagParser, words: Sequence[str]) -> None:
    """Add the flags of a whole run: plain ones for its own settings, dotted ones for those of its processes.

    Flags of one of several environments (`--envs.1.args`) are added for the numbers that occur in `words`.
    """
    add_flags(parser, RunConfig)
    parser.add_argument(
        "--env", dest="env", default=argparse.SUPPRESS, metavar="NAMES",
        help="the environment, or several by weight: gsm8k:0.7,arithmetic:0.3; --env.X is then for all of them, "
        "--envs.0.X for the first",
    )  # fmt: skip
    parser.add_argument(
        "--router", dest="router.kind", default=argparse.SUPPRESS, metavar="NAME",
        help="what requests to several engines go through: none, smg",
    )  # fmt: skip
    parser.add_argument(
        "--on", dest="cluster.scheduler", default=argparse.SUPPRESS, metavar="NAME",
        help=f"where it runs: {', '.join(get_args(Scheduler))}",
    )  # fmt: skip
    parser.add_argument(
        "--address", dest="cluster.address", default=argparse.SUPPRESS, metavar="HOST:PORT",
        help="with --on ray: a cluster that runs; auto: that of this machine",
    )  # fmt: skip
    for name, section in RUN_SECTIONS.items():
        add_flags(parser, section, prefix=f"{name}.", dotted=True)
    places = {found[1] for word in words if (found := re.match(r"--envs\.(\d+)\.", word))}
    for place in sorted(places, key=int):
        add_flags(parser, SECTIONS["env"], prefix=f"envs.{place}.", dotted=True)
