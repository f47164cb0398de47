"""Define what sections of the configuration are made of: kinds of values, options, and settings of several sections."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from treadle.config.atropos import ALIASES
from treadle.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"

Port = Annotated[int, Field(ge=1, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
EngineDtype = Literal["fast", "auto", "bfloat16", "float16", "float32"]
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")  # keys of a model's config.json


def parse_names(value: Any) -> Any:
    """ "q_proj,v_proj" and "q_proj v_proj" -> ("q_proj", "v_proj")."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]


# [USER[:PASSWORD]@][HOST]/NAME[?SETTINGS]. libpq and urllib must agree where the password ends: it is left out of what
# is shown and stored.
_STORE_URL = re.compile(
    r"postgres(?:ql)?://(?:(?:[^\s/@?#%]|%[0-9A-Fa-f]{2})*@)?[^\s/@?#]*/(?:[^\s@?#%]|%[0-9A-Fa-f]{2})+"
    r"(?:\?(?:[^\s@#%]|%[0-9A-Fa-f]{2})*)?"
)


def _check_store(url: str) -> str:
    """The message leaves the value out: it may hold a password."""
    if not url:
        return url
    if not _STORE_URL.fullmatch(url):
        raise ValueError(
            "write it as postgresql://USER:PASSWORD@HOST:PORT/NAME, with %25 %2F %3F %23 %40 for % / ? # @ in USER and "
            "PASSWORD; a file is named with --database"
        )
    if any(name.endswith("password") for name in parse_qs(urlsplit(url).query, keep_blank_values=True)):
        raise ValueError("write the password as postgresql://USER:PASSWORD@HOST/NAME, or set PGPASSWORD")
    return url


StoreUrl = Annotated[str, AfterValidator(_check_store)]


def option(default: Any, help: str, *, default_text: str = "") -> Any:
    """Declare a setting: a field with its help text; `default_text` replaces the default in --help."""
    return Field(default, description=help, json_schema_extra={"default_text": default_text})


HUB_TABLE = "hub"  # in place of the URL of an engine: all that are in the hub's table of engines


def names_fleet(engine_url: Any) -> bool:
    """Whether an `engine_url` means several engines, or those in the hub's table."""
    urls = parse_names(engine_url or "")
    return isinstance(urls, tuple | list) and (len(urls) > 1 or list(urls) == [HUB_TABLE])


# Settings of several sections: their default and help text. `treadle run` copies the run's value to each process; a
# process that is started alone takes its own, or the one at the top of its --config file (`SHARED_BY`).
_SHARED: dict[str, tuple[Any, str]] = {
    "model": (DEFAULT_MODEL, "a Hugging Face id, a folder, or the built-in default"),
    "steps": (25, "optimizer steps"),
    "seed": (0, "random seed; the same one gives the same prompts, samples and curve"),
    "hub_url": ("http://127.0.0.1:8000", "URL of the hub"),
    "engine_url": ("http://127.0.0.1:9001", "URL of the engine, or of several"),
    "max_age": (
        None,
        "largest age of a trained rollout: trainer's policy version minus the rollout's; 0: strictly on-policy",
    ),
    "device": ("auto", "cpu, cuda, cuda:0, ...; auto takes a GPU when there is one"),
    "threads": (0, "compute threads; 0 takes every core"),
    "quantization": (
        "none",
        "with adapters: keep the frozen model in 4 bits (nf4, bitsandbytes), in trainer and engine",
    ),
    "host": ("127.0.0.1", "address to listen on; another than loopback needs a token"),
    "token_file": (None, "file of the token that calls must carry; made when it is not there"),
    "allowed_hosts": ("", "further names and addresses, comma-separated, that clients call this machine by"),
}
# Where a setting of the whole run goes when a process is started alone with the run's file.
SHARED_BY: dict[str, tuple[str, ...]] = {
    "model": ("engine.model", "train.model", "openai.model"),
    "steps": ("train.steps",),
    "seed": ("env.seed", "train.seed"),
    "hub_url": ("engine.hub_url", "router.hub_url", "env.hub_url", "train.hub_url"),
    "engine_url": ("train.engine_url", "openai.base_url"),
    "max_age": ("env.max_age", "train.max_age"),
}
_SAME: Any = object()


def shared(name: str, note: str = "", *, default: Any = _SAME, default_text: str = "") -> Any:
    """Declare a setting that several sections have; `note` says what is particular to this one."""
    usual, help = _SHARED[name]
    full = f"{help}{' ' if note.startswith('(') else '; '}{note}" if note else help
    return option(usual if default is _SAME else default, full, default_text=default_text)


def spellings_of(name: str) -> list[str]:
    """The field's own name, and the other spellings that flags and files may use."""
    return [name, *ALIASES.get(name, ())]


def default_text_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra.get("default_text", "")) if isinstance(extra, dict) else ""


def set_value(values: Any, dotted: str, value: Any) -> None:
    """Set one of nested settings: "train.lr", or "envs.1.args" in a list of tables."""
    *sections, key = dotted.split(".")
    place = values
    for section in sections:
        place = place[int(section)] if isinstance(place, list | tuple) else place.setdefault(section, {})
    place[key] = value


class Section(BaseModel):
    """Base of all sections. Unknown keys are errors: a misspelt key must never be ignored in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


# ---- numbers of layers and of GPUs


def parse_numbers(value: Any) -> Any:
    """ "20-22,0-1" -> (0, 1, 20, 21, 22); a value that is no text is left to the type to refuse."""
    if not isinstance(value, str):
        return value
    numbers: set[int] = set()
    for part in value.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"'{value}' is no list of numbers; write for example 20-31,0-3")
        if dash and int(last) < int(first):
            raise ValueError(f"'{part}' counts backwards; write {last}-{first}")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


Numbers = Annotated[tuple[Count, ...] | None, BeforeValidator(parse_numbers)]


def check_gpus(gpus: tuple[int, ...] | None, device: str) -> None:
    """Refuse an empty list of GPUs, and one beside a device that says something else; for validators of sections."""
    if gpus == ():
        raise ValueError("gpus names no GPU; write for example 0-3, or leave it out")
    if gpus is not None and device not in ("auto", "cuda"):
        raise ValueError(f"gpus and device {device} are both given; leave device out")


def refuse_missing(layers: Iterable[int], numbers: Collection[int], *, flag: str) -> None:
    """Refuse layers that the model does not have; `numbers` are those of its layers, `flag` names the setting."""
    missing = sorted(set(layers) - set(numbers))
    if missing:
        first, last = min(numbers), max(numbers)
        raise ConfigError(
            f"there is no layer {', '.join(map(str, missing))}: the model has {len(numbers)} layers, {first} to {last}",
            fix=f"give {flag} numbers from {first} to {last}",
        )


def num_layers_in(folder: Path) -> int | None:
    """The largest number of layers in the config.json of a model folder; None where it names none."""
    try:
        pending: list[Any] = [json.loads((folder / "config.json").read_bytes())]
    except (OSError, ValueError, RecursionError):  # reported when the model is loaded
        return None
    found: list[int] = []
    while pending:
        value = pending.pop()
        if isinstance(value, dict):  # a model with pictures has a section for each of its parts
            found += [size for name in _LAYER_COUNTS if isinstance(size := value.get(name), int)]
            pending += value.values()
    return max(found, default=None)
