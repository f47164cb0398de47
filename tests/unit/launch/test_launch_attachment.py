"""`treadle run --hub-url URL --engine-url URL`: one address each, real servers that are asked, and what is refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest
from test_launch_plan import FACTS, RUN

from tests.e2e.processes import free_port
from tests.hub_process import HubProcess
from treadle.config import RunConfig, load_run, save_run
from treadle.config.files import require_secrets
from treadle.config.train import FLOAT32_LR, TrainConfig
from treadle.config.values import explicit_keys
from treadle.errors import ConfigError, RunStalled
from treadle.launch import attachment, resume
from treadle.launch import folder as run_folders
from treadle.launch.attachment import attach, choose_model, merge_addresses, settle_engine, unused_settings
from treadle.launch.job import RunSession, _start_phase, start_run
from treadle.launch.monitor import SILENT_S, RunMonitor
from treadle.launch.preflight import read_tokens
from treadle.launch.process_plan import RunPlan, build_plan, server_addresses
from treadle.launch.process_spec import NO_TOKENS, AccessTokens
from treadle.net.access_tokens import role_token
from treadle.report.history import reader_of
from treadle.wire.bridge import BridgeInfo
from treadle.wire.hub import RegisterTrainer

HUB, ENGINE = "http://127.0.0.1:8300", "http://127.0.0.1:9301"
SECRET = "a-token-of-a-test-0123456789"  # noqa: S105
INFO = BridgeInfo(
    enabled=True, shared_weights=True, update_count=0, last_update_time=None, model_name="/models/smol", device="cpu",
    engine="transformers", engine_version="5", dtype="bfloat16", is_paused=False, has_lora=False, max_lora_rank=None,
    quantization="none", max_model_len=1024, max_num_seqs=64, adapter_root="/data",
)  # fmt: skip


def attached(flags: dict[str, object]) -> RunConfig:
    config = load_run(None, flags)
    return merge_addresses(config, explicit_keys(config))


def settled(flags: dict[str, object], **info: object) -> tuple[RunConfig, tuple[str, ...]]:
    flags = {"engine_url": ENGINE} | flags
    explicit = explicit_keys(load_run(None, flags))
    run, _, notes = settle_engine(attached(flags), msgspec.structs.replace(INFO, **info), explicit)
    return run, notes


def plan_of(flags: dict[str, object], tokens: AccessTokens = NO_TOKENS) -> RunPlan:
    config = attached(flags)
    facts = replace(FACTS, ports={name: port for name, (_, port) in server_addresses(config).items()})
    return build_plan(
        config, facts, run_folder=RUN, model_folder="/cache/smol", is_model_local=True,
        explicit=explicit_keys(load_run(None, flags)), tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ({"hub_url": HUB, "engine_url": ENGINE}, ["env", "trainer"]),
        ({"hub_url": HUB}, ["engine", "env", "trainer"]),
        ({"engine_url": ENGINE}, ["hub", "env", "trainer"]),
    ],
)
def test_only_what_is_missing_is_started(flags, started) -> None:
    plan = plan_of(flags)
    assert [spec.name for spec in plan.processes] == started
    assert set(server_addresses(plan.config)) == {"hub", "engine"} & set(started)
    hub, engine = flags.get("hub_url", "http://127.0.0.1:8000"), flags.get("engine_url", "http://127.0.0.1:9001")
    assert plan.hub_url == plan.config.train.hub_url == plan.config.env.hub_url == hub
    assert plan.config.train.engine_url == (engine,)
    assert plan.config.openai.base_url == (f"{engine}/v1",)
    assert _start_phase(plan).endswith(" and ".join(name for name in started if name in ("hub", "engine")) or "trainer")


@pytest.mark.parametrize(
    "flags",
    [
        {"hub_url": HUB},
        {"train.hub_url": f"{HUB}/"},
        {"env.hub_url": HUB},
        {"train.hub_url": HUB, "env.hub_url": "http://localhost:8300"},
    ],
)
def test_every_spelling_of_the_hubs_address_attaches_the_run(flags) -> None:
    config = attached(flags)
    assert config.hub_url == config.train.hub_url == config.env.hub_url == HUB
    assert not config.engine_url


@pytest.mark.parametrize(
    "flags",
    [
        {"engine_url": ENGINE},
        {"train.engine_url": ENGINE},
        {"openai.base_url": f"{ENGINE}/v1/"},
        {"train.vllm_port": "9301"},
        {"train.engine_url": ENGINE, "openai.base_url": "http://localhost:9301/v1"},
    ],
)
def test_every_spelling_of_the_engines_address_attaches_the_run(flags) -> None:
    config = attached(flags)
    assert config.engine_url == config.train.engine_url == (ENGINE,)
    assert config.openai.base_url == (f"{ENGINE}/v1",)


@pytest.mark.parametrize("key", ["engine_url", "train.engine_url", "openai.base_url"])
def test_several_engines_are_asked_by_the_table_of_the_hub(key: str) -> None:
    config = attached({key: f"{ENGINE} http://far:9001"})
    assert config.engine_url == config.train.engine_url == (ENGINE, "http://far:9001")
    assert (config.openai.base_url, config.train.weight_bridge_mode) == (("hub",), "reload")


@pytest.mark.parametrize(
    ("flags", "says", "fix"),
    [
        ({"hub_url": HUB, "train.hub_url": "http://far:8000"}, "--hub-url .* and --train.hub-url", "--hub-url"),
        ({"engine_url": ENGINE, "openai.base_url": "http://far:9"}, "name different engines", "give only --engine-url"),
        ({"engine_url": f"{ENGINE} {ENGINE}/v1"}, "names an engine twice", "name each once"),
        ({"hub_url": "127.0.0.1:8300"}, "is not the URL of a hub", "--hub-url http://"),
        ({"hub_url": "http://far:99999/t/SECRET"}, "'http://far:99999' is not the URL", "--hub-url http://"),
        ({"train.engine_url": "http://"}, "is not the URL of an engine", "--engine-url http://"),
    ],
)
def test_addresses_that_cannot_be_right_are_refused(flags, says, fix) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        attached(flags)
    assert fix in refused.value.fix


def test_settings_of_an_attached_server_are_named_as_without_effect() -> None:
    flags = {"hub_url": HUB, "hub.port": 8100, "hub.token_file": "t", "engine.dtype": "float32"}
    config = attached(flags)
    (note,) = unused_settings(config, explicit_keys(load_run(None, flags)))
    assert note == f"no effect: --hub.port; the hub at {HUB} keeps what it was started with"


def test_processes_get_the_tokens_of_their_roles_at_attached_servers() -> None:
    plan = plan_of({"hub_url": HUB, "engine_url": ENGINE}, AccessTokens(hub=SECRET, engine=SECRET))
    variables = ("TREADLE_HUB_TOKEN", "TREADLE_ENGINE_TOKEN")
    assert {spec.name: [spec.env[variable] for variable in variables] for spec in plan.processes} == {
        "env": [role_token(SECRET, "environment")] * 2,
        "trainer": [role_token(SECRET, "trainer")] * 2,
    }
    assert plan.watch_url == f"{HUB}/t/{role_token(SECRET, 'observer')}"
    also_in_url = plan_of({"hub_url": f"{HUB}/t/{SECRET}"}, AccessTokens(hub=SECRET))
    assert also_in_url.watch_url == plan.watch_url


def test_a_token_in_the_hubs_address_is_not_stored_and_is_given_again_once(tmp_path: Path) -> None:
    again = {"hub_url": f"{HUB}/t/{SECRET}"}
    file = tmp_path / "config.json"
    save_run(plan_of(again).config, file)
    assert SECRET not in file.read_text()
    with pytest.raises(ConfigError, match="--hub-url"):
        require_secrets(load_run(file).model_dump(mode="json"))
    resumed = merge_addresses(load_run(file, again), frozenset(again))
    require_secrets(resumed.model_dump(mode="json"))
    assert resumed.engine.hub_url == resumed.hub_url == again["hub_url"]


def test_the_token_file_of_a_server_that_runs_already_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no token file .* runs already"):
        read_tokens(attached({"hub_url": HUB, "hub.token_file": tmp_path / "token"}))
    assert not list(tmp_path.iterdir())


# What an engine reports


def test_the_run_goes_by_what_the_engine_reports() -> None:
    run, notes = settled({}, device="cuda:0", dtype="float32")
    engine = run.engine
    assert (engine.device, engine.dtype, engine.max_model_len, engine.max_num_seqs) == ("cuda:0", "float32", 1024, 64)
    assert run.train.lr == FLOAT32_LR
    assert settled({"train.lr": 1e-6}, dtype="float32")[0].train.lr == 1e-6
    assert settled({})[0].train.lr == TrainConfig().lr
    assert notes[0].startswith(f"engine at {ENGINE}: transformers 5, float32 on cuda:0; learning rate")


@pytest.mark.parametrize(
    ("url", "shares", "broadcasts"),
    [(ENGINE, True, False), (ENGINE, False, True), ("http://gpu-7:9001", True, True)],
)
def test_weights_are_broadcast_to_an_engine_that_shares_none(url: str, shares: bool, broadcasts: bool) -> None:
    run, notes = settled({"engine_url": url}, shared_weights=shares)
    assert run.train.use_shared_memory is broadcasts
    assert any("broadcasts" in note for note in notes) is broadcasts
    assert run.engine.weights_file is None


@pytest.mark.parametrize(
    ("flags", "info", "says", "fix"),
    [
        ({"train.single_copy": True}, {"shared_weights": False}, "train.single_copy needs weights", "--weights-file"),
        ({"train.weight_bridge_mode": "lora_only"}, {}, "takes no adapters", "treadle engine --enable-lora"),
        ({"train.weight_bridge_mode": "lora_only"}, {"has_lora": True, "max_lora_rank": 8}, "rank 8", "--train.lora-r"),
        ({"env.group_size": 128}, {}, "over engine.max_num_seqs 64", "treadle engine --max-num-seqs 128"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_serve_the_run_is_refused(flags, info, says, fix) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        settled(flags, **info)
    assert fix in refused.value.fix


def test_files_for_a_restart_must_lie_where_the_engine_loads_from() -> None:
    flags = {"engine_url": ENGINE, "train.weight_bridge_mode": "none", "output": RUN.parent}
    config, elsewhere = plan_of(flags).config, msgspec.structs.replace(INFO, adapter_root="/elsewhere")
    attachment.check_live_folder(config, INFO)
    with pytest.raises(ConfigError, match="loads weights and adapters from /elsewhere only") as refused:
        attachment.check_live_folder(config, elsewhere)
    assert f"--adapter-root {RUN.parent}, " in refused.value.fix
    attachment.check_live_folder(plan_of(flags | {"train.live_path": "/elsewhere/live"}).config, elsewhere)
    sent = plan_of(flags | {"train.weight_bridge_mode": "reload"}).config
    attachment.check_live_folder(sent, elsewhere)  # it gets the files themselves


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


def test_the_model_is_the_engines_and_another_is_refused(tmp_path: Path) -> None:
    served, same, other = (write_model(tmp_path / n / "model", v=v) for n, v in (("a", 1), ("b", 1), ("c", 2)))
    info = msgspec.structs.replace(INFO, model_name=str(served))

    def chosen(flags: dict[str, object]) -> str:
        return choose_model(attached({"engine_url": ENGINE} | flags), info, frozenset(flags)).model

    assert chosen({}) == str(served)
    assert chosen({"model": str(same)}) == str(same)
    with pytest.raises(ConfigError, match=f"serves {served}, and the run is to train {other}"):
        chosen({"model": str(other)})
    with pytest.raises(ConfigError, match="no folder of this machine"):
        choose_model(attached({"engine_url": ENGINE}), INFO, frozenset())


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"update_count": 7}, "serves policy version 7 of another run"),
        ({"is_paused": True}, "in the middle of a publish"),
    ],
)
def test_a_new_run_refuses_an_engine_with_the_weights_of_another(info, says) -> None:
    config, used = attached({"engine_url": ENGINE}), msgspec.structs.replace(INFO, **info)
    with pytest.raises(ConfigError, match=says):
        attachment.refuse_used_engine(config, ENGINE, used)
    offline = attached({"engine_url": ENGINE, "train.weight_bridge_mode": "offline"})
    attachment.refuse_used_engine(offline, ENGINE, used)


# A hub that runs


def say_nothing(_: str) -> None:
    return None


TRAINER = RegisterTrainer(
    wandb_group="", wandb_project="", batch_size=4, max_token_len=64, checkpoint_dir="", save_checkpoint_interval=1,
    starting_step=3, num_steps=9,
)  # fmt: skip


def test_a_hub_that_runs_is_asked_with_its_token_and_refused_when_used(tmp_path: Path) -> None:
    with HubProcess(tmp_path, env={"TREADLE_HUB_TOKEN": SECRET}) as hub:
        config = attached({"hub_url": hub.url})
        with pytest.raises(ConfigError, match="asks for its token") as refused:
            attach(config, frozenset(), NO_TOKENS, say_nothing)
        assert "TREADLE_HUB_TOKEN" in refused.value.fix
        tokens = AccessTokens(hub=SECRET)
        assert attach(config, frozenset(), tokens, say_nothing).config == config
        with pytest.raises(ConfigError, match=r"has taken 3 steps, and the hub .* has no group of it"):
            attach(config, frozenset(), tokens, say_nothing, last_step=3)
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        httpx.post(f"{hub.url}/register", content=msgspec.json.encode(TRAINER), headers=headers).raise_for_status()
        with pytest.raises(ConfigError, match="queue of another run, which is at step 3") as refused:
            attach(config, frozenset(), tokens, say_nothing)
        assert "treadle hub --fresh" in refused.value.fix
        with pytest.raises(ConfigError, match="is not an engine of this release"):
            attach(attached({"engine_url": f"{hub.url}/t/{SECRET}"}), frozenset(), tokens, say_nothing)


@pytest.mark.parametrize("kind", ["hub", "engine"])
def test_an_address_where_nothing_answers_is_an_error_with_its_remedy(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(attachment, "NO_CONNECTION_S", 0.3)
    port = free_port()
    with pytest.raises(ConfigError, match=f"no {kind} is ready at http://127.0.0.1:{port}") as refused:
        attach(attached({f"{kind}_url": f"http://127.0.0.1:{port}"}), frozenset(), NO_TOKENS, say_nothing)
    assert f"treadle {kind} --port {port}" in refused.value.fix
    assert f"correct --{kind}-url, or leave it out" in refused.value.fix


def test_an_address_that_is_no_name_of_a_machine_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(attachment, "NO_CONNECTION_S", 0.3)
    with pytest.raises(ConfigError, match=r"no hub is ready at http://a\.\.b:8300"):
        attach(attached({"hub_url": "http://a..b:8300"}), frozenset(), NO_TOKENS, say_nothing)


def test_an_engine_that_is_still_loading_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(attachment, "_REQUEST_S", 0.2)
    monkeypatch.setattr(attachment, "NOT_READY_S", {"engine": 60.0})
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        attachment.NOT_READY_S["engine"] = 0.0

    with socket.create_server(("127.0.0.1", 0)) as loading:  # takes connections, as a loading engine does
        url = f"http://127.0.0.1:{loading.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no engine is ready"):
            attach(attached({"engine_url": url}), frozenset(), NO_TOKENS, say)
    assert lines == [f"waiting for the engine at {url}: it takes connections and is not ready yet"]


# An attached run from start to end


def test_a_run_remembers_its_hub_and_what_the_user_gave(tmp_path: Path, monkeypatch) -> None:
    started_runs: list[RunConfig] = []
    monkeypatch.setattr(RunSession, "run", lambda session, **_: started_runs.append(session._plan.config))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path))
    with HubProcess(tmp_path) as hub:
        flags = {"train.hub_url": hub.url, "steps": 3, "output": tmp_path / "runs"}
        start_run(load_run(None, flags), plain=True)
        (run,) = (tmp_path / "runs").iterdir()
        assert run_folders.requested_keys(run) == set(flags)
        resume(run, {}, plain=True)
        assert [config.hub_url for config in started_runs] == [hub.url] * 2
    assert not (run / "hub.sqlite").exists()


@contextmanager
def engine_that_reports(info: BridgeInfo) -> Iterator[str]:
    """The URL of a server that answers every GET with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(info))

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_a_run_that_goes_on_keeps_the_learning_rate_that_the_user_gave(tmp_path: Path, monkeypatch) -> None:
    started_runs: list[RunConfig] = []
    monkeypatch.setattr(RunSession, "run", lambda session, **_: started_runs.append(session._plan.config))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path))
    model = str(write_model(tmp_path / "model"))
    with engine_that_reports(msgspec.structs.replace(INFO, model_name=model, dtype="float32")) as url:
        flags = {"engine_url": url, "model": model, "train.lr": 1e-6, "steps": 3, "output": tmp_path / "runs"}
        start_run(load_run(None, flags), plain=True)
        (run,) = (tmp_path / "runs").iterdir()
        resume(run, {}, plain=True)
        resume(run, {"train.lr": 2e-6}, plain=True)
    assert [config.train.lr for config in started_runs] == [1e-6, 1e-6, 2e-6]


