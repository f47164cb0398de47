"""Advice names flags that the verb has which shows it: every remedy in the source, by every verb that may show it."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import treadle
from treadle import cli
from treadle.config.flag_spelling import respell_flags
from treadle.help_texts import GUIDES

SOURCE = Path(treadle.__file__).parent
# Who shows the errors of a package, and whose section its own flags are.
SHOWN_BY = {
    "hub": (("hub", "run"), "hub"),
    "store": (("hub", "run"), "hub"),
    "engines": (("engine", "run", "chat"), "engine"),
    "train": (("train", "run"), "train"),
    "sync": (("train", "run"), "train"),
    "track": (("train", "run"), "train"),
    "envs": (("env", "run"), "env"),
    "budget": (("plan",), ""),
    "doctor": (("doctor",), ""),
    "launch/chat_command.py": (("chat",), ""),
    "launch/top.py": (("top",), ""),
    "launch/matrix.py": (("matrix",), ""),
    "launch": (("run",), ""),
    "errors.py": (tuple(cli.VERBS), ""),
    "config/load.py": (tuple(cli.VERBS), ""),
}
OF_OTHER_PROGRAMS = {
    "--scheduling-policy", "--max-cpu-loras", "--kv-cache-memory-bytes",  # vLLM
    "--nproc-per-node", "--force-reinstall", "--gpus", "--shm-size", "--ulimit", "--ipc", "--cap-add", "--no-deps",
}  # fmt: skip
FLAG = re.compile(r"(?<![\w.-])--[a-z][a-z0-9-]*+(?:\.[a-z][a-z0-9-]*+)?+")


def advice_in(file: Path) -> Iterator[str]:
    """Every text that a `fix` or a `remedy` of this file may be, with an X for what is filled in."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)) if "--" in source else ():
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [word.value for word in node.keywords if word.arg in ("fix", "how_to_start", "remedy")]
            if isinstance(node.func, ast.Name) and node.func.id in ("Check", "Finding"):
                values += node.args[3:]  # name, verdict, found, remedy
        elif isinstance(node, ast.Assign) and re.search("fix|remedy", ast.dump(node.targets[0]).lower()):
            values = [node.value]
        for value in values:
            yield from texts_in(value)


def texts_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        for part in node.values:
            yield from texts_in(part) if isinstance(part, ast.FormattedValue) else ()
    else:
        for inner in ast.iter_child_nodes(node):
            yield from texts_in(inner)


@pytest.fixture(scope="module")
def flags_of() -> dict[str, set[str]]:
    """As each verb's own help lists them."""
    found = {}
    for verb in cli.VERBS:
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
            cli.main([verb, "--help-all" if verb in GUIDES else "--help"])
        found[verb] = set(FLAG.findall(printed.getvalue()))
    return found


def wrong_flags(text: str, verb: str, flags_of: dict[str, set[str]]) -> list[str]:
    wrong = []
    for found in FLAG.finditer(text):
        command = re.search(r".*\btreadle (\w+)[^;,()`\n]*$", text[: found.start()])
        whose = command[1] if command and command[1] in flags_of else verb
        # The rest of the flag, or the verb before it, is only known when the text is made.
        is_filled_in = text[found.end() :].startswith(".") or text[0] == " " or (command and command[1] == "X")
        if found[0] not in flags_of[whose] and found[0] not in OF_OTHER_PROGRAMS and not is_filled_in:
            wrong.append(f"treadle {whose} has no {found[0]}: {text}")
    return wrong


def test_every_remedy_names_flags_of_the_verb_that_shows_it(flags_of: dict[str, set[str]]) -> None:
    wrong, count = [], 0
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE).as_posix()
        place = next((place for place in SHOWN_BY if path == place or path.startswith(f"{place}/")), None)
        verbs, section = SHOWN_BY[place] if place else ((), "")
        for text in advice_in(file) if place else ():
            for verb in verbs:
                count += bool(FLAG.search(text))
                shown = (
                    text if verb == "doctor" else respell_flags(verb, text, section)
                )  # it shows checks, and no errors
                wrong += [f"{path}: {problem}" for problem in wrong_flags(shown, verb, flags_of)]
    assert not wrong, "\n".join(wrong)
    assert count > 100, "the remedies are not found any more"


@pytest.mark.parametrize(
    ("verb", "section", "text", "shown"),
    [
        ("run", "train", "lower --lr or --micro-tokens", "lower --train.lr or --train.micro-tokens"),
        ("train", "train", "set --train.optimizer adamw", "set --optimizer adamw"),
        ("run", "train", "set --model to the first one", "set --model to the first one"),
        ("env", "env", "raise --train.seq-len", "raise treadle train --seq-len"),
        ("run", "env", "raise --train.seq-len", "raise --train.seq-len"),
        ("engine", "engine", "set --weight-bridge-mode reload", "set treadle train --weight-bridge-mode reload"),
        ("hub", "hub", "continue with treadle run --resume", "continue with treadle run --resume"),
        ("train", "train", "continue with --resume", "continue with treadle run --resume"),
        ("chat", "", "check --model-name (a folder or an id)", "check the model (a folder or an id)"),
        ("run", "hub", "start `treadle hub`, or use --port 1", "start `treadle hub`, or use --hub.port 1"),
    ],
)  # fmt: skip
def test_a_flag_is_spelled_as_the_verb_spells_it(verb: str, section: str, text: str, shown: str) -> None:
    assert respell_flags(verb, text, section) == shown
    assert respell_flags(verb, shown, section) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("run", "--model", "./nowhere"), "check --model"),
        (("run", "--model_name=./nowhere"), "check --model-name"),
        (("train", "--model-name", "./nowhere"), "check --model-name"),
        (("train", "--learning-rate", "fast"), "correct --learning-rate"),
        (("run", "--train.learning-rate", "fast"), "correct --train.learning-rate"),
    ],
)
def test_an_error_names_a_flag_as_it_was_typed(
    words: tuple[str, ...], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert capsys.readouterr().err.endswith(f"  -> {shown}\n")


def test_a_process_that_is_started_by_hand_names_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flag in ((("train", "--lr", "fast"), "--lr"), (("run", "--train.lr", "fast"), "--train.lr")):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert capsys.readouterr().err.endswith(f"correct {flag}\n")
