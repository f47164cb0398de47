"""A whole run with stand-ins for its processes, and what is around it: lock, resume, disk, model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from transformers import LlamaConfig

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from tests.written_run import evaluation, step_values, write_run
from treadle.config import RunConfig, load_run, save_run
from treadle.config.values import explicit_keys, with_fitting_groups
from treadle.envs.base import load_environment
from treadle.errors import ConfigError, DiskFull, ModelError, ProcessDied, UserError
from treadle.launch import folder as run_folders
from treadle.launch import resume
from treadle.launch.chat_command import find_model
from treadle.launch.job import RunSession, has_engines, start_run
from treadle.launch.monitor import MemorySampler, resident_bytes
from treadle.launch.preflight import check_one_model, resolve_environment
from treadle.launch.process_plan import RunPlan
from treadle.report.history import History, reader_of
from treadle.report.summary import Outcome, save_summary, summarize
from treadle.wire.engines import EngineVerdict, EngineVerdicts, ServedEngine
from treadle.wire.hub import ProcessReport


@pytest.fixture
def plan(tmp_path: Path, make_spec, server_code) -> RunPlan:
    """Two steps by a trainer that writes metrics, beside an environment that writes evaluations."""
    hub, engine = free_port(), free_port()
    write = "import pathlib; pathlib.Path({!r}).{}"
    # Like the real one, the trainer starts first and takes no step before the environment has worked.
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'evals' / '0.json')!r}): time.sleep(0.05)\n"
    lines = "".join(json.dumps(step_values(step)) + "\n" for step in (1, 2))
    before = json.dumps(evaluation(0, {"a": False}, 0.0))
    (tmp_path / "evals").mkdir()
    config = load_run(
        None,
        {
            "steps": "2",
            "train.metrics_file": tmp_path / "metrics.jsonl",
            "env.data_dir_to_save_evals": tmp_path / "evals",
        },
    )
    return RunPlan(
        config,
        tmp_path,
        (
            make_spec("hub", server_code(hub), ready_url=f"http://127.0.0.1:{hub}/healthz"),
            make_spec("engine", server_code(engine), ready_url=f"http://127.0.0.1:{engine}/health"),
            make_spec("env", write.format(str(tmp_path / "evals" / "0.json"), f"write_text({before!r})")),
            make_spec("trainer", wait + write.format(str(tmp_path / "metrics.jsonl"), f"write_text({lines!r})")),
        ),
        f"http://127.0.0.1:{hub}",
    )


def test_a_run_runs_to_its_end(plan: RunPlan, capsys: pytest.CaptureFixture[str]) -> None:
    session = RunSession(plan, reader_of(plan.config, plan.run_folder))
    session.run(plain=True)
    assert session.outcome().is_complete
    out = capsys.readouterr().out
    assert out.startswith("starting hub and engine...")
    assert "step   2/2" in out


def test_a_trainer_that_stops_short_is_no_success(plan: RunPlan) -> None:
    (plan.run_folder / "metrics.jsonl").write_text('{"step": 1}\n')
    short = RunPlan(plan.config.model_copy(update={"steps": 9}), plan.run_folder, plan.processes, plan.hub_url)
    session = RunSession(short, reader_of(short.config, short.run_folder))
    with pytest.raises(ProcessDied, match="trainer ended before its last step"):
        session.run(plain=True)
    assert not session.outcome().is_complete


def test_ctrl_c_ends_a_run_in_order(plan: RunPlan, make_spec, capsys: pytest.CaptureFixture[str]) -> None:
    patient = make_spec("trainer", "import time; time.sleep(60)")
    endless = RunPlan(plan.config, plan.run_folder, (*plan.processes[:3], patient), plan.hub_url)
    session = RunSession(endless, reader_of(endless.config, endless.run_folder))

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not patient.log_path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    session.run(plain=True)
    assert not session.outcome().is_complete
    assert session.outcome().total_s < 50
    assert "stopping" in capsys.readouterr().out


def test_a_run_folder_has_one_launcher_at_a_time(tmp_path: Path) -> None:
    with (
        run_folders.locked(tmp_path),
        pytest.raises(ConfigError, match="is going on"),
        run_folders.locked(tmp_path),
    ):
        pass
    with run_folders.locked(tmp_path):
        pass


def test_a_deleted_lock_file_lets_no_second_launcher_in(tmp_path: Path) -> None:
    with run_folders.locked(tmp_path):
        (tmp_path / ".lock").unlink()
        assert run_folders.is_run_live(tmp_path)
        with pytest.raises(ConfigError, match="is going on"), run_folders.locked(tmp_path):
            pass
    assert not run_folders.is_run_live(tmp_path)


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = {run_folders.create_run_folder(tmp_path / "runs", "arithmetic-addition") for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.is_dir() for folder in folders)


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_reported_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "not" / "yet" / "there"
    for free, says in ((1e9, None), (3e9, "only 3.00 GB are free"), (9e9, "")):
        monkeypatch.setattr(run_folders.shutil, "disk_usage", lambda _, free=free: Usage(1e10, 0, free))
        if says is None:
            with pytest.raises(DiskFull, match=r"only 1\.00 GB"):
                run_folders.check_disk_space(output)
        else:
            assert run_folders.check_disk_space(output).startswith(says)


def test_weights_are_removed_with_what_describes_them(tmp_path: Path) -> None:
    for name in ("run-1.weights", "run-1.weights.json", "run-10.weights"):
        (tmp_path / name).touch()
    run_folders.remove_weights(tmp_path / "run-1.weights")
    assert [path.name for path in tmp_path.iterdir()] == ["run-10.weights"]


def test_what_a_killed_launcher_left_in_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", tmp_path)
    for name in ("treadle-run-1-7.weights", "treadle-run-1-8.weights.gate", "treadle-run-10-7.weights"):
        (tmp_path / name).touch()
    run_folders.remove_stale_weights(Path("runs/run-1"))
    assert [path.name for path in tmp_path.iterdir()] == ["treadle-run-10-7.weights"]


def test_what_the_user_gave_is_known_again_on_resume(tmp_path: Path) -> None:
    config = load_run(None, {"hub.port": "8100", "engine.threads": "3"})
    run_folders.save_request(config, tmp_path)
    assert run_folders.requested_keys(tmp_path) == {"hub.port", "engine.threads"}
    (tmp_path / "request.json").unlink()
    with pytest.raises(ConfigError, match=r"request\.json, which lists the settings that you gave, is missing"):
        run_folders.requested_keys(tmp_path)


def test_resume_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        resume(tmp_path, {}, plain=True)


def test_resume_cannot_change_what_a_run_is_about(tmp_path: Path) -> None:
    save_run(RunConfig(), tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"keeps its env\.task"):
        resume(tmp_path, {"env.task": "larger"}, plain=True)


def test_resuming_a_complete_run_shows_its_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path)
    save_run(config, tmp_path / "config.json")
    history: History = reader_of(config, tmp_path).read()
    save_summary(summarize(config, tmp_path, history, Outcome(True, 200.0)), tmp_path)
    assert resume(tmp_path, {}, plain=True) == 0
    out = capsys.readouterr().out
    assert "this run is complete" in out
    assert "73.0 %" in out


def test_a_run_has_one_model() -> None:
    config = load_run(None, {"engine.model": "other"})
    with pytest.raises(ConfigError, match="run's model is 'smollm2-135m-instruct'") as caught:
        check_one_model(config, explicit_keys(config))
    assert caught.value.fix == "--model other"


def test_chat_finds_the_result_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "checkpoints").mkdir(parents=True)
    save_run(RunConfig(), run / "config.json")
    with pytest.raises(ModelError, match="has no trained model yet"):
        find_model(str(run), tmp_path)
    with pytest.raises(ModelError, match="no finished run"):
        find_model(None, tmp_path / "runs")
    for name in ("final_adapter", "final_model"):  # of a run with --train.merge-final, the latter is written last
        (run / "checkpoints" / name).mkdir()
        assert find_model(str(run), tmp_path) == run / "checkpoints" / name
        assert find_model(None, tmp_path / "runs") == run / "checkpoints" / name


def test_chat_finds_a_result_that_was_saved_elsewhere_and_an_adapter(tmp_path: Path) -> None:
    run, adapter = tmp_path / "runs" / "one", tmp_path / "saved" / "final_adapter"
    run.mkdir(parents=True)
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    run_folders.save_request(RunConfig(), run)
    save_run(load_run(None, {"train.save_path": tmp_path / "saved"}), run / "config.json")
    assert find_model(str(run), tmp_path) == adapter
    assert find_model(str(adapter), tmp_path) == adapter


def test_a_model_with_a_folder_of_checkpoints_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert run_folders.is_run(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not run_folders.is_run(tmp_path)


HOARD = "data = b'x' * 80_000_000; print('full', flush=True); import time; time.sleep(60)"


def memory_while_full(spec) -> MemorySampler:
    """Sampled when the process, or what it has started, holds 80 MB."""
    from treadle.launch.supervisor import StopRequest, Supervisor

    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([spec])
        sampler = MemorySampler(lambda: supervisor.pids)
        while "full" not in spec.log_path.read_text():
            pass
        sampler.sample()
        for process in psutil.Process(supervisor.pids[spec.name]).children():
            process.kill()
    return sampler


def test_memory_counts_the_launcher_and_each_child_by_name(make_spec) -> None:
    sampler = memory_while_full(make_spec("trainer", HOARD))
    assert sampler.peak_by_process["trainer"] > 80_000_000
    assert sampler.peak_bytes >= sampler.peak_by_process["trainer"] + sampler.peak_by_process["launcher"]


def test_memory_of_a_grandchild_in_another_session_counts_for_the_child(make_spec) -> None:
    """As vLLM's server is, which the engine process starts."""
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOARD!r}], start_new_session=True)"
    assert memory_while_full(make_spec("engine", starts)).peak_by_process["engine"] > 80_000_000


