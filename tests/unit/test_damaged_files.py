"""Every verb reports a missing, damaged or wrong file in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle import cli
from treadle.config import load_run, save_run
from treadle.dash.run_folder import MetricsFile
from treadle.report.history import HistoryReader
from treadle.track.files import JsonlTracker, read_steps

NOT_UTF8 = b"\xff\xfe\x00 not text \xc3\x28"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "not UTF-8": lambda file: file.write_bytes(NOT_UTF8),
    "a list": lambda file: file.write_bytes(b"[1, 2]"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}
# The files of a finished run, and the verbs that read them.
READ_BY = {
    "config.json": ("report", "top", "doctor"),
    "request.json": ("report",),
    "summary.json": ("report", "doctor"),
    "versions.json": ("report",),
    "metrics.jsonl": ("report", "top"),
    "evals/step-0.json": ("report", "top"),
    "logs/trainer.log": ("report", "top", "doctor"),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run that took two steps leaves behind."""
    folder = tmp_path / "runs" / "20260102-030405-echo"
    (folder / "evals").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "checkpoints").mkdir()
    (folder / "hub.sqlite").touch()
    places = {"train.metrics_file": folder / "metrics.jsonl", "env.data_dir_to_save_evals": folder / "evals"}
    places |= {"train.save_path": folder / "checkpoints", "hub.database": folder / "hub.sqlite"}
    save_run(load_run(None, {"env.name": "echo", "steps": 2, **places}), folder / "config.json")
    rows = [{"step": step, "reward": 0.5, "perf/step_s": 1.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evals" / "step-0.json").write_text(
        json.dumps({"step": 0, "accuracy": 0.5, "samples": [{"prompt": "a"}]})
    )
    for name in ("request.json", "summary.json", "versions.json"):
        (folder / name).write_text(json.dumps({"steps": 2}))
    (folder / "logs" / "trainer.log").write_text("2026-01-02T03:04:05.678 INFO    trainer ready\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREADLE_PARENT_PID", raising=False)
    return folder


def ended_with(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run a verb; return its exit code and what it wrote to stderr. A traceback would be an exception here."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_a_configuration_that_cannot_be_read_is_an_error(damage, suffix, tmp_path, capsys) -> None:
    file = tmp_path / f"run.{suffix}"
    file.write_text(json.dumps({"env": {"group_size": 8}}) if suffix != "toml" else "[env]\ngroup_size = 8")
    DAMAGES[damage](file)
    code, error_text = ended_with(capsys, "env", "no-such-environment", "validate", "--config", str(file))
    assert code == 2
    is_readable = damage == "empty" and suffix != "json"
    assert ("unknown environment" if is_readable else str(file)) in error_text


@pytest.mark.parametrize("section", ["env = 3", "train = [1]"])
def test_a_section_that_holds_no_settings_is_an_error(section, tmp_path, capsys) -> None:
    (tmp_path / "run.toml").write_text(section)
    flags = ("--config", str(tmp_path / "run.toml"), "--env.task", "x", "--train.objective", "dapo")
    code, error_text = ended_with(capsys, "run", *flags)
    assert code == 2
    assert "run.toml" in error_text


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_a_run_is_named_or_left_out_of_the_report(damage, run, capsys, tmp_path) -> None:
    whole = shutil.copytree(run, tmp_path / "whole")
    for name, verbs in READ_BY.items():
        DAMAGES[damage](run / name)
        for verb in verbs:
            code, error_text = ended_with(capsys, verb, str(run), *(["--once"] if verb == "top" else []))
            assert code in ((2,) if name == "config.json" else (0, 2)), f"{verb}, {name}: {error_text}"
        shutil.rmtree(run)
        shutil.copytree(whole, run)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "request.json", "summary.json"])
def test_a_damaged_file_of_a_run_stops_resume_or_is_left_out(damage, name, run, capsys, monkeypatch) -> None:
    def stop_here(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.launch.job.held_ports", stop_here)  # from here on nothing is read that a user names
    DAMAGES[damage](run / name)
    code, error_text = ended_with(capsys, "run", "--resume", str(run), "--plain")
    assert code in (2, 130), error_text


@pytest.mark.parametrize("verb", ["report", "top", "chat", "doctor", "run --resume"])
@pytest.mark.parametrize("path", ["runs/20260102-030405-echo", "~no-such-user/run", "a/file/in/the/way"])
def test_every_verb_names_a_run_that_was_deleted(verb, path, run, tmp_path, capsys) -> None:
    shutil.rmtree(run)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    if verb == "chat" and not path.startswith("runs"):
        return  # it may be a model then, which a process of its own looks for
    code, error_text = ended_with(capsys, *verb.split(), path)
    assert code == 2
    assert len(error_text.splitlines()) <= 2
    assert error_text.startswith("treadle: ")
    assert ("without ~" if path.startswith("~") else Path(path).name) in error_text


def test_lines_of_metrics_that_are_not_utf8_are_left_out(run) -> None:
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 3, "reward": "\xff\xfe"}\n' + b'{"step": 10e400, "reward": 1' + NOT_UTF8)
    assert [row["step"] for row in read_steps(file)] == [1, 2]
    assert HistoryReader(file, run / "evals").read().last_step == 2
    with MetricsFile(file).columns() as columns:
        assert list(columns.steps) == [1, 2]
    tracker = JsonlTracker(file)  # as a resumed trainer does
    tracker.truncate_after(2)
    tracker.log(3, {"reward": 0.75})
    tracker.close()
    assert file.read_bytes() == whole + b'{"step": 3, "reward": 0.75}\n'


def test_a_number_that_no_float_can_hold_does_not_stop_the_page(run) -> None:
    file = run / "metrics.jsonl"
    with file.open("a") as more:
        more.write(f'{{"step": 3, "reward": {10**400}}}\n{{"step": {10**30}, "reward": 1}}\n')
    with MetricsFile(file).columns() as columns:
        assert list(columns.steps) == [1, 2, 3]
    assert HistoryReader(file, run / "evals").read().values("reward")[:2] == [0.5, 0.5]
