"""What every section of the configuration is made of: kinds of values, and fields that are flags too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

DEFAULT_MODEL = "smollm2-135m-instruct"

Port = Annotated[int, Field(ge=1, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
EngineDtype = Literal["fast", "auto", "bfloat16", "float16", "float32"]


def parse_names(value: Any) -> Any:
    """ "q_proj,v_proj" and "q_proj v_proj" -> ("q_proj", "v_proj")."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]


def option(default: Any, help: str, *, flags: tuple[str, ...] = (), default_text: str = "") -> Any:
    """A field with its help text and further spellings of its flag; `default_text` replaces the default in --help."""
    return Field(default, description=help, json_schema_extra={"flags": list(flags), "default_text": default_text})


def spellings_of(name: str, field: FieldInfo) -> list[str]:
    """The field's own name, and the others that its flag has."""
    extra = field.json_schema_extra
    further = extra.get("flags", []) if isinstance(extra, dict) else []
    return [name, *map(str, further)]  # type: ignore[arg-type]


def set_value(values: Any, dotted: str, value: Any) -> None:
    """Set one of nested settings: "train.lr", or "envs.1.args" in a list of tables."""
    *sections, key = dotted.split(".")
    place = values
    for section in sections:
        place = place[int(section)] if isinstance(place, list | tuple) else place.setdefault(section, {})
    place[key] = value


class Section(BaseModel):
    """Unknown keys are errors: a misspelt key must never be ignored in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
