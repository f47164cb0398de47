"""CUDA MPS for a run on one GPU. The control program is a script here; a GPU test runs the real one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.launch import mps
from treadle.launch.process_plan import RunPlan
from treadle.launch.process_spec import ProcessSpec

ENGINE = ProcessSpec("engine", ("engine",), {"A": "1"}, Path("engine.log"))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr(mps, "may_use_gpu", lambda device: True)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", tmp_path / "none")
    monkeypatch.delenv(mps.PIPES, raising=False)
    config = RunConfig(engine={"engine": "vllm"})
    return RunPlan(config, tmp_path, (ENGINE,), "http://127.0.0.1:1")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A control program that writes down its flags and its input."""
    script = tmp_path / mps.CONTROL
    script.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'calls')!r}, 'a').write("
        "' '.join(sys.argv[1:]) + ('' if len(sys.argv) > 1 else sys.stdin.read().strip()) + '\\n')\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda: (tmp_path / "calls").read_text().split()


def with_sharing(plan, how):
    train = plan.config.train.model_copy(update={"card_sharing": how})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"train": train}))


def test_the_daemon_runs_as_long_as_the_processes_and_they_find_it(plan, calls, monkeypatch):
    monkeypatch.setattr(mps, "_PROBE", "")
    said = []
    with mps.under_mps(plan, said.append) as changed:
        folder = changed.processes[0].env[mps.PIPES]
        assert Path(folder).is_dir()
        assert changed.processes[0].env["A"] == "1"
        assert calls() == ["-d"]
    assert calls() == ["-d", "quit"]
    assert not Path(folder).exists()
    assert "through CUDA MPS" in said[0]


def test_without_a_working_daemon_auto_goes_on_and_mps_is_refused(plan, calls, monkeypatch):
    monkeypatch.setattr(mps, "_PROBE", "raise SystemExit(3)")
    said = []
    with mps.under_mps(plan, said.append) as changed:
        assert changed is plan
    assert "CUDA error 3" in said[0]
    assert calls() == ["-d", "quit"]
    with pytest.raises(ConfigError, match="CUDA error 3"), mps.under_mps(with_sharing(plan, "mps"), said.append):
        pass


def test_a_daemon_of_the_user_is_used_as_it_is(plan, calls, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "control").touch()
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "own"))
    with mps.under_mps(plan, print) as changed:
        assert changed is plan
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("how", ["free", "turns"])
def test_no_daemon_is_started_for_other_ways_of_sharing(plan, calls, tmp_path, how):
    with mps.under_mps(with_sharing(plan, how), print) as changed:
        assert changed.processes == plan.processes
    assert not (tmp_path / "calls").exists()


def test_a_run_without_a_gpu_or_with_its_engine_elsewhere_shares_no_card(plan, monkeypatch):
    assert mps.shares_card(plan.config)
    assert not mps.shares_card(plan.config.model_copy(update={"engine_url": "http://gpu7:9001"}))
    monkeypatch.setattr(mps, "may_use_gpu", lambda device: False)
    assert not mps.shares_card(plan.config)
