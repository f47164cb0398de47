"""Give the commands of the pages to Treadle's own parsers, and stop where a process would start."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import treadle.budget.command
import treadle.doctor.command
import treadle.engines
import treadle.envs
import treadle.export
import treadle.hub.process
import treadle.launch
import treadle.launch.chat_command
import treadle.launch.dash_command
import treadle.launch.folder
import treadle.launch.matrix
import treadle.launch.top
import treadle.report.comparison_output
import treadle.report.page
import treadle.router.process
import treadle.sft.command
import treadle.train
from tests.doc_pages import ROOT, Command
from treadle import cli
from treadle.config.atropos import NO_EFFECT
from treadle.config.flags import FlagParser
from treadle.config.values import explicit_keys, with_values
from treadle.envs.base import load_environment, prepare_task
from treadle.errors import Problems
from treadle.gpus import Gpu
from treadle.help_texts import GUIDES
from treadle.launch.attachment import merge_addresses
from treadle.launch.machine import MachineFacts
from treadle.launch.preflight import settle_environments, with_environments
from treadle.launch.ranks import choose_layout

# The machine that a command is for: one with GPUs, if it names some.
NO_GPU = MachineFacts(num_cores=8, has_shared_memory=True)
MANY_GPUS = MachineFacts(num_cores=8, has_shared_memory=True, has_gpu=True, gpus=(Gpu("NVIDIA H100", 85 * 10**9),) * 32)
# What starts something, by the name under which the command line finds it.
_STARTS = (
    (treadle.launch, "resume"), (treadle.hub.process, "serve"), (treadle.engines, "serve"), (treadle.train, "main"),
    (treadle.router.process, "serve"), (treadle.sft.command, "start"), (treadle.sft.command, "resume"),
    (treadle.launch.folder, "newest_run"), (treadle.export, "export_merged"), (treadle.export, "export_gguf"),
    (treadle.export, "push"), (treadle.launch.chat_command, "talk"),
    (treadle.launch.top, "watch_run"), (treadle.launch.dash_command, "show_page"),
    (treadle.report.page, "write_report"), (treadle.report.comparison_output, "write_comparison"),
    (treadle.doctor.command, "diagnose"),
    (treadle.budget.command, "plan_memory"), (treadle.launch.matrix, "resume_matrix"),
)  # fmt: skip
_VERBS = frozenset(
    (
        "run",
        "matrix",
        "plan",
        "hub",
        "engine",
        "router",
        "sft",
        "env",
        "train",
        "dash",
        "top",
        "chat",
        "export",
        "doctor",
        "report",
        "compare",
        "token",
    )
)
# Words that stand for something of the user's.
PLACEHOLDERS = {
    "M": "my-model", "MODEL": "my-model", "DIR": "my-model", "NAME": "arithmetic", "FILE": "my_env.py",
    "FOLDER": "gsm8k", "SVAMP.json": "svamp.json", "RUN": "run", "ROLE": "observer", "URL": "http://127.0.0.1:8000",
    "PYTHON": "python", "N": "2",
}  # fmt: skip
ROWS = [
    {"question": f"What is {a} + 3?", "answer": f"{a + 3}", "target": f"{a + 3}", "language": "en"} for a in range(30)
]


def how(command: Command) -> str:
    """ "run" (tests/e2e/test_docs*.py), "marked", "installs" (./check does it before), or "" for any other."""
    if command.reason:
        return "marked"
    program = Path(command.words[0]).name
    if program in ("treadle", "curl", "export", "run-api"):
        return "run"
    return "installs" if program in ("pip", "setup.sh") else ""


def places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that has what the pages assume: an environment of the user's, data, our examples."""
    monkeypatch.chdir(folder)
    for name in ("configs", "examples", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "gsm8k").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        rows = (ROOT / "tests" / "data" / "gsm8k" / name).read_text().splitlines(keepends=True)
        (folder / "gsm8k" / name).write_text("".join(rows[:12]))
    (folder / "svamp.json").symlink_to(ROOT / "tests" / "data" / "svamp.json")
    example = (ROOT / "examples" / "capitals.py").read_text()
    (folder / "my_env.py").write_text(example.replace("names_it", "names_mine").replace('"capitals"', '"mine"'))
    (folder / "RUN").mkdir()
    (folder / "RUN" / "config.json").write_text("{}")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reverse").mkdir()  # as examples/reverse_words.py writes it
    (folder / "reverse" / "train.jsonl").write_text((folder / "rows.jsonl").read_text())
    for recipe in (ROOT / "recipes").iterdir():  # the rows that its script writes; tests/unit/recipes runs the scripts
        if recipe.is_dir():
            (folder / "data" / recipe.name).mkdir(parents=True)
            (folder / "data" / recipe.name / "train.jsonl").write_text((folder / "rows.jsonl").read_text())
    (folder / "ds_config.json").write_text("{}")
    (folder / "engine.token").write_text("a-token-of-at-least-thirty-two-characters\n")
    (folder / "engine.token").chmod(0o600)


