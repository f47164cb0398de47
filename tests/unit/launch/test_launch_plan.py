"""The plan is pure: a configuration and facts in, settled settings and processes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.config import DEFAULT_MODEL, TrainConfig, load_run
from treadle.config.train import FLOAT32_LR
from treadle.config.values import explicit_keys
from treadle.errors import ConfigError
from treadle.launch.machine import MachineFacts
from treadle.launch.process_plan import RunPlan, build_plan, server_addresses
from treadle.launch.process_spec import NO_TOKENS, AccessTokens
from treadle.net.access_tokens import CLIENT_ROLES, role_token

RUN = Path("/data/runs/20260102-030405-arithmetic-addition")
FACTS = MachineFacts(
    num_cores=8,
    has_shared_memory=True,
    ports={"hub": 8000, "engine": 9001},
    launcher_pid=4711,
    python="/venv/bin/python",
    environment={"HOME": "/home/ada", "PYTHONDONTWRITEBYTECODE": "1"},
)


def plan_for(flags: dict[str, object] | None = None, tokens: AccessTokens = NO_TOKENS, **facts: object) -> RunPlan:
    known = MachineFacts(**{**vars(FACTS), **facts})  # type: ignore[arg-type]
    return build_plan(
        load_run(None, flags or {}), known, run_folder=RUN, model_folder="/cache/smol", is_model_local=True,
        tokens=tokens,
    )  # fmt: skip


def test_model_steps_and_seed_flow_into_the_sections() -> None:
    config = plan_for({"steps": "7", "seed": "3"}).config
    assert (config.steps, config.train.steps) == (7, 7)
    assert (config.env.seed, config.train.seed) == (3, 3)
    assert config.model == DEFAULT_MODEL
    assert config.engine.model == config.train.model == config.openai.model == "/cache/smol"


def test_everything_a_run_writes_lies_in_its_folder() -> None:
    config = plan_for().config
    assert config.hub.database == RUN / "hub.sqlite"
    assert config.hub.run_folder == RUN
    assert config.env.data_dir_to_save_evals == RUN / "evals"
    assert config.train.save_path == RUN / "checkpoints"
    assert config.train.metrics_file == RUN / "metrics.jsonl"
    assert config.engine.weights_file == Path(f"/dev/shm/treadle-{RUN.name}-4711.weights")


def test_vllm_runs_all_sequences_that_may_be_in_flight() -> None:
    vllm = {"engine.engine": "vllm", "max_age": "1", "train.batch_size": "256"}
    assert plan_for(vllm).config.engine.max_num_seqs == 512
    assert plan_for({**vllm, "env.ensure_scores_are_not_same": "true"}).config.engine.max_num_seqs == 1024
    assert plan_for({**vllm, "train.batch_size": "16"}).config.engine.max_num_seqs == 128
    assert plan_for({**vllm, "engine.max_num_seqs": "64"}).config.engine.max_num_seqs == 64
    assert plan_for({**vllm, "engine.engine": "transformers"}).config.engine.max_num_seqs == 128


def test_without_shared_memory_the_weights_lie_in_the_run_folder() -> None:
    weights_file = plan_for(has_shared_memory=False).config.engine.weights_file
    assert weights_file is not None
    assert weights_file.parent == RUN


@pytest.mark.parametrize(
    ("mode", "shares", "has_lora"),
    [("shared_vllm", True, False), ("lora_only", False, True), ("lora_restart", False, True), ("none", False, False),
     ("reload", False, False), ("delta", False, False)],
)  # fmt: skip
@pytest.mark.parametrize("rank", [8, 128])
def test_the_engine_gets_what_the_way_of_the_weights_needs(mode: str, shares: bool, has_lora: bool, rank: int) -> None:
    config = plan_for({"train.weight_bridge_mode": mode, "train.lora_r": rank}).config
    assert (config.engine.weights_file is not None) == shares
    assert config.engine.enable_lora == config.train.lora == has_lora
    assert not has_lora or config.engine.max_lora_rank == rank


def test_adapters_on_the_engines_base_need_its_weights_and_one_gpu() -> None:
    settings = {"train.weight_bridge_mode": "lora_only", "train.single_copy": True}
    engine = plan_for(settings).config.engine
    assert engine.weights_file is not None
    assert engine.enable_lora
    split = load_run(None, settings | {"engine.tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"split over 2 GPUs .* cannot share its weights"):
        split.check_together()


@pytest.mark.parametrize(
    ("flags", "root"),
    [({}, RUN), ({"train.live_path": "/mem/live"}, Path("/mem/live")), ({"train.save_path": "/disk"}, Path("/disk")),
     ({"engine.adapter_root": "/all"}, Path("/all"))],
)  # fmt: skip
def test_adapters_come_from_where_the_trainer_saves_them(flags: dict[str, object], root: Path) -> None:
    assert plan_for({"train.weight_bridge_mode": "lora_only", **flags}).config.engine.adapter_root == root


def test_an_engine_that_gets_broadcasts_shares_no_memory() -> None:
    def shares(way: str) -> bool:
        config = plan_for({"train.use_shared_memory": True, "train.broadcast_by": way}).config
        return config.engine.weights_file is not None

    assert [shares(way) for way in ("auto", "memory", "nccl", "gloo")] == [True, True, False, False]
    split = plan_for({"train.use_shared_memory": True, "engine.tensor_parallel_size": 2}).config
    assert split.engine.weights_file is None


@pytest.mark.parametrize(
    ("num_cores", "max_age", "threads"), [(8, 1, 4), (2, 1, 1), (1, 1, 1), (3, 2, 1), (8, 0, 8), (1, 0, 1)]
)
def test_threads_are_halved_only_when_engine_and_trainer_overlap(num_cores: int, max_age: int, threads: int) -> None:
    plan = plan_for({"env.max_age": max_age}, num_cores=num_cores)
    assert (plan.config.engine.threads, plan.config.train.threads) == (threads, threads)
    environments = {spec.name: spec.env for spec in plan.processes}
    assert environments["engine"]["OMP_NUM_THREADS"] == environments["engine"]["MKL_NUM_THREADS"] == str(threads)
    assert environments["hub"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("flags", "facts", "max_age"),
    [
        ({}, {}, 0),
        ({"env.max_age": 1}, {}, 1),
        ({"max_age": 1}, {}, 1),
        ({"train.max_age": 1}, {}, 1),
        ({"max_age": 3}, {"has_gpu": True}, 3),
        ({}, {"has_gpu": True}, 1),
        ({"train.device": "cpu"}, {"has_gpu": True}, 1),
        ({"train.device": "cpu", "engine.device": "cpu"}, {"has_gpu": True}, 0),
    ],
)
def test_engine_and_trainer_take_turns_where_both_compute_on_the_processor(flags, facts, max_age) -> None:
    plan = plan_for(flags, **facts)
    assert plan.config.max_age == plan.config.env.max_age == plan.config.train.max_age == max_age
    assert plan.config.engine.threads == plan.config.train.threads == (8 if max_age == 0 else 4)
    assert any("take turns" in note for note in plan.notes) is (max_age == 0)


@pytest.mark.parametrize(
    ("flags", "facts", "lr"),
    [
        ({}, {}, TrainConfig().lr),
        ({}, {"has_bf16": False}, FLOAT32_LR),
        ({"train.lr": 1e-6}, {"has_bf16": False}, 1e-6),
        ({}, {"has_bf16": False, "has_gpu": True}, TrainConfig().lr),
        ({"engine.dtype": "bfloat16"}, {"has_bf16": False}, TrainConfig().lr),
    ],
)
def test_float32_learns_at_a_rate_of_its_own(flags, facts, lr) -> None:
    plan = plan_for(flags, **facts)
    assert plan.config.train.lr == lr


@pytest.mark.parametrize(
    ("has_bf16", "has_gpu", "is_reported"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_why_the_numbers_are_float32_is_reported(has_bf16: bool, has_gpu: bool, is_reported: bool) -> None:
    plan = plan_for(has_bf16=has_bf16, has_gpu=has_gpu)
    assert any("float32" in note for note in plan.notes) is is_reported


def test_groups_with_equal_scores_are_kept_for_a_teacher():
    teacher = {"train.teacher_url": "http://127.0.0.1:9100", "env.group_size": 1}
    config = plan_for(teacher).config
    config.check_together()  # one rollout is enough for a teacher
    assert "ensure_scores_are_not_same" in config.env.model_fields_set
    assert not config.env.ensure_scores_are_not_same  # whatever suits the task
    assert config.train.distill_coef == 1.0
    assert plan_for({**teacher, "env.ensure_scores_are_not_same": "true"}).config.env.ensure_scores_are_not_same
    with pytest.raises(ConfigError, match="a group of one teaches nothing"):
        plan_for({"env.group_size": 1}).config.check_together()


def test_explicit_settings_are_kept() -> None:
    config = plan_for(
        {"engine.threads": "3", "train.seed": "9", "train.save_path": "/big/disk", "env.seed": "1"}
    ).config
    assert (config.engine.threads, config.train.threads) == (3, 8)
    assert (config.train.seed, config.env.seed) == (9, 1)
    assert config.train.save_path == Path("/big/disk")


def test_free_default_ports_are_taken_and_urls_follow() -> None:
    plan = plan_for()
    assert (plan.config.hub.port, plan.config.engine.port) == (8000, 9001)
    assert plan.config.train.hub_url == plan.config.env.hub_url == "http://127.0.0.1:8000"
    assert plan.config.train.engine_url == ("http://127.0.0.1:9001",)
    assert plan.config.openai.base_url == ("http://127.0.0.1:9001/v1",)


def test_all_processes_use_the_reserved_ports() -> None:
    plan = plan_for(ports={"hub": 51001, "engine": 9001})
    assert (plan.config.hub.port, plan.config.engine.port) == (51001, 9001)
    assert plan.config.train.hub_url == plan.hub_url == "http://127.0.0.1:51001"
    assert plan.processes[0].ready_url == "http://127.0.0.1:51001/healthz"


def test_a_server_that_listens_everywhere_is_called_on_loopback() -> None:
    assert plan_for({"hub.host": "0.0.0.0"}).hub_url == "http://127.0.0.1:8000"


def test_steps_of_the_trainer_are_the_steps_of_the_run() -> None:
    config = plan_for({"train.steps": "9"}).config
    assert (config.steps, config.train.steps) == (9, 9)
    with pytest.raises(ConfigError, match=r"steps = 5 and train\.steps = 9"):
        plan_for({"steps": "5", "train.steps": "9"})


def test_processes_come_in_starting_order_with_their_commands() -> None:
    plan = plan_for()
    config_file = str(RUN / "config.json")
    assert [spec.name for spec in plan.processes] == ["hub", "engine", "env", "trainer"]
    assert [spec.argv[3:] for spec in plan.processes] == [
        ("hub", "--config", config_file),
        ("engine", "--config", config_file),
        ("env", "arithmetic", "serve", "--config", config_file),
        ("train", "--config", config_file),
    ]
    assert all(spec.argv[:3] == ("/venv/bin/python", "-m", "treadle") for spec in plan.processes)
    assert [spec.serves for spec in plan.processes] == [True, True, False, False]
    assert plan.processes[1].log_path == RUN / "logs" / "engine.log"


def test_the_queue_is_emptied_by_the_first_start_of_the_hub_only() -> None:
    plan = plan_for({"hub.fresh": "true"})
    hub = plan.processes[0]
    assert hub.argv[-2:] == ("--fresh", "true")
    assert hub.without_first_flags().argv == plan_for().processes[0].argv
    assert not plan.config.hub.fresh, "every start of a hub reads config.json"


def test_children_do_not_spin_and_know_their_parent() -> None:
    environment = plan_for().processes[3].env
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "0"
    assert environment["TREADLE_PARENT_PID"] == "4711"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["HOME"] == "/home/ada"
    assert "PYTHONDONTWRITEBYTECODE" not in environment


SECRETS = ("hub-secret-0123456789", "admin-secret-0123456789", "engine-secret-0123456789")


def test_each_process_gets_the_tokens_of_its_role_and_no_other() -> None:
    variables = ("TREADLE_HUB_TOKEN", "TREADLE_HUB_ADMIN_TOKEN", "TREADLE_ENGINE_TOKEN")
    inherited = dict(zip(variables, SECRETS, strict=True))
    plan = plan_for(tokens=AccessTokens(*SECRETS), environment=inherited)
    hub, admin, engine = SECRETS
    assert {spec.name: tuple(spec.env.get(variable) for variable in variables) for spec in plan.processes} == {
        "hub": (hub, admin, role_token(engine, "observer")),
        "engine": (role_token(hub, "engine"), None, engine),
        "env": (role_token(hub, "environment"), None, role_token(engine, "environment")),
        "trainer": (role_token(hub, "trainer"), None, role_token(engine, "trainer")),
    }
    assert plan.watch_url == f"{plan.hub_url}/t/{role_token(hub, 'observer')}"
    shown = repr(plan) + plan.config.model_dump_json() + "".join(word for spec in plan.processes for word in spec.argv)
    derived = [role_token(secret, role) for secret in SECRETS for role in CLIENT_ROLES]
    assert not any(token in shown for token in (*SECRETS, *derived))


def test_without_tokens_no_process_gets_one() -> None:
    for spec in plan_for(environment={"TREADLE_HUB_TOKEN": "not-the-runs"}).processes:
        assert not any("TOKEN" in name for name in spec.env if name.startswith("TREADLE_"))


def test_explicit_keys_are_those_that_were_given() -> None:
    assert explicit_keys(load_run(None, {"hub.port": "8100", "steps": "9"})) == {"hub.port", "steps"}
    assert explicit_keys(load_run(None)) == frozenset()


@pytest.mark.parametrize(
    ("flags", "engine", "trainer"),
    [
        ({}, 2048, 2048),
        ({"env.max_token_length": 2048}, 3072, 3072),
        ({"env.max_token_length": 2048, "train.seq_len": 2500}, 2500, 2500),
        ({"engine.max_model_len": 512}, 512, 512),
        ({"engine.max_model_len": 4096, "train.seq_len": 1024}, 4096, 1024),
    ],
)
def test_engine_and_trainer_have_room_for_a_prompt_and_a_completion(
    flags: dict[str, object], engine: int, trainer: int
) -> None:
    config = plan_for(flags).config
    assert (config.engine.max_model_len, config.train.seq_len) == (engine, trainer)


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ({}, None),
        ({"hub.stale": "drop"}, 2),
        ({"hub.stale": "downweight", "hub.max_age": 7}, 7),
        ({"hub.stale": "drop", "train.weight_bridge_mode": "reload", "train.vllm_restart_interval": 3}, 4),
    ],
)
def test_the_hub_bounds_the_age_of_groups_by_max_age_of_the_run(flags: dict[str, object], bound: int | None) -> None:
    assert plan_for({"max_age": 2} | flags).config.hub.max_age == bound


@pytest.mark.parametrize(("pace", "ahead"), [("waves", 2), ("stream", 0)])
def test_only_waves_are_leased_ahead(pace: str, ahead: int) -> None:
    config = plan_for({"env.pace": pace, "env.max_age": 2}).config
    assert config.train.max_age == ahead
    assert config.env.state_dir == RUN / "env"


FLEET = {"engines": "3", "train.weight_bridge_mode": "reload"}
FLEET_PORTS = {"hub": 8000, "engine": 9001, "engine-1": 9002, "engine-2": 9003}


def test_several_engines_join_the_table_of_the_hub() -> None:
    plan = plan_for(FLEET, ports=FLEET_PORTS)
    engines = {spec.name: spec for spec in plan.processes if spec.kind == "engine"}
    assert list(engines) == ["engine", "engine-1", "engine-2"]
    assert engines["engine-2"].argv[-4:] == ("--name", "engine-2", "--port", "9003")
    assert engines["engine-2"].ready_url == "http://127.0.0.1:9003/health"
    config = plan.config
    assert (config.engine.join, config.train.engine_url, config.openai.base_url) == (
        "http://127.0.0.1:8000", ("hub",), ("hub",),
    )  # fmt: skip
    assert config.engine.threads == 8 // 3
    assert server_addresses(config) == {name: ("127.0.0.1", port) for name, port in FLEET_PORTS.items()}


def test_a_router_is_the_address_of_several_engines() -> None:
    tokens = AccessTokens(hub="h" * 20, engine="e" * 20)
    plan = plan_for({**FLEET, "router.kind": "smg"}, tokens, ports={**FLEET_PORTS, "router": 9000})
    router = next(spec for spec in plan.processes if spec.name == "router")
    assert router.argv[3:5] == ("router", "--config")
    assert router.ready_url == "http://127.0.0.1:9000/health"
    assert (router.env["TREADLE_HUB_TOKEN"], router.env["TREADLE_ENGINE_TOKEN"]) == (
        role_token("h" * 20, "observer"), role_token("e" * 20, "environment"),
    )  # fmt: skip
    config = plan.config
    assert (config.openai.base_url, config.openai.router_url) == (("hub",), "http://127.0.0.1:9000")
    assert config.router.hub_url == plan.hub_url
    assert server_addresses(config)["router"] == ("127.0.0.1", 9000)
    assert plan_for(FLEET, ports=FLEET_PORTS).config.openai.router_url == ""


def test_a_router_needs_several_engines_and_elsewhere_a_token() -> None:
    with pytest.raises(ConfigError, match="a router is for several engines"):
        load_run(None, {"router.kind": "smg"}).check_together()
    with pytest.raises(ConfigError, match="needs a token"):
        plan_for({**FLEET, "router.kind": "smg", "router.host": "0.0.0.0"}, ports={**FLEET_PORTS, "router": 9000})


def test_without_own_engines_the_run_waits_for_those_that_join() -> None:
    plan = plan_for({**FLEET, "engines": "0"})
    assert [spec.name for spec in plan.processes] == ["hub", "env", "trainer"]
    assert plan.config.openai.base_url == ("hub",)


def test_engines_that_run_already_are_in_the_table_too() -> None:
    urls = "http://a:9001 http://b:9001"
    plan = plan_for({"engine_url": urls, "train.weight_bridge_mode": "reload"})
    assert [spec.name for spec in plan.processes] == ["hub", "env", "trainer"]
    assert (plan.config.train.engine_url, plan.config.openai.base_url) == (tuple(urls.split()), ("hub",))


def test_several_engines_publish_through_files_by_default() -> None:
    assert load_run(None, {"engines": "2"}).train.weight_bridge_mode == "reload"
    assert load_run(None, {"train.engine_url": "hub"}).train.weight_bridge_mode == "reload"
    assert load_run(None, {}).train.weight_bridge_mode == "shared_vllm"
    with pytest.raises(ConfigError, match="weight_bridge_mode shared_vllm publishes to one engine"):
        load_run(None, {"engines": "2", "train.weight_bridge_mode": "shared_vllm"}).check_together()
