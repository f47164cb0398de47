"""`treadle run --fit` as a user meets it: the plan's remedy is applied, shown, and saved with the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_launch_replay import started_runs, treadle  # noqa: F401

from treadle import support
from treadle.budget import command, request
from treadle.budget.command import _value_before
from treadle.config import RunConfig, load_run
from treadle.launch.folder import newest_run
from treadle.launch.process_plan import RunPlan

BASE = ("run", "--plain", "--output", "runs")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A CPU machine with this much memory."""

    def with_gb(size: float) -> None:
        monkeypatch.setattr(request, "find_gpus", lambda _: ())
        monkeypatch.setattr(request, "host_memory", lambda: round(size * 1e9))

    monkeypatch.setattr(support, "processor_flags", lambda: frozenset({"amx_bf16"}))
    return with_gb


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    runs: list[RunConfig] = []
    monkeypatch.setattr("treadle.launch.start", lambda config, **_: runs.append(config) or 0)
    return runs


def test_what_fits_already_is_not_changed(machine, started: list[RunConfig], capsys) -> None:
    machine(64)
    assert treadle(*BASE, "--fit", "--train.device", "cpu") == 0
    assert "--fit changes nothing: host" in capsys.readouterr().out
    assert not started[0].train.gradient_checkpointing


def test_the_first_remedy_of_the_plan_is_applied_flag_by_flag(machine, started: list[RunConfig], capsys) -> None:
    machine(4)
    assert treadle("plan", "--train.device", "cpu", "--host-memory-gb", "4", "--json") == 1
    remedy = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert treadle(*BASE, "--fit", "--train.device", "cpu") == 0
    output = capsys.readouterr().out.splitlines()
    changes = [line.removeprefix("--fit sets ").partition(" (was ")[0] for line in output if "--fit sets" in line]
    assert " ".join(changes) == remedy["flags"]
    assert output[-1].endswith(f"of 4.00 GB: {remedy['verdict']}")
    for change in changes:
        flag, value = change.split()
        section, _, key = flag.removeprefix("--").replace("-", "_").partition(".")
        assert str(getattr(getattr(started[0], section), key)).lower() == value


@pytest.mark.parametrize(
    ("batch", "words"), [(4, ()), (6, ()), (4, ("--env", "arithmetic,echo")), (4, ("--env.group-size", "2"))]
)
def test_a_small_batch_has_remedies_too(batch: int, words: tuple[str, ...], machine, started, capsys) -> None:
    machine(4)
    assert treadle(*BASE, "--fit", "--train.device", "cpu", "--train.batch-size", str(batch), *words) == 0
    assert "--fit sets --" in capsys.readouterr().out
    assert len(started) == 1


def test_what_treadle_run_refuses_is_no_remedy() -> None:
    run = load_run(None, {"train.batch_size": 6, "env.group_size": 4})
    assert not command.accepts(run, ())
    assert command.accepts(run, ("--env.group-size 3",))


def test_a_change_shows_the_values_of_all_environments() -> None:
    run = load_run(None, {"env": "arithmetic,echo", "envs.0.max_token_length": 64, "envs.1.max_token_length": 512})
    assert _value_before(run, "--env.max-token-length 32") == "64, 512"
    assert _value_before(run, "--train.lora true") == "false"


def test_nothing_is_started_when_nothing_fits(machine, started: list[RunConfig], capsys) -> None:
    machine(0.5)
    assert treadle(*BASE, "--fit", "--train.device", "cpu") == 2
    output = capsys.readouterr().err
    assert "no setting that the plan tries makes it fit" in output
    assert "does not fit on this machine's CPU, and --fit found no settings with which it does" in output
    assert started == []


def test_the_saved_run_has_what_fit_changed(machine, started_runs: list[RunPlan], capsys) -> None:  # noqa: F811
    machine(8)
    assert treadle(*BASE, "--fit", "--model", "model", "--train.device", "cpu", "--engine.device", "cpu") == 130
    changes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--fit sets")]
    assert changes
    run = newest_run(Path("runs"))
    for name in ("request.json", "config.json"):
        saved = json.loads((run / name).read_text())
        for line in changes:
            section, key = line.split()[2].removeprefix("--").replace("-", "_").split(".")
            assert str(saved[section][key]).lower() == line.split()[3]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--resume", "x"), "--resume cannot be with --fit"),
        (("--model", "some/new-model"), "--fit cannot plan this run"),
    ],
)
def test_fit_is_refused_where_it_cannot_plan(words: tuple[str, ...], says: str, started, capsys) -> None:
    assert treadle(*BASE, "--fit", *words) == 2
    assert says in capsys.readouterr().err
    assert started == []