def parse_command(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_fragment: bool = False
) -> str:
    """What the verb says against it; "" when it is taken. A fragment of a sentence may lack a flag's value."""
    words = treadle_words(command.words)
    if words is None or (is_fragment and len(words) < 2):
        return ""
    verbs = list(GUIDES) if words[0] == "VERB" else [words[0]]
    for verb in verbs:
        code, output = parse([verb, *words[1:]], monkeypatch, capsys)
        if code and not (is_fragment and re.search(r"expected (one|at least one) argument", output)):
            return output.strip() or f"exit code {code}"
    return ""


def treadle_words(words: list[str]) -> list[str] | None:
    """The words after `treadle`, with a user's own things filled in; None for other programs."""
    name = Path(words[0]).name
    if name == "torchrun" and "treadle" in words:
        words = words[words.index("treadle") :]
    elif name == "run-api":
        words = ["treadle", "hub", *words[1:]]
    elif name != "treadle":
        return None
    words = [PLACEHOLDERS.get(word.strip("[]"), word) for word in words[1:] if word != "..."]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in words]


def parse(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int | str | None, str]:
    """Exit code and standard error of `treadle WORDS`, whose last call, the one that starts something, is left out."""
    assert words[0] in _VERBS or words[0] not in cli.VERBS, f"add to _STARTS what `treadle {words[0]}` starts"
    with monkeypatch.context() as patch:
        patch.setattr(treadle.launch, "start", _checks_of_run)
        patch.setattr(treadle.launch.matrix, "start_matrix", lambda config, *_, **__: _checks_of_run(config))
        patch.setattr(treadle.envs, "run_action", _checks_of_env)
        for module, name in _STARTS:
            patch.setattr(module, name, lambda *_, **__: 0)
        if words[0] == "token":
            words = [*words, "--token-file", "engine.token"]
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.main(words))
    return ended.value.code, capsys.readouterr().err


def known_flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every flag of every verb, from the parsers themselves, and the flags that are taken without effect."""
    found: set[str] = set()

    def tell(parser: FlagParser, *_: object) -> NoReturn:
        found.update(parser._option_string_actions)
        raise SystemExit(0)

    with monkeypatch.context() as patch:
        patch.setattr(FlagParser, "parse_known", tell)
        for verb in cli.VERBS:
            with pytest.raises(SystemExit):
                cli.main([verb])
    return found | {f"--{name.removeprefix('train.')}" for name in NO_EFFECT}


def _checks_of_run(config: Any, **_: object) -> int:
    explicit = explicit_keys(config)
    given = [  # the data of gsm8k would be fetched
        env.model_copy(update={"data": "gsm8k"}) if env.name == "gsm8k" and not env.data else env
        for env in config.environments
    ]
    problems = Problems()
    config = settle_environments(with_environments(config, given), problems)
    problems.raise_all()
    config = merge_addresses(config, explicit)
    machine = NO_GPU
    if config.engine.gpus or config.train.gpus:
        machine = MANY_GPUS
        config = with_values(config, {"engine.engine": "vllm"})  # which splits an engine; it is not installed here
    with_values(config, choose_layout(config, machine, explicit).settings).check_together()
    return 0


def _checks_of_env(_: str, config: Any, __: Any, **___: Any) -> int:
    if not config.name.startswith("verifiers:"):
        environment = load_environment(config)
        if config.data and not re.fullmatch(
            r"[\w-]+/[\w.-]+(:\w+)?", config.data
        ):  # the id of a dataset would be fetched
            prepare_task(environment)
    return 0
