"""Several trainer ranks and GPUs in a plan, for machines that are only described: pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.test_launch_plan import FACTS, RUN, plan_for
from treadle.budget.hardware import CARDS
from treadle.budget.shapes import KNOWN
from treadle.config import load_run, save_run
from treadle.config.values import explicit_keys
from treadle.errors import ConfigError
from treadle.gpus import Gpu
from treadle.launch.mps import shares_card
from treadle.launch.process_plan import RunPlan, build_plan
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.ranks import name_of_rank

VLLM = {"engine.engine": "vllm"}


def on_gpus(num_gpus: int, flags: dict[str, object] | None = None, model: str = "qwen3-1.7b") -> RunPlan:
    config = load_run(None, {**VLLM, **(flags or {})})
    ports = {**FACTS.ports, "engine-1": 9002, "engine-2": 9003}
    facts = replace(FACTS, has_gpu=True, gpus=(Gpu("NVIDIA H100", CARDS["h100"]),) * num_gpus, ports=ports)
    return build_plan(
        config, facts, run_folder=RUN, model_folder="/cache/m", is_model_local=True, shape=KNOWN[model]
    )  # fmt: skip


def trainers(plan: RunPlan) -> list[ProcessSpec]:
    return [spec for spec in plan.processes if spec.kind == "trainer"]


def test_each_rank_is_a_process_with_the_variables_of_torchrun() -> None:
    plan = plan_for({"train.ranks": "3"})
    assert [spec.name for spec in trainers(plan)] == ["trainer", "trainer-1", "trainer-2"]
    assert [spec.name for spec in plan.processes][:3] == ["hub", "engine", "env"]
    first, second, _ = trainers(plan)
    assert first.argv[-2:] == ("--config", str(RUN / "config.json"))
    assert second.argv == (*first.argv, "--trainer-rank", "1")
    assert second.log_path == RUN / "logs" / "trainer-1.log"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [second.env[name] for name in names] == ["1", "1", "3", "3", "127.0.0.1"]
    assert not any(name in spec.env for spec in plan_for().processes for name in names)
    assert not any(spec.serves for spec in trainers(plan))


@pytest.mark.parametrize(
    ("flags", "threads"),
    [({"train.ranks": "2"}, 4), ({"train.ranks": "2", "max_age": "1"}, 2), ({"train.ranks": "16"}, 1),
     ({"train.ranks": "2", "train.threads": "3"}, 3)],
)  # fmt: skip
def test_the_cores_are_divided_among_the_ranks(flags: dict[str, object], threads: int) -> None:
    plan = plan_for(flags)
    assert plan.config.train.threads == threads
    assert {spec.env["OMP_NUM_THREADS"] for spec in trainers(plan)} == {str(threads)}


def test_engine_and_trainer_on_gpus_of_their_own_broadcast_the_weights() -> None:
    plan = on_gpus(2)
    engine, train = plan.config.engine, plan.config.train
    assert (engine.gpus, train.gpus, train.ranks, engine.tensor_parallel_size) == ((0,), (1,), 1, 1)
    assert train.use_shared_memory
    assert engine.weights_file is None, "memory of one GPU cannot be shared with another"
    assert engine.gpu_memory_utilization == 0.9
    assert "engine on GPU 0, trainer on GPU 1" in plan.notes
    assert not shares_card(plan.config)


def test_a_single_gpu_is_shared_as_before() -> None:
    plan = on_gpus(1)
    assert (plan.config.engine.gpus, plan.config.train.gpus, plan.config.train.ranks) == (None, None, 1)
    assert not plan.config.train.use_shared_memory
    assert plan.config.engine.weights_file is not None
    assert not any("GPU" in note for note in plan.notes)


def test_a_mode_that_publishes_files_broadcasts_nothing() -> None:
    plan = on_gpus(4, {"train.weight_bridge_mode": "lora_only"}, model="qwen2.5-32b")
    assert (plan.config.engine.gpus, plan.config.train.gpus) == ((0, 1), (2, 3))
    assert (plan.config.engine.tensor_parallel_size, plan.config.train.ranks) == (2, 2)
    assert not plan.config.train.use_shared_memory
    assert "engine on GPUs 0-1 (tensor parallel 2), trainer on GPUs 2-3 (2 ranks)" in plan.notes


def test_a_model_in_4_bits_is_trained_by_one_rank() -> None:
    config = on_gpus(4, {"train.weight_bridge_mode": "lora_only", "train.quantization": "nf4"}).config
    assert (config.engine.gpus, config.train.gpus) == ((0,), (1,))


@pytest.mark.parametrize("name", ["context_parallel", "replicas"])
def test_ranks_that_are_chosen_can_be_divided(name: str) -> None:
    plan = on_gpus(4, {f"train.{name}": "2"})
    assert (plan.config.engine.gpus, plan.config.train.gpus) == ((0,), (1, 2))
    assert "GPU 3 is not used: context_parallel and replicas need a multiple of 2 trainer ranks" in plan.notes
    assert not any("not used" in note for note in on_gpus(3, {f"train.{name}": "2"}).notes)
    with pytest.raises(ConfigError, match=f"{name} is 2, and 1 rank cannot be divided by it"):
        on_gpus(1, {f"train.{name}": "2"})


def test_gpus_of_the_user_decide_how_many_ranks_there_are() -> None:
    plan = on_gpus(8, {"train.gpus": "4,5", "engine.gpus": "0"})
    assert plan.config.train.gpus == (4, 5)
    assert [spec.name for spec in trainers(plan)] == ["trainer", "trainer-1"]


@pytest.mark.parametrize(
    "flags",
    [{"engine.device": "cuda:1", "train.device": "cuda:0"}, {"train.device": "cpu", "engine.device": "cpu"}],
)
def test_devices_of_the_user_are_not_changed(flags: dict[str, object]) -> None:
    config = on_gpus(4, flags).config
    assert (config.engine.gpus, config.train.gpus, config.train.ranks) == (None, None, 1)


@pytest.mark.parametrize("flags", [{"train.single_copy": "true"}, {"train.use_shared_memory": "false"}])
def test_one_copy_of_the_weights_keeps_to_one_gpu(flags: dict[str, object]) -> None:
    config = on_gpus(4, flags).config
    assert (config.engine.gpus, config.train.gpus) == ((0,), (0,))
    assert config.engine.weights_file is not None


@pytest.mark.parametrize(
    ("flags", "engine_gpus", "train_gpus"),
    [
        ({"engines": "2"}, [(0,), (1,)], (2, 3, 4, 5)),
        ({"engines": "2", "engine.tensor_parallel_size": "2", "train.ranks": "1"}, [(0, 1), (2, 3)], (4,)),
        ({"engines": "2", "engine.gpus": "2-5"}, [(2, 3), (4, 5)], (0, 1)),
        ({"engines": "3", "train.gpus": "0"}, [(1,), (2,), (3,)], (0,)),
    ],
)
def test_several_engines_divide_the_gpus(
    flags: dict[str, object], engine_gpus: list[tuple[int, ...]], train_gpus: tuple[int, ...]
) -> None:
    plan = on_gpus(6, {"engine.engine": "vllm", **flags})
    assert (plan.config.engine.gpus_of_each, plan.config.train.gpus) == (engine_gpus, train_gpus)
    argvs = [spec.argv for spec in plan.processes if spec.kind == "engine"]
    named = [argv[argv.index("--gpus") + 1] for argv in argvs]
    assert named == [",".join(map(str, gpus)) for gpus in engine_gpus]


def test_an_engine_that_runs_already_leaves_the_gpus_to_the_ranks() -> None:
    attached = {"engine_url": "http://127.0.0.1:9001"}
    assert on_gpus(4, {**attached, "train.ranks": "2"}).config.train.gpus == (2, 3)
    assert on_gpus(4, {**attached, "train.gpus": "0,1"}).config.train.ranks == 2
    assert on_gpus(4, attached).config.train.gpus is None


@pytest.mark.parametrize(
    ("num_gpus", "flags", "message"),
    [
        (4, {"train.gpus": "9"}, "there is no GPU 9"),
        (4, {"train.ranks": "5"}, "need 6 GPUs"),
        (1, {"engines": "2"}, "2 engines on 2 GPUs and 1 trainer rank need 3 GPUs"),
        (4, {"engines": "2", "engine.gpus": "0-2"}, "which 2 engines cannot divide"),
        (
            4,
            {"engines": "2", "train.weight_bridge_mode": "lora_only", "train.single_copy": "true"},
            "one copy of the wei",
        ),
        (2, {"train.ranks": "3", "engine_url": "http://127.0.0.1:9001"}, "3 trainer ranks need a GPU each"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(num_gpus: int, flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_gpus(num_gpus, flags)


def test_gpus_of_a_machine_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="names GPUs, and this machine has none"):
        plan_for({"train.gpus": "0"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine.gpus": "0-3", "engine.tensor_parallel_size": "2"}, "names 4 GPUs and tensor_parallel_size is 2"),
        ({"train.gpus": "0-3", "train.ranks": "2"}, "names 4 GPUs and ranks is 2"),
        ({"train.gpus": "0", "train.device": "cpu"}, "gpus and device cpu are both given"),
        ({"train.gpus": ""}, "names no GPU"),
        ({"engine.gpus": "3-0"}, "counts backwards"),
    ],
)
def test_settings_that_contradict_each_other_die_at_parse(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(None, flags)


def test_a_resumed_run_is_placed_on_the_gpus_that_are_there_now(tmp_path: Path) -> None:
    plan = on_gpus(4, {"train.weight_bridge_mode": "shared_vllm"})
    assert plan.config.train.ranks == 3
    save_run(plan.config, tmp_path / "config.json", plan.derived)
    asked = explicit_keys(load_run(None, VLLM))
    resumed = build_plan(
        load_run(tmp_path / "config.json"), replace(FACTS, has_gpu=True, gpus=(Gpu("NVIDIA H100", CARDS["h100"]),)),
        run_folder=RUN, model_folder="/cache/m", is_model_local=True, explicit=asked,
    )  # fmt: skip
    train, engine = resumed.config.train, resumed.config.engine
    assert (train.ranks, train.gpus, engine.gpus, train.use_shared_memory) == (1, None, None, False)
    assert engine.gpu_memory_utilization == 0.45
    fresh = load_run(tmp_path / "config.json", with_derived=False)
    assert (fresh.train.ranks, fresh.train.gpus) == (1, None), "a new run from this file chooses again"


def test_ranks_are_called_like_their_logs() -> None:
    assert [name_of_rank(rank) for rank in (0, 1, 12)] == ["trainer", "trainer-1", "trainer-12"]
