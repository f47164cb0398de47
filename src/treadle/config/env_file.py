"""YAML files, as Atropos' environments take them: their spellings -> ours.

env:
  group_size: 8
  max_batches_offpolicy: 3      # our max_age
  tokenizer_name: Qwen/Qwen3-4B # named on standard error, and passed over
openai:                         # a mapping, or a list of servers that differ in base_url and api_key
  - base_url: http://localhost:9001/v1
  - base_url: http://localhost:9002/v1
slurm: false

The sections of a whole run (`train:`, `hub:`, ...) are understood as well, as in TOML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from treadle.config.env import WITHOUT_EFFECT, EnvConfig, ServerConfig
from treadle.config.section import Section
from treadle.errors import ConfigError

_SECTIONS: dict[str, type[Section]] = {"env": EnvConfig, "openai": ServerConfig}


def read_yaml(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """(what it sets, what to tell the user about keys that set nothing)."""
    values = _parse(text, source)
    notes: list[str] = []
    for key in [key for key in values if _reason("", key)]:
        notes.append(f"{source}: '{key}' has no effect: {_reason('', key)}")
        del values[key]
    for section, model in _SECTIONS.items():
        if section in values:
            found = values[section] if isinstance(values[section], list) and section == "openai" else [values[section]]
            each = [_our_spelling(section, model, _mapping(section, one, source), source, notes) for one in found]
            values[section] = _one_for_all(each, source) if len(each) > 1 else (each or [{}])[0]
    return values, list(dict.fromkeys(notes))


def _parse(text: str, source: str) -> dict[str, Any]:
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


def _mapping(section: str, found: Any, source: str) -> dict[str, Any]:
    if not isinstance(found, dict | None):
        raise ConfigError(f"'{section}' is {found!r} in {source}", fix=f"write its settings below '{section}:'")
    return found or {}


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


def _our_spelling(
    section: str, model: type[Section], found: dict[str, Any], source: str, notes: list[str]
) -> dict[str, Any]:
    """Other spellings become the fields' names, "None" becomes null, and what has no effect is told and left out."""
    names = {spelling: name for name, field in model.model_fields.items() for spelling in (name, *_spellings(field))}
    ours: dict[str, Any] = {}
    for key, value in found.items():
        if reason := _reason(section, key):
            notes.append(f"{source}: '{section}.{key}' has no effect: {reason}")
            continue
        name = names.get(str(key), str(key))
        if name in ours:
            raise ConfigError(
                f"'{section}.{key}' is another name of a setting that {source} gives already", fix="keep one of them"
            )
        ours[name] = None if value == "None" else value
    return ours


def _spellings(field: Any) -> list[str]:
    extra = field.json_schema_extra
    return [str(spelling).replace("-", "_") for spelling in extra.get("flags", [])] if isinstance(extra, dict) else []


def _reason(section: str, key: object) -> str | None:
    dotted = f"{section}.{key}" if section else str(key)
    return WITHOUT_EFFECT.get(dotted.replace("_", "-"))
