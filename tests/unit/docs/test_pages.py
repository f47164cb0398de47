"""The commands in README.md, docs/ and recipes/ work.

Here every command is read by the real parser of its verb, up to where a process would start. With --full
tests/e2e/test_docs.py and test_docs_processes.py run it, unless its page is marked with the reason why nobody does.
`pytest -s` prints how many there are of each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.doc_commands import how, known_flags, parse, parse_command, places
from tests.doc_pages import ROOT, SHELLS, Command, Page, read_pages, spans_of
from treadle.cli import VERBS
from treadle.config.env import EnvConfig
from treadle.config.load import load_process, load_run
from treadle.envs.base import load_environment, prepare_task
from treadle.envs.rewards import registry

PAGES = read_pages()
CONTRIBUTING = Page(ROOT / "CONTRIBUTING.md")
SOURCES = (ROOT, ROOT / "src" / "treadle")
BLOCKS = [block for page in PAGES for block in page.blocks]
IN_BLOCKS = [command for block in BLOCKS for command in block.commands]
IN_PROSE = [command for page in PAGES for command in page.commands_in_prose]
WIDTH = 110  # columns of what the pages show
# Flags of other programs that the pages name by themselves, and how lines of other programs begin.
FOREIGN_FLAGS = {
    "--nproc-per-node", "--nnodes", "--shutdown-timeout", "--ipc", "--shm-size", "--max-loras", "--full", "--load",
    "--shape", "--clients", "--scheduler-cls", "--no-async-scheduling", "--partition", "--account",
}  # fmt: skip
OTHER_PROGRAMS = ("python bench", "docker ", "torchrun ", "pytest ", "./check", "pip ", "srun ", "squeue ", "scancel ")


def test_every_command_is_run_or_marked() -> None:
    unseen = [f"{command.where}: {command.line}" for command in IN_BLOCKS if not how(command)]
    assert not unseen, "run it in this test, or write <!-- not run: why --> before its block"
    hidden = [f"{page.name}: {text}" for page in PAGES for text in page.hidden_commands]
    assert not hidden, "a block with commands begins with ```bash, or ```console where it shows what they print"
    unmarked = [block.where for block in BLOCKS if block.reason and len(block.reason.split()) < 4]
    assert not unmarked, "say why it is not run"
    counts = Counter(how(command) for command in IN_BLOCKS)
    print(f"\ncommands in blocks: {dict(counts)}; in sentences and tables: {len(IN_PROSE)}")
    print(f"snippets of Python: {sum(block.language == 'python' for block in BLOCKS)}")


def test_the_flags_of_every_command_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the verb's own parser and the checks of the settings; only what would start a process is replaced."""
    places(tmp_path, monkeypatch)
    refused = []
    for command in [*IN_BLOCKS, *IN_PROSE]:
        problem = parse_command(command, monkeypatch, capsys, is_fragment=command in IN_PROSE)
        if problem:
            refused.append(f"{command.where}: {command.line}\n    {problem}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "command",
    [each for each in IN_BLOCKS if each.shown or each.words[:2] == ["treadle", "plan"]],
    ids=lambda each: each.where,
)
def test_a_command_prints_what_its_page_shows(command: Command) -> None:
    """A line of three dots stands for any lines."""
    done = subprocess.run(
        [sys.executable, "-m", *command.words],
        capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": str(WIDTH)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # `treadle plan` ends with 1 when a job does not fit
    printed = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    parts = [re.escape(part.strip("\n")) for part in re.split(r"(?m)^\.\.\.$", command.shown.rstrip())]
    assert not command.shown or re.fullmatch(r"(?:.*\n)?".join(parts), printed, re.DOTALL), (
        f"{command.where} shows another text:\n{printed}"
    )


def test_every_verb_lists_all_its_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {verb: parse([verb, "--help-all"], monkeypatch, capsys) for verb in VERBS}
    assert not any(code for code, _ in refused.values()), refused


def test_every_named_flag_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some verb, with or without its section; those of other programs are listed above."""
    flags = known_flags(monkeypatch)
    flags |= {flag.replace("--env.", "--envs.1.", 1) for flag in flags}  # of one of several environments
    known = flags | {f"--{flag.removeprefix('--').rpartition('.')[2]}" for flag in flags} | FOREIGN_FLAGS
    unknown = []
    for page in PAGES:
        text = page.prose
        if page.name == "docs/migrating.md":  # the first column is what others type; the lines have a test of their own
            text = re.sub(r"(?m)^\| .*? \|", "|", text.replace(page.section("Lines as they stand in the guides"), ""))
        for span in spans_of(text):
            if not span.startswith(OTHER_PROGRAMS):
                found = {flag.rstrip(".").replace("_", "-") for flag in re.findall(r"(?<![\w-])(--[a-z][\w.-]*)", span)}
                unknown += [f"{page.name}: `{span}`: {flag}" for flag in found - known if not flag.endswith("-")]
    assert not unknown, "\n".join(unknown)


TOML_KEYS = ("[[env.rewards]]", "[[env]]", "hub_url")


def test_settings_that_the_pages_show_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML of an environment, the TOML of rewards, the JSON of rows for the environment `code`."""
    places(tmp_path, monkeypatch)
    shown = {block.language: block.text for block in BLOCKS if block.language in ("yaml", "json")}
    tomls = [block.text for block in BLOCKS if block.language == "toml"]
    [rewards_table, judge_table], [tables], [shared] = ([text for text in tomls if key in text] for key in TOML_KEYS)
    (tmp_path / "shared.toml").write_text(shared)
    assert load_process(tmp_path / "shared.toml", {}, "train").train.model == "Qwen/Qwen3-0.6B"
    (tmp_path / "run.toml").write_text(tables)
    assert [env.own_name for env in load_run(tmp_path / "run.toml").environments] == ["gsm8k", "my_env"]
    (tmp_path / "env.yaml").write_text(shown["yaml"])
    assert load_run(tmp_path / "env.yaml").env.max_age == 3
    (tmp_path / "my_rewards.py").write_text(
        "from treadle.envs.rewards import reward\n\n@reward\ndef is_polite_here(completion):\n    return 1.0\n"
    )
    rewards = tomllib.loads(rewards_table.replace("is_polite", "is_polite_here", 1))["env"]["rewards"]
    assert len(registry.create(rewards).rewards) == 3
    assert registry.create(tomllib.loads(judge_table)["env"]["rewards"]).rewards[0].max_requests == 50_000
    (tmp_path / "code.jsonl").write_text(shown["json"] * 2)
    prepare_task(load_environment(EnvConfig(name="code", data="code.jsonl")))


def test_links_lead_somewhere() -> None:
    by_path = {page.path: page for page in PAGES}
    broken = []
    for page in PAGES:
        for link in page.links:
            target, _, anchor = link.partition("#")
            path = (page.path.parent / target).resolve() if target else page.path
            if not path.exists():
                broken.append(f"{page.name}: {link}")
            elif anchor and anchor not in (by_path.get(path) or Page(path)).anchors:
                broken.append(f"{page.name}: {link}: no such heading")
    assert not broken, "\n".join(broken)


def test_named_files_exist() -> None:
    """Paths of this repository in sentences, tables and comments: `tests/e2e/test_weights.py`, `sync/gate.py`."""
    folders = "|".join(folder.name for root in SOURCES for folder in root.iterdir() if folder.is_dir())
    path = re.compile(rf"(?<![\w./-])((?:\./)?(?:{folders})/[\w./-]*\w)")
    missing = []
    for page in [*PAGES, CONTRIBUTING]:
        text = page.prose + "".join(block.text for block in page.blocks if block.language in SHELLS)
        for name in {found.removeprefix("./") for found in path.findall(text)}:
            is_file = "." in name or name.startswith(("tests/", "bench/", "docs/", "src/"))
            is_of_the_user = name.startswith(("runs/", "data/")) or name.split("/")[-1] != name.split("/")[-1].lower()
            if is_file and not is_of_the_user and not any((root / name).exists() for root in SOURCES):
                missing.append(f"{page.name}: {name}")
    assert not missing, "\n".join(sorted(missing))


def test_code_named_beside_a_file_is_in_it() -> None:
    """As in `support.py` (`FAMILIES`); so the tables that lead through the code stay correct."""
    named = re.compile(r"`([\w./]+\.py)`\**\s+\(([^)]*)\)")
    missing = []
    num_checked = 0
    for page in [*PAGES, CONTRIBUTING]:
        for file, words in named.findall(page.prose):
            names = re.findall(r"`(\w+)`", words)
            sources = [root / file for root in SOURCES if (root / file).exists()]
            code = sources[0].read_text(encoding="utf-8") if sources else ""
            missing += [f"{page.name}: {file}: {name}" for name in names if not re.search(rf"\b{name}\b", code)]
            num_checked += len(names)
    assert num_checked > 30
    assert not missing, "\n".join(missing)


def test_extras_that_the_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = re.compile(r"(?:treadle\[|setup\.sh )([\w,-]+)")
    groups = [group for page in PAGES for group in installs.findall(page.text)]
    assert groups
    assert {name for group in groups for name in group.split(",")} <= set(extras)