def test_memory_is_measured_exactly_only_when_it_has_grown() -> None:
    measured = []
    hoard = bytearray(1)

    def measure(process: psutil.Process) -> int:
        measured.append(process.pid)
        return 2 * resident_bytes(process)

    sampler = MemorySampler(dict, measure=measure)
    for _ in range(5):
        sampler.sample()
    before = sampler.peak_bytes
    assert measured.count(os.getpid()) == 1
    assert sampler.now_bytes == pytest.approx(before, rel=0.05)  # scaled as at the exact sample
    hoard.extend(bytes(50_000_000))
    sampler.sample()
    assert measured.count(os.getpid()) == 2
    assert sampler.peak_bytes > before + 80_000_000


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "exit code -9, ended by SIGKILL, perhaps out of memory",
    "ValueError: No available memory for the cache blocks.",
    "ValueError: Free memory on device (1.2/79.1 GiB) is less than desired GPU memory utilization (0.5, 39.5 GiB).",
)


@pytest.mark.parametrize("words", NO_MEMORY)
def test_a_run_that_runs_out_of_memory_shows_what_takes_less(words, tmp_path, monkeypatch, capsys) -> None:
    def die(*_: object, **__: object) -> None:
        raise ProcessDied(f"the trainer ended: {words}", fix="less")

    folder = tmp_path / "model"
    LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16).save_pretrained(folder)
    monkeypatch.setattr(RunSession, "run", die)
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(folder))
    with pytest.raises(ProcessDied):
        start_run(load_run(None, {"output": tmp_path / "runs"}), plain=True)
    assert "--train.optimizer adamw_8bit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "group_size"),
    [({"train.batch_size": 4}, 4), ({"train.batch_size": 1, "train.gradient_accumulation_steps": 2}, 2), ({}, 8),
     ({"train.batch_size": 4, "env.group_size": 2}, 2), ({"train.batch_size": 4, "env.group_size": 8}, 8)],
)  # fmt: skip
def test_groups_are_no_larger_than_a_batch_unless_they_were_chosen(asked: dict[str, int], group_size: int) -> None:
    config = load_run(None, asked)
    assert with_fitting_groups(config, explicit_keys(config)).env.group_size == group_size


