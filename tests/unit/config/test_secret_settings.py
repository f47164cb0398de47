"""Secrets reach the processes that need them and no file: request.json, config.json, reports, trackers."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from treadle import cli
from treadle.config import RunConfig, load_run, save_run
from treadle.config.files import NOT_STORED, VARIABLE, require_secrets, secrets_in
from treadle.config.values import explicit_keys
from treadle.errors import ConfigError
from treadle.launch.attachment import merge_addresses
from treadle.launch.folder import requested_keys, save_request
from treadle.launch.machine import MachineFacts
from treadle.launch.process_plan import RunPlan, build_plan

SECRET = "sk-very-secret"  # noqa: S105 - made up
WITH_SECRETS = {
    "openai.api_key": SECRET,
    "openai.base_url": f"http://engine:9001/t/{SECRET}/v1",
    "train.hub_url": f"https://user:{SECRET}@hub:8000",
    "engine.vllm_args": f"--hf-token {SECRET} --seed 3",
    "hub.store": f"postgresql://treadle:{SECRET}@db/run",
    "env.args": json.dumps({
        "judge": {"api_key": SECRET, "url": f"http://judge?token={SECRET}"},
        "headers": {"X-Api-Key": SECRET, "Authorization": f"Bearer {SECRET}"},
        "command": f"env OPENAI_API_KEY={SECRET} python agent.py",
        "max_tokens": 5,
    }),
}  # fmt: skip


@pytest.fixture
def config() -> RunConfig:
    return load_run(None, WITH_SECRETS)


def test_no_saved_file_holds_a_secret(config: RunConfig, tmp_path: Path) -> None:
    save_request(config, tmp_path)
    save_run(config, tmp_path / "config.json")
    for file in tmp_path.iterdir():
        assert SECRET not in file.read_text(), file.name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert requested_keys(tmp_path) >= {"openai.api_key", "train.hub_url"}
    saved = load_run(tmp_path / "config.json")
    assert saved.engine.vllm_args == "--hf-token NOT-STORED --seed 3"
    assert saved.env.args["max_tokens"] == 5


def test_a_tracker_is_not_given_tokens_of_urls(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.train import process  # needs torch

    given: list[object] = []
    monkeypatch.setattr(process, "build_tracker", lambda *values: given.extend(values))
    process.open_tracker(config.train)
    settings = given[2]
    assert SECRET not in json.dumps(settings)
    assert json.dumps(settings).count(NOT_STORED) == 1


def test_settings_without_secrets_are_saved_as_they_are(tmp_path: Path) -> None:
    run = load_run(
        None, {"openai.api_key": "none", "env.data": "/data/t/rows.jsonl", "env.system_prompt": "Use @ and /t/x"}
    )
    assert secrets_in(run.model_dump(mode="json")) == {}
    save_run(run, tmp_path / "config.json")
    assert load_run(tmp_path / "config.json") == run


def test_each_process_gets_the_secrets_of_its_own_sections(config: RunConfig, tmp_path: Path) -> None:
    facts = MachineFacts(num_cores=2, has_shared_memory=False, ports={"hub": 8000, "engine": 9001})

    explicit = explicit_keys(config)

    def plan_of(config: RunConfig) -> RunPlan:
        return build_plan(config, facts, run_folder=tmp_path, model_folder="/m", is_model_local=True, explicit=explicit)

    def given(plan: RunPlan) -> dict[str, set[str]]:
        return {spec.name: set(json.loads(spec.env.get(VARIABLE, "{}"))) for spec in plan.processes}

    own_servers = given(plan_of(config))
    assert (own_servers["hub"], own_servers["engine"]) == ({"hub.store"}, {"engine.vllm_args"})
    plan = plan_of(merge_addresses(config, explicit))
    save_run(plan.config, tmp_path / "config.json")
    assert given(plan) == {
        "env": {"openai.api_key", "openai.base_url", "env.args", "env.hub_url"},
        "trainer": {"train.hub_url", "train.engine_url"},
    }
    assert not any(SECRET in word for spec in plan.processes for word in spec.argv), "every user can read these"
    env = next(spec for spec in plan.processes if spec.name == "env")
    code = "import pathlib, sys, treadle.config as c; print(c.load_run(pathlib.Path(sys.argv[1])).openai)"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "config.json")], env=dict(env.env), capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert f"api_key='{SECRET}'" in shown
    assert f"/t/{SECRET}/v1" in shown


def test_a_resumed_run_asks_for_its_secret_or_takes_it_from_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    save_run(load_run(None, {"openai.api_key": SECRET}), file)
    with pytest.raises(ConfigError, match=r"--openai\.api-key held a secret when this run began") as refused:
        require_secrets(load_run(file).model_dump(mode="json"))
    assert refused.value.fix == "give --openai.api-key again, or set TREADLE_ENGINE_TOKEN"
    require_secrets(load_run(file, {"openai.api_key": "sk-another"}).model_dump(mode="json"))
    monkeypatch.setenv("TREADLE_ENGINE_TOKEN", SECRET)
    assert load_run(file).openai.api_key == SECRET


def test_a_process_that_lacks_a_secret_of_its_sections_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(load_run(None, {"openai.api_key": SECRET, "env.name": "echo"}), tmp_path / "config.json")
    with pytest.raises(SystemExit) as ended:
        cli.main(["env", "echo", "validate", "--config", str(tmp_path / "config.json")])
    assert ended.value.code == 2
    assert "--openai.api-key held a secret when this run began" in capsys.readouterr().err
