"""The command line and environment that vLLM's server is started with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from treadle.config import EngineConfig
from treadle.engines.model_folder import CheckpointFacts, read_checkpoint_facts
from treadle.engines.vllm.command import (
    KEY_VARIABLE,
    LORA_RANKS,
    SCHEDULER,
    Installation,
    ServerResources,
    lora_rank,
    server_command,
)
from treadle.engines.vllm.server_process import suggest_fix
from treadle.errors import ConfigError, ModelError
from treadle.support import VLLM, fast_dtype

CPU = Installation(python="/env/bin/python", version="0.32.0", is_cpu=True, has_flashinfer=False)
GPU = Installation(python="/env/bin/python", version="0.26.0", is_cpu=False, has_flashinfer=True)
PLACE = ServerResources(port=4321, api_key="secret", scratch=Path("/tmp/scratch"), cache=Path("/cache"))
MODEL = CheckpointFacts(
    Path("/models/m"), dtype="float32", vocab_size=100, max_positions=512, eos_ids=frozenset({1}),
    linear_modules=("down_proj", "q_proj"),
)  # fmt: skip


def command(vllm=CPU, inherited=None, **settings):
    return server_command(EngineConfig(**settings), MODEL, vllm, PLACE, inherited or {})


def flag(argv, name):
    return argv[argv.index(name) + 1]


def test_the_stock_server_is_started_on_loopback_with_our_parts_in_it():
    argv = command().argv
    assert argv[:3] == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert (flag(argv, "--host"), flag(argv, "--port")) == ("127.0.0.1", "4321")
    for name in ("--middleware", "--worker-extension-cls"):
        module, _, attribute = flag(argv, name).rpartition(".")
        assert module.startswith("treadle.engines.vllm.")
        source = Path(__file__).parents[3] / "src" / (module.replace(".", "/") + ".py")
        assert f"class {attribute}" in source.read_text()


def test_the_key_is_in_the_environment_and_on_no_command_line():
    started = command()
    assert started.env[KEY_VARIABLE] == "secret"
    assert "secret" not in " ".join(started.argv)


def test_settings_become_flags():
    argv = command(max_num_seqs=7, max_model_len=99, dtype="bfloat16").argv
    assert flag(argv, "--max-num-seqs") == "7"
    assert flag(argv, "--max-model-len") == "99"
    assert flag(argv, "--logprobs-mode") == "processed_logprobs"
    assert flag(argv, "--dtype") == "bfloat16"


def test_fast_is_the_dtype_that_the_hardware_is_fast_in():
    assert flag(command().argv, "--dtype") == fast_dtype("cpu")
    assert flag(command(vllm=GPU).argv, "--dtype") == "bfloat16"


def test_auto_is_the_checkpoints_dtype_and_bounds_the_length():
    argv = command(dtype="auto", max_model_len=4096).argv
    assert flag(argv, "--dtype") == "float32"
    assert flag(argv, "--max-model-len") == "512"


def test_adapters_on_a_gpu_need_a_dtype_that_vllm_supports():
    for dtype in ("float32", "auto"):
        with pytest.raises(ConfigError, match="bfloat16 or float16 only"):
            command(vllm=GPU, enable_lora=True, dtype=dtype)
    assert flag(command(vllm=GPU, enable_lora=True, dtype="float16").argv, "--dtype") == "float16"
    assert flag(command(enable_lora=True, dtype="float32").argv, "--dtype") == "float32"


def test_a_models_own_sampling_defaults_are_switched_off():
    assert flag(command().argv, "--generation-config") == "vllm"


def test_eager_is_the_default_on_a_cpu_and_vllm_args_win():
    assert "--enforce-eager" in command().argv
    assert "--enforce-eager" not in command(vllm=GPU).argv
    assert "--enforce-eager" in command(vllm=GPU, enforce_eager=True).argv
    own = command(vllm_args="-O3 --block-size 32").argv
    assert "--enforce-eager" not in own
    assert own[-3:] == ("-O3", "--block-size", "32")


def test_an_eager_vllm_on_a_cpu_compiles_nothing_at_all():
    assert command().env["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in command(vllm_args="-O3").env
    assert "TORCHDYNAMO_DISABLE" not in command(vllm=GPU, enforce_eager=True).env


def test_memory_is_a_share_of_a_gpu_and_gibibytes_of_a_cpu():
    assert flag(command(vllm=GPU, gpu_memory_utilization=0.3).argv, "--gpu-memory-utilization") == "0.3"
    assert "--gpu-memory-utilization" not in command().argv
    assert command().env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert command(inherited={"VLLM_CPU_KVCACHE_SPACE": "2"}).env["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_adapters_need_flags_and_a_variable():
    started = command(enable_lora=True, max_lora_rank=24)
    assert "--enable-lora" in started.argv
    assert flag(started.argv, "--max-lora-rank") == "32"
    assert int(flag(started.argv, "--max-cpu-loras")) >= int(flag(started.argv, "--max-loras"))
    assert started.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in command().argv
    for argv in (started.argv, command(vllm=GPU, enable_lora=True).argv):
        at = argv.index("--lora-target-modules")
        assert argv[at + 1 : at + 3] == ("down_proj", "q_proj")  # not the output: that ends vLLM
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in command().env
    own = command(enable_lora=True, vllm_args="--max-loras=100").argv
    assert "--max-cpu-loras" not in own  # vLLM refuses fewer than there are places, and by itself takes as many


def test_priority_scheduling_cannot_be_switched_off():
    assert flag(command().argv, "--scheduling-policy") == "priority"
    with pytest.raises(ConfigError, match="always priority"):
        command(vllm_args="--scheduling-policy=fcfs")


@pytest.mark.parametrize(
    "words",
    ["--ssl-keyfile key.pem", "--api-key=x", "--max-num-batched-tokens 9 --chat-template a.jinja", "--root-path /a"],
)
def test_flags_of_a_server_that_only_the_engine_calls_are_refused_by_name(words):
    name = next(
        word for word in words.replace("=", " ").split() if word.startswith(("--ssl", "--api", "--chat", "--root"))
    )
    with pytest.raises(ConfigError, match=name):
        command(vllm_args=words)
    assert "--max-num-batched-tokens" in command(vllm_args="--max-num-batched-tokens 9").argv
    with pytest.raises(ConfigError, match="--api-key"):
        command(vllm_args="--api_key x")  # vLLM takes both spellings


@pytest.mark.parametrize("wanted", [1, 8, 9, 300, 512])
def test_a_rank_is_rounded_up_to_one_vllm_has(wanted):
    assert lora_rank(wanted) in LORA_RANKS
    assert lora_rank(wanted) >= wanted


def test_a_rank_that_is_too_large_is_refused():
    with pytest.raises(ConfigError, match="rank 512 at most"):
        lora_rank(513)


def test_the_weights_file_reaches_our_loader():
    argv = command(weights_file=Path("/dev/shm/w")).argv
    shared = json.loads(flag(argv, "--model-loader-extra-config"))
    assert shared == {"weights_file": "/dev/shm/w", "model_folder": "/models/m"}
    assert "--model-loader-extra-config" not in command().argv


def test_the_users_environment_is_kept_except_for_required_values():
    inherited = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "OMP_WAIT_POLICY": "ACTIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/h",
    }
    env = command(inherited=inherited).env
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert env["HOME"] == "/h"
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["VLLM_RPC_BASE_PATH"] == "/tmp/scratch"
    assert env["VLLM_CACHE_ROOT"] == "/cache"


def test_flashinfers_sampler_is_off_if_it_is_not_installed():
    assert command().env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in command(vllm=GPU).env


def test_a_device_must_be_visible_to_this_process():
    seen = {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert command(vllm=GPU, device="cuda:1", inherited=seen).env["CUDA_VISIBLE_DEVICES"] == "6"
    assert command(vllm=GPU, device="cuda:1").env["CUDA_VISIBLE_DEVICES"] == "1"
    assert command(vllm=GPU, inherited=seen).env["CUDA_VISIBLE_DEVICES"] == "4,6"
    with pytest.raises(ConfigError, match="4,6"):
        command(vllm=GPU, device="cuda:2", inherited=seen)


@pytest.mark.parametrize(
    ("vllm", "settings", "reason"),
    [
        (GPU, {"device": "cpu"}, "a build for GPUs"),
        (CPU, {"device": "cuda"}, "a build for CPUs"),
        (CPU, {"device": "mps"}, "cpu or cuda"),
        (GPU, {"weights_file": Path("w"), "tensor_parallel_size": 2}, "split over 2 GPUs"),
        (CPU, {"vllm_args": "--dtype float16"}, "does not go to vLLM from here"),
        (CPU, {"vllm_args": "--tensor-parallel-size 2"}, "does not go to vLLM from here"),
    ],
)
def test_unsupported_settings_are_refused_before_the_start(vllm, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        command(vllm=vllm, **settings)


def test_workers_on_a_cpu_get_cores_of_their_own():
    def bound(**settings):
        return command(vllm=CPU, tensor_parallel_size=2, **settings).env

    cores = bound()["VLLM_CPU_OMP_THREADS_BIND"]
    assert cores == "nobind" or cores.count("|") == 1
    limited = bound(threads=4)
    assert (limited["VLLM_CPU_OMP_THREADS_BIND"], limited["OMP_NUM_THREADS"]) == ("nobind", "2")
    assert bound(threads=1)["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command(vllm=CPU).env


def test_untested_versions_are_recognized():
    tested = {"0.23.1": False, "0.24.0": False, "0.26.0+cu130": True, "0.32.0": True, "0.33.0": False, "1.0": False}
    for version, is_tested in tested.items():
        assert (version in VLLM) is is_tested, version


def test_checkpoint_facts_are_read_from_the_folder(tmp_path):
    config = {"torch_dtype": "bfloat16", "vocab_size": 7, "max_position_embeddings": 64, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_checkpoint_facts(tmp_path)
    assert (facts.dtype, facts.vocab_size, facts.max_positions, facts.eos_ids) == ("bfloat16", 7, 64, frozenset({2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "llama3"}}))
    facts = read_checkpoint_facts(tmp_path)
    assert facts.eos_ids == {2, 5}
    assert facts.max_positions is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        read_checkpoint_facts(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("api_server.py: error: unrecognized arguments: --blok", "--vllm-args"),
        ("OSError: [Errno 98] Address already in use", "start again"),
        ("AssertionError: Error in memory profiling. Initial free memory 102 GiB", "--kv-cache-memory-bytes"),
        ("treadle.errors.SyncError: CUDA does not share these weights: invalid argument", "expandable_segments"),
        ("something else", "log"),
    ],
)
def test_a_failed_start_suggests_a_fix(line, words):
    assert words in suggest_fix(["INFO loading", line])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "lower --gpu-memory-utilization"),
        (
            "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization (0.45, 35.6 GiB).",
            "lower --gpu-memory-utilization",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
            "raise --gpu-memory-utilization",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), (4.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (1.0 GiB).",
            "lower --max-model-len",
        ),
        (
            "ValueError: Available memory on node 0 (0.56/23.54 GiB) on kv cache allocation is less than requested "
            "memory for kv (1000.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce",
            "lower VLLM_CPU_KVCACHE_SPACE",
        ),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "lower VLLM_CPU_KVCACHE_SPACE"),
    ],
)
def test_a_start_out_of_memory_names_settings_and_treadle_plan(line, words):
    fix = suggest_fix(["INFO loading", line])
    assert words in fix
    assert "--max-model-len" in fix
    assert "treadle plan" in fix


def test_cuda_graphs_are_captured_up_to_max_num_seqs():
    name = "--max-cudagraph-capture-size"
    assert flag(command(GPU, max_num_seqs=1024).argv, name) == "1024"
    assert flag(command(GPU, max_num_seqs=4096).argv, name) == "2048"
    assert name not in command(GPU, max_num_seqs=512).argv  # vLLM's default
    assert name not in command(CPU, max_num_seqs=1024).argv
    assert name not in command(GPU, max_num_seqs=1024, enforce_eager=True).argv


def test_a_gpu_gets_the_scheduler_with_less_work_per_token():
    assert flag(command(GPU).argv, "--scheduler-cls") == SCHEDULER
    assert "--scheduler-cls" not in command(CPU).argv
    assert "--scheduler-cls" not in command(dataclasses.replace(GPU, version="0.99.0")).argv  # an untested version
    assert "--scheduler-cls" not in command(GPU, vllm_args="--scheduler_cls=my.Scheduler").argv


def test_the_key_of_the_server_is_no_part_of_the_name_of_compiled_code():
    assert "VLLM_API_KEY" not in command(GPU, inherited={"VLLM_API_KEY": "mine"}).env


@pytest.mark.parametrize("own", ["--cudagraph-capture-sizes 1 2 4", "-O3", "--compilation-config={}"])
def test_the_users_own_graph_settings_are_kept(own):
    assert "--max-cudagraph-capture-size" not in command(GPU, max_num_seqs=1024, vllm_args=own).argv
