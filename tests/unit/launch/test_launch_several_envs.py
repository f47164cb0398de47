"""A run with several environments: its plan, its folder, and what is shown of it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_launch_plan import FACTS, RUN
from test_launch_replay import begin, started_runs, treadle  # noqa: F401

from tests.written_run import evaluation, step_values
from treadle.config import RunConfig, load_run
from treadle.config.values import explicit_keys
from treadle.dash.run_folder import RunFolder
from treadle.dash.status import result_in_words
from treadle.launch.preflight import run_label
from treadle.launch.process_plan import RunPlan, build_plan, shares_of
from treadle.launch.process_spec import AccessTokens
from treadle.launch.view import PlainView, ViewState, current_phase, draw
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, role_token
from treadle.report.history import reader_of
from treadle.report.page import render_report
from treadle.report.summary import Outcome, print_report, read_record, summarize

MIX = {"env": "arithmetic:3,echo:1", "train.batch_size": 16, "env.group_size": 4}


def plan_for(flags: dict[str, object]) -> RunPlan:
    config = load_run(None, flags)
    return build_plan(
        config, FACTS, run_folder=RUN, model_folder="/m", is_model_local=True, explicit=explicit_keys(config),
        tokens=AccessTokens(hub="h" * 32),
    )  # fmt: skip


def test_each_environment_is_a_process_with_its_name_log_and_token() -> None:
    plan = plan_for(MIX)
    specs = {spec.name: spec for spec in plan.processes}
    assert list(specs) == ["hub", "engine", "env-arithmetic", "env-echo", "trainer"]
    assert specs["env-echo"].argv[3:6] == ("env", "echo", "serve")
    assert specs["env-echo"].log_path == RUN / "logs" / "env-echo.log"
    assert specs["env-echo"].env[HUB_TOKEN_VARIABLE] == role_token("h" * 32, "environment")
    for env in plan.config.envs:
        assert env.data_dir_to_save_evals == RUN / "evals" / env.own_name
        assert (env.wandb_name, env.num_environments) == (env.own_name, 2)
        assert (env.hub_url, env.state_dir) == (plan.hub_url, RUN / "env")
    assert run_label(plan.config) == "arithmetic+echo"


def test_a_batch_waits_for_the_whole_groups_of_each_share() -> None:
    assert [env.min_batch_allocation for env in plan_for(MIX).config.envs] == [0.75, 0.25]
    assert shares_of(load_run(None, MIX | {"env": "arithmetic:0.7,echo:0.3"}), frozenset()) == [0.5, 0.25]
    assert shares_of(load_run(None, MIX | {"env": "arithmetic:0.9,echo:0.1"}), frozenset()) == [0.75, 0.0]
    chosen = plan_for(MIX | {"env.min_batch_allocation": 0.1}).config.envs
    assert [env.min_batch_allocation for env in chosen] == [0.1, 0.1]


def test_a_saved_run_with_several_environments_starts_again(started_runs: list[RunPlan], capsys) -> None:  # noqa: F811
    first = begin(**MIX, **{"env.num_eval": 8})
    assert first.name.endswith("-arithmetic+echo")
    assert treadle("run", "--config", str(first / "config.json"), "--env.num-eval", "4", "--plain") == 130
    assert treadle("run", "--resume", str(first), "--steps", "30", "--plain") == 130
    old, new, resumed = (plan.config for plan in started_runs)
    assert [(env.name, env.pace, env.inference_weight, env.num_eval) for env in new.envs] == [
        ("arithmetic", "stream", 3.0, 4), ("echo", "stream", 1.0, 4),
    ]  # fmt: skip
    assert new.envs[0].state_dir != old.envs[0].state_dir
    assert (resumed.envs, resumed.steps) == (old.envs, 30)
    capsys.readouterr()
    assert treadle("run", "--resume", str(first), "--env", "gsm8k,echo", "--plain") == 2
    assert "a run keeps its env" in capsys.readouterr().err


@pytest.mark.parametrize(("minimum", "shares"), [(0.5, [0.5, 0.5]), (0.1, [0.5, 0.1]), (1.0, [0.0, 1.0])])
def test_a_minimum_above_a_share_by_weight_survives_a_resume(
    minimum: float,
    shares: list[float],
    started_runs: list[RunPlan],  # noqa: F811
) -> None:
    first = begin(**MIX | {"env": "arithmetic:0.7,echo:0.3", "envs.1.min_batch_allocation": minimum})
    assert treadle("run", "--resume", str(first), "--steps", "30", "--plain") == 130
    assert [[env.min_batch_allocation for env in plan.config.envs] for plan in started_runs] == [shares, shares]


def test_a_resumed_run_asks_one_environment_for_its_secret(started_runs: list[RunPlan], capsys) -> None:  # noqa: F811
    first = begin(**MIX, **{"envs.1.args": '{"api_key": "sk-1"}'})
    resume = ("run", "--plain", "--resume", str(first))
    assert treadle(*resume) == 2
    assert "give --envs.1.args again" in capsys.readouterr().err
    assert treadle(*resume, "--envs.1.args", '{"api_key": "sk-2"}') == 130
    assert treadle("run", "--plain", "--output", "runs", "--envs.1.args", '{"api_key": "sk-3"}', "--resume") == 130
    assert [[env.args for env in plan.config.envs] for plan in started_runs] == [
        [{}, {"api_key": key}] for key in ("sk-1", "sk-2", "sk-3")
    ]
    assert treadle(*resume, "--envs.1.task", "x") == 2
    assert "a run keeps its envs.1.task" in capsys.readouterr().err


def test_evaluations_are_read_where_the_plan_puts_them(tmp_path: Path) -> None:
    config = load_run(None, {**MIX, "envs.1.wandb_name": "easy one/two"})
    plan = build_plan(config, FACTS, run_folder=tmp_path / "old", model_folder="/m", is_model_local=True)
    folder = plan.config.envs[1].data_dir_to_save_evals
    assert folder is not None
    folder.mkdir(parents=True)
    (tmp_path / "old").rename(tmp_path / "new")
    found = reader_of(plan.config, tmp_path / "new").folders_by_env
    assert found["easy one/two"] == tmp_path / "new" / folder.relative_to(tmp_path / "old")


def test_mistakes_in_all_environments_are_named_at_once(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert treadle("run", "--env", "arithmetik,ecko", "--plain") == 2
    output = capsys.readouterr().err
    assert "arithmetik" in output
    assert "ecko" in output


def test_the_memory_plan_is_that_of_the_longest_completions(capsys) -> None:
    sizes = {}
    for names in ("arithmetic", "gsm8k", "arithmetic,gsm8k"):
        treadle("plan", "--env", names, "--model", "Qwen3-0.6B", "--gpu", "h100", "--json")
        (place, *_) = json.loads(capsys.readouterr().out)["places"]
        sizes[names] = place["peak"]
    assert sizes["arithmetic,gsm8k"] == sizes["gsm8k"] > sizes["arithmetic"]


def write_mixed_run(folder: Path, *, steps: int = 50, measured: tuple[str, ...] = ("arithmetic", "echo")) -> RunConfig:
    folder.mkdir()
    lines = [json.dumps(step_values(step)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    for env, before, after in (("arithmetic", 0.1, 0.9), ("echo", 0.3, 0.5)):
        place = folder / "evals" / env
        place.mkdir(parents=True)
        (place / "0.json").write_text(json.dumps(evaluation(0, {env: False}, before) | {"num_prompts": 100}))
        if env in measured:
            (place / "50.json").write_text(json.dumps(evaluation(50, {env: True}, after) | {"num_prompts": 100}))
    config = load_run(None, {**MIX, "steps": 50, "train.metrics_file": folder / "metrics.jsonl"})
    envs = [
        env.model_copy(update={"data_dir_to_save_evals": folder / "evals" / env.name, "wandb_name": env.name})
        for env in config.envs
    ]
    config = config.model_copy(update={"envs": tuple(envs)})
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json", exclude={"env"})))
    return config


def test_health_events_are_read_beside_the_metrics_wherever_these_are(tmp_path: Path) -> None:
    config = write_mixed_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run" / "metrics.jsonl").rename(elsewhere / "m.jsonl")
    (elsewhere / "health.jsonl").write_text('{"step": 1, "message": "mean_kl 0.61"}\n')
    train = config.train.model_copy(update={"metrics_file": elsewhere / "m.jsonl"})
    history = reader_of(config.model_copy(update={"train": train}), tmp_path / "run").read()
    assert [str(event) for event in history.health] == ["step 1: mean_kl 0.61"]


def test_held_out_accuracy_is_shown_for_each_environment(tmp_path: Path) -> None:
    config = write_mixed_run(tmp_path / "run")
    history = reader_of(config, tmp_path / "run").read()
    assert [one.accuracy for one in history.evaluations] == pytest.approx([0.2, 0.7])
    assert history.evaluations[0].low == pytest.approx(0.2 - 0.01 / 2**0.5)
    summary = summarize(config, tmp_path / "run", history, Outcome(is_complete=True, total_s=9.0))
    assert summary.held_out_by_env["echo"]["after"]["accuracy"] == 0.5
    printed = StringIO()
    print_report(summary, Console(file=printed, width=140))
    assert "arithmetic                    10.0 % (9.0 to 12.0) -> 90.0 %" in printed.getvalue()
    assert "echo                          30.0 % (29.0 to 32.0) -> 50.0 %" in printed.getvalue()
    lines = StringIO()
    state = ViewState(config, "run")
    view = PlainView(lines)
    view.update(state)
    state.history = history
    view.update(state)
    assert "held-out accuracy of echo at step 50: 50.0 %" in lines.getvalue()
    shown = StringIO()
    Console(file=shown, width=120).print(draw(state))
    assert "arithmetic + echo" in shown.getvalue()
    assert "30.0 % at step 0  →  50.0 % at step 50" in shown.getvalue()
    page = render_report(read_record(tmp_path / "run"))
    assert "echo: Held-out accuracy was 30.0 %" in page
    assert '"held_out_envs":["arithmetic","echo"]' in page
    assert "envs.1.inference_weight" in page


def test_a_run_is_measured_when_all_its_environments_are(tmp_path: Path) -> None:
    config = write_mixed_run(tmp_path / "run", measured=("echo",))
    history = reader_of(config, tmp_path / "run").read()
    assert current_phase(history, config) == "measuring held-out accuracy after training"
    assert [one.step for one in RunFolder(tmp_path / "run").held_out()] == [0]


def test_the_page_knows_the_accuracy_of_each_environment(tmp_path: Path) -> None:
    write_mixed_run(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert result_in_words(run.held_out()).startswith("held-out accuracy 20.0 % → 70.0 %")
    assert result_in_words(run.held_out_by_env()["echo"]).startswith("held-out accuracy 30.0 % → 50.0 %")
