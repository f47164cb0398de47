"""Load and save a RunConfig; errors name the key, the value and the fix. values.py reads and changes it."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from treadle.config.atropos import SHORTHANDS, expand_shorthands
from treadle.config.env import EnvConfig, labels_of, parse_environments
from treadle.config.files import (
    RUN_SECTIONS,
    SECTIONS,
    VARIABLE,
    names_in,
    read_file,
    require_secrets,
    restore_secrets,
    with_our_names,
    without_secrets,
)
from treadle.config.schema import RunConfig
from treadle.config.section import SHARED_BY, set_value
from treadle.config.sync import FIND_BRIDGE_FILE
from treadle.config.train import MISMATCHES, OBJECTIVES
from treadle.errors import ConfigError

DERIVED = "derived"  # in a run's config.json: values that the launcher chose for this one run, such as its ports
_UNUSED_BY_SFT = (
    "max_age", "hub_url", "engine_url", "engines", "env", "envs", "hub", "engine", "router", "openai", "cluster",
)  # fmt: skip
OF_STAGE = ("model", "steps", "seed", "output", "train")  # settings that an [sft] table may have for itself
T = TypeVar("T", bound=BaseModel)


def load_run(
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    with_derived: bool = True,
    spreads: bool = False,
    is_supervised: bool = False,
    source: str = "the command line",
) -> RunConfig:
    """Read a file (TOML, YAML, saved JSON) and lay `overrides` ({"train.lr": "1e-5"}) over it.

    The override "env" names the environments ("gsm8k:0.7,arithmetic:0.3", or a list of names without weights); with
    several, "env.X" is set in all of them, and "envs.1.X" in the second. An environment with several `processes`
    becomes as many environments with a part of its items each.

    `with_derived`: also the derived values of a saved run, which its own processes need and a new run must not have.
    `is_supervised`: for `treadle sft`, whose settings in the [sft] table replace those of the file.
    `spreads`: for one process alone: settings of the whole run in the file (`model`, `hub_url`, ...) also set those of
    the sections, and its environment stays one.
    `source`: where the overrides come from, in words.

    >>> load_run(None, {"env.group_size": "4"}).env.group_size
    4
    """
    values: dict[str, Any] = {}
    if path is not None:
        found = read_file(path.expanduser())
        if path.suffix == ".json":
            found = merge_derived(found) if with_derived else {key: found[key] for key in found if key != DERIVED}
        values, notes = with_our_names(_with_stage(found, is_used=is_supervised), path)
        sys.stderr.writelines(f"{note}\n" for note in notes)
        expand_shorthands(values.get("train", {}))
        if spreads:
            _spread(values)
    restore_secrets(values, os.environ)
    overrides = dict(overrides or {})
    _make_room_for_names(values, overrides)
    if "env" in overrides:
        _choose_environments(values, overrides.pop("env"), overrides)
    for dotted, value in sorted(overrides.items(), key=lambda item: item[0].startswith("envs.")):  # after those of all
        section, _, key = dotted.rpartition(".")
        if section == "env" and "envs" in values:
            values["envs"] = [{**table, key: value} for table in values["envs"]]
        else:
            _check_place(dotted, len(values.get("envs", ())))
            set_value(values, dotted, value)
    expand_shorthands(values.get("train", {}))
    run = parse(RunConfig, values, source=str(path) if path else source)
    if spreads or all(env.processes == 1 for env in run.environments):
        return run
    tables = values.pop("envs", None) or [values.pop("env", {})]
    return parse(
        RunConfig, values | {"envs": _one_table_per_process(run, tables)}, source=str(path) if path else source
    )


def _one_table_per_process(run: RunConfig, tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The [[env]] tables of a run whose environments have several processes: they divide items and weight, and the
    first one evaluates for all."""
    divided = []
    for env, label, table in zip(run.environments, labels_of(run.environments), tables, strict=True):
        total = env.processes
        shared: dict[str, Any] = {"processes": 1, "inference_weight": env.inference_weight / total}
        if env.min_batch_allocation is not None:
            shared["min_batch_allocation"] = env.min_batch_allocation / total
        divided.append(table | (shared | {"items": f"1/{total}"} if total > 1 else {}))
        divided += [
            table | shared | {"items": f"{number}/{total}", "wandb_name": f"{label}-{number}", "num_eval": 0}
            for number in range(2, total + 1)
        ]
    return divided


def _with_stage(found: dict[str, Any], *, is_used: bool) -> dict[str, Any]:
    """Take the settings for `treadle sft` alone out of the [sft] table, and use them or leave them out.

    >>> _with_stage({"steps": 15, "sft": {"steps": 40, "train": {"lr": 3e-4}, "epochs": 1}}, is_used=True)
    {'steps': 40, 'sft': {'epochs': 1}, 'train': {'lr': 0.0003}}
    """
    table = found.get("sft")
    if not isinstance(table, dict):
        return found
    own = {name: table[name] for name in OF_STAGE if name in table}
    rest = found | {"sft": {name: value for name, value in table.items() if name not in own}}
    if not is_used:
        return rest
    train, replaced = own.get("train"), found.get("train", {})
    if isinstance(train, dict) and isinstance(replaced, dict):
        given = {_field_of(SECTIONS["train"], name) for name in train}  # in either spelling
        own["train"] = {
            k: value for k, value in replaced.items() if _field_of(SECTIONS["train"], k) not in given
        } | train
    return rest | own


