"""Flags made from the typed configuration: one definition of a setting, two ways to give it.

Sections given with a prefix take dotted flags (`--train.lr 1e-5`, `--env.group_size 4`); the section given without one
takes plain flags. Dashes and underscores are the same; booleans take a value (`--train.normalize-std false`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from treadle.config.load import suggest


class FlagParser(argparse.ArgumentParser):
    """argparse without guessing: no abbreviations, and an unknown flag is answered with the nearest known one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = [_dashed(word) for word in (sys.argv[1:] if args is None else args)]
        values, unknown = self.parse_known_args(given, namespace)
        for word in unknown:
            if word.startswith("--"):
                flag = word.split("=")[0]
                self.error(f"unknown flag {flag}; {self._nearest(flag) or 'see --help'}")
        if unknown:
            self.error(f"unexpected argument '{unknown[0]}'; see --help")
        return values

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
    parser: argparse.ArgumentParser, model: type[BaseModel], *, prefix: str = "", dotted: bool = False
) -> None:
    """Add one flag per field of `model`; its value lands under `prefix + field` in `given()`."""
    group = parser.add_argument_group(prefix.rstrip(".") or "options") if dotted else parser
    for name, field in model.model_fields.items():
        if _is_section(field):
            continue
        spellings = [name, *_extra_spellings(field)]
        flags = [f"--{prefix if dotted else ''}{s}".replace("_", "-") for s in spellings]
        default = "" if field.default is None else f" (default: {field.default})"
        group.add_argument(
            *flags,
            dest=prefix + name,
            default=argparse.SUPPRESS,
            nargs="+" if _is_list(field) else None,
            metavar=name.rsplit("_", maxsplit=1)[-1].upper(),
            help=(field.description or "").replace("%", "%%") + _choices(field) + default,
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


def _extra_spellings(field: FieldInfo) -> list[str]:
    extra = field.json_schema_extra
    return [str(s) for s in extra.get("flags", [])] if isinstance(extra, dict) else []  # type: ignore[union-attr]


def _choices(field: FieldInfo) -> str:
    """The values a setting can have, where they can be listed."""
    if get_origin(field.annotation) is Literal:
        return f": {', '.join(map(str, get_args(field.annotation)))}"
    return ": true or false" if field.annotation is bool else ""


def _is_list(field: FieldInfo) -> bool:
    """Several words may follow the flag: `--lora-target-modules q_proj v_proj`."""
    kinds = (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) is tuple for kind in kinds)


def _is_section(field: FieldInfo) -> bool:
    kind = field.annotation
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)