def test_an_agents_command_reaches_the_environment_process(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer": "4"}\n')
    args = {"command": "python agent.py", "time_limit_s": 5.0, "rewards": ["exact_match"]}
    asked = {"env.name": "agent", "env.data": str(tmp_path / "rows.jsonl"), "env.args": json.dumps(args)}
    config = load_run(None, asked)
    settled = config.model_copy(update={"env": resolve_environment(config.env)})
    save_run(settled, tmp_path / "config.json")
    env = load_run(tmp_path / "config.json").env  # as `treadle env agent serve --config` reads it
    assert env.args == args | {"working_dir": str(Path.cwd())}
    assert not load_environment(env).waits_for_agents


def test_an_agent_without_a_command_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    asked = {"env.name": "agent", "env.data": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "runs")}
    with pytest.raises(ConfigError, match="nothing in this run would start its agents") as refused:
        start_run(load_run(None, asked), plain=True)
    assert '--env.args \'{"command": ' in refused.value.fix
    assert not (tmp_path / "runs").exists()


def bad_token_file(tmp_path: Path, kind: str) -> Path:
    file = tmp_path / "token"
    if kind == "a folder":
        file.mkdir()
    else:
        file.write_text("" if kind == "empty" else "a-token-of-a-test-0123456789")
        file.chmod(0o644 if kind == "readable by others" else 0o600)
    return file


