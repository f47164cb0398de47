"""Read a file of settings (TOML, YAML, JSON), rename its keys to field names, and keep secrets out of saved ones.

A key may be spelt as any flag of its setting, with dashes or underscores. Files of Atropos' environments are
understood in every format:

env:
  group_size: 8
  max_batches_offpolicy: 3      # our max_age
  tokenizer_name: Qwen/Qwen3-4B # named on standard error, and passed over
openai:                         # a mapping, or a list of servers that differ in base_url and api_key
  - base_url: http://localhost:9001/v1
  - base_url: http://localhost:9002/v1
slurm: false

A list under `env`, in TOML several [[env]] tables, is several environments.

Secrets are the values of keys such as `api_key` (also inside of --env.args), and the tokens and passwords in URLs, in
flags for other programs and in headers. Where settings are saved, NOT_STORED stands in their place. The processes of a
run get theirs in the environment variable VARIABLE, which no other user can read; a resumed run is given them again.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from treadle.config.atropos import NO_EFFECT, SHORTHANDS
from treadle.config.env import EnvConfig
from treadle.config.schema import RunConfig
from treadle.config.section import Section, set_value, spellings_of
from treadle.errors import ConfigError
from treadle.wire.bridge import TOKEN_VARIABLE

YAML_SUFFIXES = (".yaml", ".yml")
SECTIONS: dict[str, type[Section]] = {
    name: type(field.default) for name, field in RunConfig.model_fields.items() if isinstance(field.default, Section)
}
RUN_SECTIONS = {name: kind for name, kind in SECTIONS.items() if name != "sft"}  # whose settings `treadle run` takes

NOT_STORED = "NOT-STORED"
VARIABLE = "TREADLE_SECRET_SETTINGS"  # {"openai.api_key": "..."}
API_KEY = "openai.api_key"
_KEY = re.compile(
    r"(^|_)((api|access|auth|bearer|secret|private|hf|wandb)_?(key|token)|password|passwd|secret|credentials?)$|^token$",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(
    r"(https?://[^\s/]+/t/|[?&](?:api_key|key|token|access_token)=|--(?:api[-_]key|hf[-_]token|token|password)[ =]"
    r"|\b[A-Z][A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD)=|\bBearer )[^\s/&'\"]+"
)
# Of a database only the password is left out: the user alone is no secret.
_USER_IN_URL = re.compile(r"(https?://)[^\s/@]+@|(postgres(?:ql)?://[^\s/@:]*:)\S+@")
_NO_SECRETS = ("", "none", "empty", "x")  # placeholders of clients that require a key


def read_file(path: Path) -> dict[str, Any]:
    """The values of a file, under the keys that it has."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(
            f"cannot read the configuration {path}: {problem}", fix="name another file, or fix this one"
        ) from None
    if path.suffix in YAML_SUFFIXES:
        return _read_yaml(text, str(path))
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be parsed: {error}", fix="correct that line") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings", fix='write a JSON object: {"env": {"group_size": 8}}')
    return values


def with_our_names(values: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """(the values under the names of our fields, a note for the user about each key that has no effect)."""
    notes: list[str] = []
    ours = _rename("", RunConfig, values, path, notes)
    if isinstance(ours.get("env"), list):
        ours["envs"] = ours.pop("env")
    if "envs" in ours:  # of a saved run
        if not isinstance(ours["envs"], list):
            raise ConfigError(f"unknown key 'envs' in {path}", fix="did you mean 'env'?")
        found = [_rename("env", EnvConfig, _mapping("env", one, path), path, notes) for one in ours.pop("envs")]
        ours |= {"envs": found} if len(found) > 1 else {"env": found[0]} if found else {}
    for section, model in SECTIONS.items():
        if section in ours:
            found = ours[section] if isinstance(ours[section], list) and section == "openai" else [ours[section]]
            each = [_rename(section, model, _mapping(section, one, path), path, notes) for one in found]
            ours[section] = _one_for_all(each, str(path)) if len(each) > 1 else (each or [{}])[0]
    return ours, list(dict.fromkeys(notes))


def _rename(
    section: str, model: type[BaseModel], found: Mapping[str, Any], path: Path, notes: list[str]
) -> dict[str, Any]:
    """Other spellings become the fields' names, and "None" becomes null, as for flags; what has no effect is noted."""
    names = names_in(model)
    ours: dict[str, Any] = {}
    for key, value in found.items():
        dotted = f"{section}.{key}" if section else str(key)
        if reason := NO_EFFECT.get(dotted.replace("_", "-")):
            notes.append(f"{path}: '{dotted}' has no effect: {reason}")
            continue
        name = names.get(str(key).replace("-", "_"), str(key))
        if name in ours:
            raise ConfigError(
                f"'{dotted}' is another name of a setting that {path} gives already", fix="keep one of them"
            )
        ours[name] = None if value == "None" else value
    return ours


def names_in(model: type[BaseModel]) -> dict[str, str]:
    """Every spelling of a section's settings, with underscores, and the field or shorthand that it names."""
    names = {spelling: name for name in model.model_fields for spelling in spellings_of(name)}
    return names | ({name: name for name in SHORTHANDS} if model is SECTIONS["train"] else {})


def _mapping(section: str, found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict | None):
        heading = f"'{section}:'" if path.suffix in YAML_SUFFIXES else f"[{section}]"
        raise ConfigError(f"'{section}' is {found!r} in {path}", fix=f"write its settings below {heading}")
    return found or {}


def _read_yaml(text: str, source: str) -> dict[str, Any]:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        twice = next(_keys_given_twice(node), None)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} cannot be parsed: {error}", fix="correct that line") from None
    if twice is not None:
        raise ConfigError(f"'{twice}' is given twice in {source}", fix="keep one of them")
    if not isinstance(values, dict | None):
        raise ConfigError(f"{source} holds no settings", fix="write sections: 'env:', and 'group_size: 8' under it")
    return {str(key): value for key, value in (values or {}).items() if value is not None}


