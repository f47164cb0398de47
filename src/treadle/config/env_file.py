"""YAML files, as Atropos' environments take them: their spellings -> ours.

env:
  group_size: 8
  max_batches_offpolicy: 3      # our max_age
  tokenizer_name: Qwen/Qwen3-4B # named on standard error, and passed over
openai:                         # a mapping, or a list of one
  - base_url: http://localhost:9001/v1
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
            found = _one_mapping(section, values[section], source)
            values[section] = _our_spelling(section, model, found, source, notes)
    return values, notes


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


def _one_mapping(section: str, found: Any, source: str) -> dict[str, Any]:
    if isinstance(found, list):
        if len(found) > 1:
            raise ConfigError(
                f"{source} names {len(found)} servers under '{section}', an environment asks one engine",
                fix="keep the entry of the engine; for more, start an environment for each",
            )
        found = found[0] if found else {}
    if not isinstance(found, dict | None):
        raise ConfigError(f"'{section}' is {found!r} in {source}", fix=f"write its settings below '{section}:'")
    return found or {}


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