PUBLISHES = """
import json, os, pathlib, time, urllib.request
time.sleep(1)
pathlib.Path({published!r}).touch()
report = {{"kind": "trainer", "name": "trainer", "machine": "here", "pid": os.getpid(), "policy_version": 0}}
body = json.dumps(report).encode()
urllib.request.urlopen(urllib.request.Request({url!r} + "/v1/reports", body, {{"Content-Type": "application/json"}}))
pathlib.Path({metrics!r}).write_text(json.dumps({{"step": 1}}))
"""


def test_no_environment_begins_before_the_trainer_of_a_run_that_goes_on(tmp_path: Path, make_spec) -> None:
    """The hub still has the registration of the earlier trainer: an environment would think that all is done."""
    published, metrics = str(tmp_path / "published"), str(tmp_path / "metrics.jsonl")
    with HubProcess(tmp_path) as hub:
        config = attached({"hub_url": hub.url, "engine_url": ENGINE, "steps": 1, "train.metrics_file": metrics})
        trainer = make_spec("trainer", PUBLISHES.format(published=published, url=hub.url, metrics=metrics))
        env = make_spec("env", f"import os, sys; sys.exit(0 if os.path.exists({published!r}) else 3)")
        plan = RunPlan(config, tmp_path, (env, trainer), hub.url, is_env_last=True)
        session = RunSession(plan, reader_of(config, tmp_path))
        session.run(plain=True)
    assert session.outcome().is_complete