def _keys_given_twice(root: Any) -> Iterator[str]:
    """The parser would take the last one in silence."""
    waiting, visited = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or isinstance(node.value, str) or id(node) in visited:  # an alias leads back to its anchor
            continue
        visited.add(id(node))
        pairs = [child for child in node.value if isinstance(child, tuple)]
        keys = Counter(key.value for key, _ in pairs if isinstance(key.value, str))
        yield from (key for key, times in keys.items() if times > 1)
        waiting += [value for _, value in pairs] if pairs else node.value


def _one_for_all(servers: list[dict[str, Any]], source: str) -> dict[str, Any]:
    """Merge several servers into one section: lists of their URLs and keys, everything else once.

    >>> _one_for_all([{"base_url": "http://a"}, {"base_url": "http://b", "timeout": 60}], "env.yaml")
    {'timeout': 60, 'base_url': ['http://a', 'http://b']}
    """
    shared: dict[str, Any] = {}
    for server in servers:
        for key, value in server.items():
            if key not in ("base_url", "api_key") and shared.setdefault(key, value) != value:
                raise ConfigError(
                    f"the servers under 'openai' in {source} have different values of '{key}': {shared[key]!r} and "
                    f"{value!r}",
                    fix="give all of them the same: an environment samples one policy, and they differ in base_url and "
                    "api_key only",
                )
    if any("base_url" not in server for server in servers):
        raise ConfigError(
            f"{source} names {len(servers)} servers under 'openai', and not all of them have a base_url",
            fix="write 'base_url: http://HOST:PORT/v1' for each",
        )
    shared["base_url"] = [server["base_url"] for server in servers]
    keys = [server["api_key"] for server in servers if server.get("api_key")]
    if len(set(keys)) > 1 and len(keys) < len(servers):
        raise ConfigError(
            f"{len(keys)} of the {len(servers)} servers under 'openai' in {source} have an api_key",
            fix="give each of them its own, or all of them the same; one that needs none takes any word",
        )
    if keys:
        shared["api_key"] = keys[0] if len(set(keys)) == 1 else " ".join(keys)
    return shared


# ---- secrets


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """`without_secrets({"openai": {"api_key": "sk-1"}})` -> {"openai": {"api_key": "NOT-STORED"}}."""
    return {name: _hidden(name, value) for name, value in values.items()}


def secrets_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that hold secrets, whole, by their dotted keys."""
    public = _settings(without_secrets(values))
    return {dotted: value for dotted, value in _settings(values).items() if value != public[dotted]}


def secret_variable(values: Mapping[str, Any], *sections: str) -> dict[str, str]:
    """The environment variable by which a process gets the secrets of these sections; {} where there are none."""
    secrets = {key: value for key, value in secrets_in(values).items() if key.partition(".")[0] in sections}
    return {VARIABLE: json.dumps(secrets)} if secrets else {}


def restore_secrets(values: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Put secrets from the environment into the places of `values`, read from a file, where they were left out."""
    try:
        known: dict[str, Any] = dict(json.loads(environment.get(VARIABLE, "{}")))
    except (ValueError, TypeError):
        example = f"""{VARIABLE}='{{"{API_KEY}": "..."}}'"""
        raise ConfigError(
            f"{VARIABLE} is not a JSON object", fix=f"write it like this, or unset it: {example}"
        ) from None
    if environment.get(TOKEN_VARIABLE):
        known.setdefault(API_KEY, environment[TOKEN_VARIABLE])
    for dotted in _missing(values):
        if dotted in known:
            set_value(values, dotted, known[dotted])


def require_secrets(values: Mapping[str, Any], *sections: str) -> None:
    """Refuse settings of these sections (of all, where none is named) that still lack a secret."""
    missing = [key for key in _missing(values) if not sections or key.partition(".")[0] in sections]
    if missing:
        flags = ", ".join("--" + key.replace("_", "-") for key in missing)
        other_way = f", or set {TOKEN_VARIABLE}" if missing == [API_KEY] else ""
        raise ConfigError(
            f"{flags} held a secret when this run began, and secrets are not stored",
            fix=f"give {flags} again{other_way}",
        )


def _missing(values: Mapping[str, Any]) -> list[str]:
    return [dotted for dotted, value in _settings(values).items() if NOT_STORED in str(value)]


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted keys; what lies deeper than a section (--env.args) is one setting."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        sections = {name: value}
        if name == "envs":
            sections = {f"envs.{place}": table for place, table in enumerate(value)}
        for section, found in sections.items():
            inner = {f"{section}.{key}": one for key, one in found.items()} if isinstance(found, dict) else {}
            flat |= inner if isinstance(found, dict) else {section: found}
    return flat


def _hidden(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hidden(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(key, inner) for inner in value]
    if value is None or str(value).lower() in _NO_SECRETS:
        return value
    if _KEY.search(key.replace("-", "_")):  # also of a header: X-Api-Key
        return NOT_STORED
    if not isinstance(value, str):
        return value
    return _USER_IN_URL.sub(rf"\g<1>\g<2>{NOT_STORED}@", _IN_TEXT.sub(rf"\g<1>{NOT_STORED}", value))