@pytest.mark.parametrize("key", ["hub.token_file", "hub.admin_token_file", "engine.token_file"])
@pytest.mark.parametrize("kind", ["a folder", "empty", "readable by others"])
def test_a_bad_token_file_is_refused_before_anything_is_made(kind: str, key: str, tmp_path: Path) -> None:
    asked = {key: bad_token_file(tmp_path, kind), "output": tmp_path / "runs", "model": "no-such-model"}
    with pytest.raises(ConfigError, match="token"):
        start_run(load_run(None, asked), plain=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "asked", [{"env.max_age": 1, "train.max_age": 0}, {"hub.database": ":memory:"}], ids=["ages", "database"]
)
def test_contradictory_settings_are_refused_before_anything_is_made(asked, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path))
    with pytest.raises(ConfigError):
        start_run(load_run(None, asked | {"output": tmp_path / "runs"}), plain=True)
    assert not (tmp_path / "runs").exists()


RELATIVE = {
    "model": "model", "output": "runs", "hub.database": "q.sqlite", "hub.token_file": "hub.token",
    "hub.admin_token_file": "admin.token", "engine.token_file": "engine.token", "engine.weights_file": "weights",
    "engine.adapter_root": "adapters", "env.data": "rows.jsonl", "env.eval_data": "test.jsonl", "env.state_dir": "env",
    "env.data_dir_to_save_evals": "evals", "env.data_path_to_save_groups": "groups.jsonl", "train.live_path": "live",
    "train.save_path": "saved", "train.metrics_file": "metrics.jsonl", "train.vllm_config_path": "bridge.json",
}  # fmt: skip


