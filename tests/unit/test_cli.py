"""The command line as a user sees it: a real process, its output and its exit code."""

from __future__ import annotations

import faulthandler
import importlib
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from treadle import envs
from treadle.cli import VERBS, main
from treadle.config import EnvConfig
from treadle.envs import base as env_base
from treadle.help_texts import GUIDES
from treadle.verbs import HANDLERS


def treadle(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS)])
def test_help_answers_at_once_and_never_loads_torch(words: tuple[str, ...]) -> None:
    begun = children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "treadle", *words, "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    took = children_cpu_s() - begun
    print(f"treadle {' '.join(words)} --help: {took:.2f} s of CPU")
    assert "treadle" in done.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "treadle.cli" in loaded
    assert not loaded & {"torch", "transformers", "matplotlib"}
    assert took < 2.0, "CPU seconds: a busy machine takes longer, and is not what is tested"


def help_of(verb: str, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    """In this process: an interpreter of its own would take half a second."""
    with pytest.raises(SystemExit) as end:
        main([verb, flag])
    assert end.value.code in (0, None)
    return capsys.readouterr().out


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("verb", GUIDES)
def test_the_help_starts_with_usage_and_fits_on_two_screens(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(verb, capsys).splitlines()
    assert lines[0] == f"usage: treadle {verb} {GUIDES[verb].usage}"
    assert " ".join(lines[2 : lines.index("examples:")]).strip() == GUIDES[verb].about
    assert 3 <= sum(line.lstrip().startswith(f"treadle {verb}") for line in lines[:-1]) <= 4
    assert len(lines) < 80
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith(("...", "…"))], "a help text is cut off"
    last_line = re.fullmatch(rf"treadle {verb} --help-all lists all (\d+) flags\.", lines[-1])
    assert last_line is not None
    everything = help_of(verb, capsys, "--help-all")
    listed = re.findall(r"^  (?:-h, )?(--[a-z][\w.-]*)", everything, flags=re.MULTILINE)
    assert len(listed) == int(last_line[1])
    assert everything.startswith(f"usage: treadle {verb} {GUIDES[verb].usage}\n\n")


def test_the_help_names_no_default_that_a_task_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """`treadle run` takes the task's own: 16 tokens for arithmetic, 2048 for gsm8k."""
    help_text = " ".join(help_of("run", capsys).split())
    assert "longest completion, in tokens (default: the task's own, else 512)" in help_text
    own = env_base._BUILT_IN | env_base._OF_OTHERS
    for module in own.values():
        importlib.import_module(module)
    replaced = {name for key, kind in env_base._REGISTRY.items() if key in own for name in kind.defaults}
    extra = {name: EnvConfig.model_fields[name].json_schema_extra for name in replaced - {"task", "group_size"}}
    assert all(isinstance(found, dict) and found["default_text"] for found in extra.values()), extra


def test_every_verb_writes_its_stacks_on_sigusr1(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in VERBS:
        faulthandler.unregister(signal.SIGUSR1)
        monkeypatch.setitem(HANDLERS, verb, lambda words: 0)
        with pytest.raises(SystemExit):
            main([verb])
        assert faulthandler.unregister(signal.SIGUSR1), verb


def test_a_misspelt_verb_is_answered_with_the_right_one() -> None:
    done = treadle("trian")
    assert done.returncode == 2
    assert "unknown verb 'trian'; did you mean 'train'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("run", "--train.lrr", "1e-5"), "--train.lr"),
        (("run", "--step", "3"), "--steps"),
        (("hub", "--prot", "8000"), "--port"),
        (("chat", "--mesage", "hi"), "--message"),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_right_one(words: tuple[str, ...], suggestion: str) -> None:
    done = treadle(*words)
    assert done.returncode == 2
    assert f"unknown flag {words[1]}; did you mean '{suggestion}'?" in done.stderr


def test_a_misspelt_key_in_a_file_is_answered_with_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlearning_rat = 1e-5\n[env]\ngroup_size = 8\n")
    done = treadle("run", "--config", "run.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown key 'train.learning_rat' in run.toml" in done.stderr
    (tmp_path / "run.toml").write_text("[env]\ngroup_siez = 8\n")
    done = treadle("run", "--config", "run.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'group_size'?" in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (["gsm8k"], "serve"),
        (["./my_env.py", "--env.max_num", "200"], "serve"),
        (["gsm8k", "evaluate", "--env.num-eval", "3"], "evaluate"),
        (["gsm8k", "--env.num-eval", "3", "evaluate"], "evaluate"),
    ],
)
def test_an_environment_without_a_verb_serves(
    words: list[str], action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acted: list[str] = []
    monkeypatch.setattr(envs, "run_action", lambda action, *_, **__: acted.append(action))
    with pytest.raises(SystemExit) as ended:
        main(["env", *words])
    assert (ended.value.code, acted) == (None, [action]), capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["env", *words, "sevre"])
    assert ended.value.code == 2
    assert "sevre" in capsys.readouterr().err


def test_a_value_that_cannot_be_right_names_its_flag() -> None:
    done = treadle("run", "--steps", "many")
    assert done.returncode == 2
    assert "'steps' is 'many'" in done.stderr
    assert "--steps" in done.stderr


def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = treadle("run", "--hub.port", str(port), cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "--hub.port" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    done = treadle("run", "--resume", str(tmp_path))
    assert done.returncode == 2
    assert "not the folder of a run" in done.stderr


def test_chat_without_a_run_says_what_to_do(tmp_path: Path) -> None:
    done = treadle("chat", "--message", "hi", cwd=tmp_path)
    assert done.returncode == 2
    assert "no finished run" in done.stderr


def test_the_light_half_imports_no_torch():
    """Checked in a process of its own: other tests here import it."""
    code = (
        "import sys, treadle.launch.job, treadle.launch.chat_command, treadle.hub.process, treadle.envs.main;"
        "import treadle.track;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