def _spread(values: dict[str, Any]) -> None:
    """Copy the settings of the whole run to the sections that do not have their own (`SHARED_BY`)."""
    for name, places in SHARED_BY.items():
        if values.get(name) in (None, ""):  # the run chooses it, or starts the server itself
            continue
        for section, key in (place.split(".") for place in places):
            if (section, key) == ("train", "max_age") and _is_stream(values):
                continue  # the trainer waits for waves only
            has_several = section == "env" and "envs" in values
            for table in values["envs"] if has_several else [values.setdefault(section, {})]:
                table.setdefault(key, values[name])


def _is_stream(values: dict[str, Any]) -> bool:
    tables = values.get("envs") or [values.get("env", {})]
    return all(table.get("pace") == "stream" for table in tables)


def _check_place(dotted: str, num_environments: int) -> None:
    """Refuse a setting of an environment that the run does not have: "envs.2.args" of two."""
    section, _, key = dotted.rpartition(".")
    name, _, place = section.partition(".")
    if name != "envs" or (place.isdecimal() and int(place) < num_environments):
        return
    flag = "--" + dotted.replace("_", "-")
    setting = key.replace("_", "-")
    if num_environments == 0:
        raise ConfigError(f"{flag} is for one of several environments, and this run has one", fix=f"--env.{setting}")
    raise ConfigError(
        f"{flag} is of no environment: this run has {num_environments}, counted from 0",
        fix=f"--envs.{num_environments - 1}.{setting} is that of the last one",
    )


def load_process(path: Path | None, overrides: Mapping[str, Any], *sections: str) -> RunConfig:
    """Load the configuration of one process, which reads these sections, with their secrets."""
    run = load_run(path, overrides, spreads=True)
    require_secrets(run.model_dump(mode="json"), *sections)
    os.environ.pop(VARIABLE, None)  # programs that this process starts do not need it
    return run


def dotted_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keyword arguments -> overrides for `load_run`. A section's setting may be given without its section
    where only one has it, and in any spelling that its flag has.

    >>> dotted_keys({"learning_rate": 1e-5, "train": {"batch-size": 8}, "steps": 3})
    {'train.lr': 1e-05, 'train.batch_size': 8, 'steps': 3}
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if not section and key in SECTIONS and isinstance(value, Mapping):
            found |= {f"{key}.{_field_of(SECTIONS[key], str(inner))}": one for inner, one in value.items()}
        elif section in SECTIONS:
            found[f"{section}.{_field_of(SECTIONS[section], name)}"] = value
        else:
            found[_whole_key(key)] = value
    return found


def _whole_key(name: str) -> str:
    """ "batch_size" -> "train.batch_size". One of several sections stays as it is, to be refused with all of them."""
    spelt = name.replace("-", "_")
    if spelt in names_in(RunConfig):
        return names_in(RunConfig)[spelt]
    places = [
        f"{section}.{names[spelt]}" for section, kind in RUN_SECTIONS.items() if spelt in (names := names_in(kind))
    ]
    return places[0] if len(places) == 1 else name


def _field_of(section: type[BaseModel], name: str) -> str:
    return names_in(section).get(name.replace("-", "_"), name)


def _choose_environments(values: dict[str, Any], named: str | list[str], overrides: Mapping[str, Any]) -> None:
    """Make the environment tables of `--env gsm8k:0.7,arithmetic:0.3`, or of a list of names, which are not split.

    A name of an [[env]] table of the file keeps that table; the settings of a single [env] table go to all.
    """
    if "env.name" in overrides:
        raise ConfigError(f"--env {named} and --env.name {overrides['env.name']} are both given", fix="give only --env")
    tables, common = values.pop("envs", []), values.pop("env", {})
    configs = [parse(EnvConfig, table, source=f"[[env]] table {n}") for n, table in enumerate(tables, start=1)]
    times = Counter(config.name for config in configs)
    known = {config.name: table for config, table in zip(configs, tables, strict=True) if times[config.name] == 1}
    known |= dict(zip(labels_of(configs), tables, strict=True))
    chosen = []
    for name, weight in parse_environments(named) if isinstance(named, str) else [(name, "") for name in named]:
        table = dict(known[name]) if name in known else {**common, "name": name}
        chosen.append(table | ({"inference_weight": weight} if weight else {}))
    values |= {"envs": chosen} if len(chosen) > 1 else {"env": chosen[0]}


