"""Keep secrets out of the settings that are written to files, reports and trackers.

Secrets are the values of keys such as `api_key` (also inside of --env.args), and the tokens and passwords in URLs, in
flags for other programs and in headers. Where settings are saved, NOT_STORED stands in their place. The processes of a
run get theirs in the environment variable VARIABLE, which no other user can read; a resumed run is given them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treadle.config.section import set_value
from treadle.errors import ConfigError
from treadle.wire.bridge import TOKEN_VARIABLE

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
_USER_IN_URL = re.compile(r"(https?://)[^\s/@]+@")
_NO_SECRETS = ("", "none", "empty", "x")  # placeholders of clients that require a key


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
    return _USER_IN_URL.sub(rf"\g<1>{NOT_STORED}@", _IN_TEXT.sub(rf"\g<1>{NOT_STORED}", value))
