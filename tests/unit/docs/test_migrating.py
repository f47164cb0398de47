"""docs/migrating.md: command lines of Atropos and rl-max, with the program's name swapped, are taken as the page says.

Each row of the table "Lines as they stand in the guides" is given to the real command line, which stops where a process
would start. The page says what comes of it: "works", with every note that is printed; "says", a refusal; or "not yet",
which is expected to fail until it works.
"""

from __future__ import annotations

import re

import pytest

from tests.doc_commands import parse, places
from tests.doc_pages import ROOT, Command, Page

PAGE = Page(ROOT / "docs" / "migrating.md")
ROWS = re.findall(r"(?m)^\| `([^`]+)` \| (.+) \|$", PAGE.section("Lines as they stand in the guides"))
# Theirs -> ours, as the first table of the page has it.
PROGRAMS = (
    (r"run-api|python -m atroposlib\.cli\.run_api", "hub"),
    (
        r"python3? (-u )?(-m (example_trainer\.vllm_api_server|src\.vllm_client)|example_trainer/vllm_api_server\.py)",
        "engine",
    ),
    (r"python (-u )?(environments/)?(?P<name>\w+)_server\.py", "env"),
    (r"atropos-grpo|python (-u )?(-m example_trainer\.grpo|example_trainer/grpo\.py)", "train"),
    (r"atropos-grpo-run|python -m example_trainer\.run", "run"),
)


def swap(line: str) -> list[str]:
    """The words after `treadle`.

    >>> swap("LOGDIR=. python -u environments/gsm8k_server.py serve --slurm False > gsm8k.log 2>&1 &")
    ['env', 'gsm8k', 'serve', '--slurm', 'False']
    """
    line = re.sub(r"^([A-Z_]+=\S+ )+", "", line)
    for theirs, verb in PROGRAMS:
        found = re.match(rf"({theirs})(?= |$)", line)
        if found:
            name = [found["name"]] if verb == "env" else []
            return [verb, *name, *Command("", line[found.end() :]).words]
    raise AssertionError(f"no verb of treadle replaces: {line}")


def rows() -> list[object]:
    """Those that do not work yet are expected to fail, each with what is missing."""
    assert len(ROWS) > 40
    missing = {line: pytest.mark.xfail(strict=True, reason=here) for line, here in ROWS if here.startswith("not yet")}
    return [pytest.param(line, here, marks=missing.get(line, ()), id=line[:70]) for line, here in ROWS]


@pytest.mark.parametrize(("line", "here"), rows())
def test_a_line_of_the_guides_is_taken_as_the_page_says(line, here, tmp_path, monkeypatch, capsys):
    places(tmp_path, monkeypatch)
    words = [*swap(line), *(["--engine", "vllm"] if here.startswith("works with vLLM") else [])]
    code, output = parse(words, monkeypatch, capsys)
    if here.startswith("says: "):
        assert code == 2
        assert re.findall(r"`([^`]+)`", here)[0] in output
    else:
        assert code in (0, None), output
        notes = {note.partition(": ")[2] for note in output.splitlines()}
        assert notes == {text for text in re.findall(r"`([^`]+)`", here) if "has no effect" in text}