NEVER_PUBLISHES = """
import json, os, time, urllib.request
report = {{"kind": "trainer", "name": "trainer", "machine": "here", "pid": os.getpid()}}
body = json.dumps(report).encode()
urllib.request.urlopen(urllib.request.Request({url!r} + "/v1/reports", body, {{"Content-Type": "application/json"}}))
time.sleep(60)
"""


def test_a_trainer_that_never_publishes_is_not_waited_for_without_end(tmp_path: Path, make_spec) -> None:
    with HubProcess(tmp_path) as hub:
        config = attached({"hub_url": hub.url, "engine_url": ENGINE, "stall_timeout_s": 1.0})
        trainer = make_spec("trainer", NEVER_PUBLISHES.format(url=hub.url))
        plan = RunPlan(config, tmp_path, (make_spec("env", ""), trainer), hub.url, is_env_last=True)
        with pytest.raises(RunStalled, match="nothing has moved"):
            RunSession(plan, reader_of(config, tmp_path)).run(plain=True)


@pytest.mark.parametrize(("before", "now"), [("", HUB), (HUB, "")])
def test_resume_keeps_the_queue_where_it_is(before: str, now: str, tmp_path: Path) -> None:
    save_run(attached({"hub_url": before}), tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"the queue of this run is .*--resume cannot change that"):
        resume(tmp_path, {"hub_url": now}, plain=True)


def test_the_queue_of_an_attached_run_is_not_looked_for_in_its_folder(tmp_path: Path) -> None:
    config = plan_of({"hub_url": HUB, "env.state_dir": tmp_path}).config
    assert "run --resume" in run_folders.resume_advice(config, tmp_path, last_step=3)
    own = plan_of({"env.state_dir": tmp_path}).config
    assert "the queue of this run is gone" in run_folders.resume_advice(own, tmp_path, last_step=3)


def test_an_attached_hub_that_is_gone_raises_an_alarm(tmp_path: Path) -> None:
    url, clock = f"http://127.0.0.1:{free_port()}", [0.0]
    monitor = RunMonitor(f"{url}/t/{SECRET}", lambda: {"trainer": 2**22}, tmp_path, 0.0, lambda: clock[0])
    for clock[0] in (0.0, SILENT_S - 1, SILENT_S + 1, SILENT_S + 3):
        monitor.poll(0)
    (alarm,) = monitor.status.alarms
    assert alarm.startswith(f"the hub at {url} has not answered for 31 s; start it again with its --database")