def test_paths_of_a_run_do_not_depend_on_the_folder_it_is_resumed_in(tmp_path, monkeypatch) -> None:
    begun_in, resumed_in = tmp_path / "begun", tmp_path / "resumed"
    write_tiny_model(begun_in / "model")
    resumed_in.mkdir()
    for number, name in enumerate(("rows.jsonl", "test.jsonl")):
        (begun_in / name).write_text(json.dumps({"prompt": f"{number} + 1?", "answer": str(number + 1)}))
    started_runs: list[RunConfig] = []
    monkeypatch.setattr(RunSession, "run", lambda session, **_: started_runs.append(session._plan.config))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(begun_in / "model"))
    monkeypatch.chdir(begun_in)
    start_run(load_run(None, RELATIVE | {"env.name": "jsonl"}), plain=True)
    (run,) = (begun_in / "runs").iterdir()
    monkeypatch.chdir(resumed_in)
    resume(run, {}, plain=True)
    for config in started_runs:
        saved = config.model_dump(mode="json")
        for key, path in RELATIVE.items():
            section, _, name = key.rpartition(".")
            assert (saved[section] if section else saved)[name] == str(begun_in / path), key
    assert len(started_runs) == 2
    assert list(resumed_in.iterdir()) == []


def test_an_agent_is_started_where_its_command_was_given_also_by_resume(tmp_path, monkeypatch) -> None:
    begun_in, resumed_in = tmp_path / "begun", tmp_path / "resumed"
    for folder in (begun_in, resumed_in):
        folder.mkdir()
        (folder / "agent").write_text("#!/bin/sh\n")
        (folder / "agent").chmod(0o755)
    (begun_in / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?", "answer": "1"}) + "\n" for i in (1, 2)))
    started_runs: list[RunConfig] = []
    monkeypatch.setattr(RunSession, "run", lambda session, **_: started_runs.append(session._plan.config))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path))
    monkeypatch.chdir(begun_in)
    command = json.dumps({"command": "./agent"})
    asked = {"env.name": "agent", "env.data": "rows.jsonl", "env.args": command, "output": "runs"}
    start_run(load_run(None, asked), plain=True)
    (run,) = (begun_in / "runs").iterdir()
    monkeypatch.chdir(resumed_in)
    (begun_in / "agent").rename(begun_in / "moved")
    with pytest.raises(ConfigError, match=f"cannot start '{begun_in / 'agent'}'"):
        resume(run, {}, plain=True)
    (begun_in / "moved").rename(begun_in / "agent")
    resume(run, {}, plain=True)
    resume(run, {"env.args": command}, plain=True)  # another command of the same name
    monkeypatch.chdir(tmp_path)
    resume(run, {}, plain=True)
    given_in = [begun_in, begun_in, resumed_in, resumed_in]
    assert [config.env.args["working_dir"] for config in started_runs] == [str(folder) for folder in given_in]


def test_a_folder_deleted_while_its_run_goes_on_is_a_user_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(RunSession, "run", lambda session, **_: shutil.rmtree(session._plan.run_folder))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path))
    with pytest.raises(UserError, match="folder was deleted while the run went on"):
        start_run(load_run(None, {"output": tmp_path / "runs"}), plain=True)


def test_engines_of_a_run_are_those_that_join_or_serve_in_the_hubs_table(tmp_path: Path) -> None:
    served = ServedEngine(engine_id="a", url="http://127.0.0.1:9", model="m", dtype="float32")
    report = ProcessReport(kind="engine", name="joined", machine="m", pid=1, serves=served)
    out = EngineVerdicts(engines=[EngineVerdict(engine_id="a", url=served.url, state="out", reason="it hangs")])

    def post(route: str, body: msgspec.Struct) -> None:
        headers = {"Content-Type": "application/json"}
        httpx.post(hub.url + route, content=msgspec.json.encode(body), headers=headers).raise_for_status()

    with HubProcess(tmp_path) as hub:
        post("/v1/reports", report)
        assert has_engines(hub.url)
        post("/v1/engines/verdicts", out)
        assert not has_engines(hub.url)
    assert has_engines(hub.url), "a hub that does not answer may be starting again"