def _make_room_for_names(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    """A name given over a file sets what it stands for: the file's own values of those settings step back. So do those
    that a ds_config.json given over the file sets."""
    saved = values.get("train", {})
    for name, table in (("objective", OBJECTIVES), ("mismatch", MISMATCHES)):
        for setting in table.get(str(overrides.get(f"train.{name}")), {}):
            saved.pop(setting, None)
    given = {key.removeprefix("train."): value for key, value in overrides.items() if key.startswith("train.")}
    if given.get("deepspeed_config") is not None:
        num_ranks = {"ranks": saved["ranks"]} if "ranks" in saved else {}
        others = {name: value for name, value in given.items() if name not in SHORTHANDS}
        beside = {**num_ranks, **others, "deepspeed_config": overrides.pop("train.deepspeed_config")}
        expand_shorthands(beside)
        overrides |= {f"train.{name}": value for name, value in beside.items()}


def with_absolute_paths(section: T) -> T:
    """The same settings with the paths that were given made absolute: the processes, and a resume, may be started in
    another folder."""
    found: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found[name] = with_absolute_paths(value)
        elif name == "envs":
            found[name] = tuple(map(with_absolute_paths, value))
        elif isinstance(value, Path) and value != FIND_BRIDGE_FILE:
            found[name] = value.expanduser().absolute()
    return section.model_copy(update=found)


def sections_left_out(run: RunConfig) -> set[str]:
    """Settings at the top that mean nothing in this run: with [[env]] tables [env], and those of the other stage."""
    return set(_UNUSED_BY_SFT) if run.is_supervised else {"sft", "env" if run.envs else "envs"}


def save_run(run: RunConfig, path: Path, derived: Iterable[str] = ()) -> None:
    """Write the resolved configuration without its secrets: JSON, which otherwise reads back to the same value.

    `derived`: keys ("hub.port") whose values the launcher chose for this run. A new run from this file ignores them.
    """
    settings = without_secrets(run.model_dump(mode="json", exclude=sections_left_out(run)))
    own: dict[str, Any] = {"envs": [{} for _ in run.envs]} if run.envs else {}
    for dotted in sorted(derived):
        section, _, key = dotted.rpartition(".")
        name, _, place = section.partition(".")
        if place:  # one of several environments
            own[name][int(place)][key] = settings[name][int(place)].pop(key)
        else:
            own.setdefault(name, {})[key] = settings[name].pop(key)
    replace_text(path, json.dumps(settings | {DERIVED: own}, indent=2) + "\n")


def merge_derived(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a run's config.json, with the derived values among the settings."""
    values = {key: value for key, value in saved.items() if key != DERIVED}
    derived = saved.get(DERIVED)
    for section, own in derived.items() if isinstance(derived, dict) else ():
        settings = values.get(section, {})
        if isinstance(own, dict) and isinstance(settings, dict):
            values[section] = {**own, **settings}
        elif isinstance(own, list) and isinstance(settings, list):
            values[section] = [{**first, **second} for first, second in zip(own, settings, strict=True)]
    return values


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


def _first_problem(model: type[BaseModel], error: ValidationError, source: str) -> tuple[str, str]:
    """One problem at a time, in words: (what is wrong, what to do)."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    if place[:1] == ["envs"] and len(place) > 1:  # of several environments
        source, place = f"[[env]] table {int(place[1]) + 1} of {source}", ["env", *place[2:]]
    dotted = ".".join(place)
    if problem["type"] == "extra_forbidden":
        hint = _nearest_key(model, place)
        return f"unknown key '{dotted}' in {source}", hint or "treadle run --help-all lists all settings"
    if problem["type"] == "value_error":
        return f"{source}: {problem['msg'].removeprefix('Value error, ')}", ""
    flag = "--" + ".".join(part for part in place if not part.isdecimal()).replace("_", "-")  # not a place in a list
    return f"'{dotted}' is {problem['input']!r} in {source}: {problem['msg'].lower()}", f"correct {flag}"


def _nearest_key(model: type[BaseModel], place: list[str]) -> str:
    """The key that a wrong one may mean: the same in another section, else one of a similar name; "" for none.

    >>> _nearest_key(RunConfig, ["learning_rate"]), _nearest_key(RunConfig, ["train", "learning_rat"])
    ("did you mean 'train.learning_rate'?", "did you mean 'learning_rate'?")
    """
    *section, key = [part.replace("-", "_") for part in place]
    own = SECTIONS.get(section[0]) if section else model
    others: dict[str, type[BaseModel]] = {}
    if model is RunConfig:
        others = {"": model, **{f"{name}.": kind for name, kind in SECTIONS.items()}}
    elsewhere = {prefix: names_in(kind) for prefix, kind in others.items() if kind is not own}
    exact = [f"'{prefix}{key}'" for prefix, names in elsewhere.items() if key in names]
    if exact:
        return f"did you mean {' or '.join(exact)}?"
    near = "" if own is None else suggest(key, names_in(own))
    return near or suggest(key, [prefix + name for prefix, names in elsewhere.items() for name in names])
