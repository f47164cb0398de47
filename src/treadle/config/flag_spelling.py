"""Spell the flags in an error's advice as the verb that shows it spells them.

A message is written where the error happens, and shown by whatever verb the user called: the trainer's `--lr` is
`--train.lr` of `treadle run`, and `treadle chat` does not have it.

respell_flags("run", "lower --lr", "train") -> "lower --train.lr"
respell_flags("env", "raise --train.seq-len") -> "raise treadle train --seq-len"
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from pydantic import BaseModel

from treadle.config.files import RUN_SECTIONS, SECTIONS, names_in
from treadle.config.schema import RunConfig
from treadle.config.section import spellings_of

WHOLE_RUN = ("run", "matrix", "plan", "doctor")  # verbs that take the flags of all sections, with dots
VERB_OF_SECTION = {name: name for name in ("hub", "engine", "router", "train", "env", "sft")} | {"openai": "env"}
_OF_RUN_ALONE = frozenset(("resume", "plain", "open", "fit", "dry-run"))
_OF_OTHERS = {
    "chat": frozenset(("message", "temperature", "max-tokens")),
    "dash": frozenset(("no-open",)),
    "top": frozenset(("plain", "once")),
    "report": frozenset(("out",)),
    "export": frozenset(("merged", "gguf", "push")),
    "token": frozenset(("token-file",)),
    "sft": frozenset(("resume", "model", "steps", "seed", "output", "config")),
    "doctor": frozenset(("hub", "engine", "json", "verbose")),
    "matrix": frozenset(("modes", "resume", "plain", "engine")),
    "plan": frozenset((
        "params", "mode", "gpu", "cards", "gpu-memory-gb", "host-memory-gb", "train-gpus", "engine-gpus",
        "prompt-tokens", "json",
    )),
}  # fmt: skip
_FLAG = re.compile(r"(?<![\w.-])--(?P<name>[a-z][a-z0-9-]*+(?:\.[a-z][a-z0-9-]*+)?+)")
# The flag belongs to a command line that is written out: `treadle run --resume`, `docker run --gpus all`.
_COMMAND = re.compile(r"\b(treadle|docker|pip|torchrun|python)\b[^;,()`\n]*$")


def respell_flags(verb: str, text: str, section: str = "", typed: Iterable[str] = ()) -> str:
    """`text` with the flags of `verb`; `section` is that of the process which wrote it.

    `typed` are words of the user's command line: of several spellings of a flag, the one that was typed is used.
    """
    flags = {word.partition("=")[0].replace("_", "-") for word in typed if word.startswith("--")}

    def spelled(found: re.Match[str]) -> str:
        if _COMMAND.search(text[: found.start()]):
            return found[0]
        flag = _spelled(found["name"], verb, section) or found[0]
        return flag if flag in flags else next((other for other in _others(flag, verb) if other in flags), flag)

    return _FLAG.sub(spelled, text)


def _others(flag: str, verb: str) -> list[str]:
    """The other spellings of a flag that `verb` takes: "--lr" -> ["--learning-rate"]."""
    prefix, dot, plain = flag.removeprefix("--").rpartition(".")
    section = prefix or ("run" if verb in WHOLE_RUN else verb)
    model = RunConfig if section == "run" else type(getattr(RunConfig(), section, None))
    for name in getattr(model, "model_fields", {}):
        spellings = [spelling.replace("_", "-") for spelling in spellings_of(name)]
        if plain in spellings:
            return [f"--{prefix}{dot}{spelling}" for spelling in spellings if spelling != plain]
    return []


def _spelled(name: str, verb: str, section: str) -> str:
    """ "" for a name that is not a flag of treadle, or could be a flag of several sections."""
    named, dot, plain = name.rpartition(".")
    # What reads rows is shared with environments, and names their flags.
    if name in _OF_OTHERS.get(verb, ()) or (verb == "sft" and named in ("", "env") and plain in _flags()["sft"]):
        return f"--{plain}"
    if verb == "chat" and name in ("model", "model-name", "openai.model", "openai.model-name"):
        return "the model"  # a positional argument there
    owners = [named] if dot else [one for one in ("run", *RUN_SECTIONS) if plain in _flags()[one]]
    owner = owners[0] if len(owners) == 1 else section
    if plain not in _flags().get(owner, ()):
        return ""
    if not dot and verb in WHOLE_RUN and plain in _flags()["run"] - _OF_RUN_ALONE:
        owner = "run"  # of the flags that a section has too, the whole run's is the one to give
    if owner == "run":
        is_own = verb == "run" or (verb in WHOLE_RUN and plain not in _OF_RUN_ALONE)
        return f"--{plain}" if is_own else f"treadle run --{plain}"
    if verb in WHOLE_RUN or (verb == "sft" and owner == "train"):
        return f"--{owner}.{plain}"
    own_verb = VERB_OF_SECTION[owner]
    flag = f"--{owner}.{plain}" if own_verb == "env" else f"--{plain}"
    return flag if own_verb == verb else f"treadle {own_verb} {flag}"


@cache
def _flags() -> dict[str, frozenset[str]]:
    """The names of flags without dashes and sections: {"run": {"model", "steps", ...}, "hub": {"port", ...}, ...}."""
    found = {name: _names(kind) for name, kind in SECTIONS.items()}
    own = _names(RunConfig) - {*found, "envs"} | {"env"}
    return {"run": own | _OF_RUN_ALONE | {"config"}, **{name: flags | {"config"} for name, flags in found.items()}}


def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(name.replace("_", "-") for name in names_in(model))
