"""Files and flag values -> RunConfig, with errors that name the key, the value and the remedy."""

from __future__ import annotations

import difflib
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from treadle.config.schema import RunConfig
from treadle.config.secret_settings import restore_secrets, without_secrets
from treadle.config.sync import FIND_BRIDGE_FILE
from treadle.config.train import MISMATCHES, OBJECTIVES
from treadle.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def load_run(path: Path | None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a file (TOML, YAML, saved JSON) and lay `overrides` ({"train.lr": "1e-5"}) over it.

    >>> load_run(None, {"env.group_size": "4"}).env.group_size
    4
    """
    values = _read(path.expanduser()) if path else {}
    restore_secrets(values, os.environ)
    _make_room_for_names(values, overrides or {})
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"'{section}' is {place!r} in {path}", fix=f"write its settings below [{section}]")
        place[key] = value
    return parse(RunConfig, values, source=str(path) if path else "the command line")


def _make_room_for_names(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """A name given over a file sets what it stands for: the file's own values of those settings step back."""
    saved = values.get("train")
    if not isinstance(saved, dict):
        return
    for name, table in (("objective", OBJECTIVES), ("mismatch", MISMATCHES)):
        for setting in table.get(str(overrides.get(f"train.{name}")), {}):
            saved.pop(setting, None)


def with_absolute_paths(section: T) -> T:
    """The same settings with the paths that were given made absolute: the processes, and a resume, may be started in
    another folder."""
    found: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found[name] = with_absolute_paths(value)
        elif isinstance(value, Path) and value != FIND_BRIDGE_FILE:
            found[name] = value.expanduser().absolute()
    return section.model_copy(update=found)


def save_run(run: RunConfig, path: Path) -> None:
    """Write the resolved configuration without its secrets: JSON, which otherwise reads back to the same value."""
    replace_text(path, json.dumps(without_secrets(run.model_dump(mode="json")), indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; only its owner may read it."""
    staging = path.with_name(f".{path.name}.partial")
    staging.touch(mode=0o600)
    staging.write_text(text, encoding="utf-8")
    staging.replace(path)


def parse(model: type[T], values: Mapping[str, Any], *, source: str) -> T:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        message, fix = _first_problem(model, error, source)
        raise ConfigError(message, fix=fix) from None


def suggest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'group_size'?`, or "" when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(
            f"cannot read the configuration {path}: {problem}", fix="name another file, or fix this one"
        ) from None
    if path.suffix in (".yaml", ".yml"):
        from treadle.config.env_file import read_yaml

        values, notes = read_yaml(text, str(path))
        sys.stderr.writelines(f"{note}\n" for note in notes)
        return values
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be parsed: {error}", fix="correct that line") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings", fix='write a JSON object: {"env": {"group_size": 8}}')
    return values


def _first_problem(model: type[BaseModel], error: ValidationError, source: str) -> tuple[str, str]:
    """One problem at a time, in words: (what is wrong, what to do)."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    dotted = ".".join(place)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        hint = suggest(place[-1], known)
        return f"unknown key '{dotted}' in {source}", hint or f"known keys: {', '.join(sorted(known))}"
    if problem["type"] == "value_error":
        return f"{source}: {problem['msg'].removeprefix('Value error, ')}", ""
    flag = "--" + dotted.replace("_", "-")
    return f"'{dotted}' is {problem['input']!r} in {source}: {problem['msg'].lower()}", f"correct {flag}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for name in path:
        field = model.model_fields.get(name)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
