"""Several trainer processes against one: the same gradients, weights and metrics, over real connections."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_model
from tests.unit.train import rank_worker
from treadle.config import TrainConfig
from treadle.config.train import OBJECTIVES
from treadle.errors import ConfigError
from treadle.support import fast_dtype
from treadle.train.ranks import ALONE, balance, choose_rank_device, join_ranks
from treadle.wire.groups import LeasedBatch, pack_batch, taught_group, unpack_batch

ROOT = Path(__file__).parents[3]
STEPS = 3
QUICK_OPTIMIZERS = ("adamw", "muon")  # one that works element by element, one that needs whole matrices
OPTIMIZERS = (*QUICK_OPTIMIZERS, "adafactor", "adamw_cpu")
KINDS = ("alive", "some dead")
# Settings that are compared with a single rank, besides the optimizers. Relative differences are at most 1e-5.
QUICK_VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {"kl_coef": 0.1, "kl_against": "reference", "reference_offload": True, "epochs": 2},
    "adapters": {"lora": True, "lora_dropout": 0.1, "kl_coef": 0.1, "kl_against": "reference"},
    "teacher": {"distill_coef": 0.5, "reward_coef": 0.0, "epochs": 2},
    "zero2": {"shard": "zero2", "gradient_checkpointing": True},
    "one layer": {"train_layer_indices": "1", "objective": "gspo"},
    "context": {"context_parallel": 2, "epochs": 2, "share_prompts": "on"},
}
FOUR_BITS = {"four bits": {"weight_bridge_mode": "lora_only", "quantization": "nf4"}}
VARIANTS = {**QUICK_VARIANTS, **FOUR_BITS, **{name: {"objective": name} for name in OBJECTIVES}}
REPLICATED = {"replicas": {"replicas": 2, "objective": "grpo"}}  # of 4 ranks
RESUMED = {
    "adamw": {"optimizer": "adamw"},
    "adamw_8bit": {"optimizer": "adamw_8bit", "dtype": fast_dtype("cpu")},
    # Saved after the second step: what dropout draws in a step that is given up is not taken back.
    "adapters": {"lora": True, "lora_dropout": 0.1, "epochs": 2, "checkpoint_interval": 2},
}
MORE_RESUMED: dict[int, dict[str, dict[str, Any]]] = {  # by the number of ranks, in `full` tests
    2: {name: {"optimizer": name} for name in OPTIMIZERS[1:]} | {"context": {"context_parallel": 2}},
    4: {"replicas": {"replicas": 2}, "adamw_8bit replicas": {**RESUMED["adamw_8bit"], "replicas": 2}},
}
NOT_OF_TIME = (
    "loss", "policy_loss", "kl", "entropy", "mean_ratio", "grad_norm", "learning_rate", "reward", "num_tokens",
    "sampling/importance_sampling_ratio/max", "sampling/importance_sampling_ratio/min", "pos_count", "neg_count",
    "batch/microbatches_per_step", "batch/forwarded_tokens_per_step", "skipped_steps",
)  # fmt: skip

# malloc keeps freed memory; with these, that of a tensor goes back to the system at once.
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}

EACH_NUMBER_OF_RANKS = pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(number, marks=pytest.mark.full) for number in (3, 4))]
)
EACH_OPTIMIZER = pytest.mark.parametrize(
    "optimizer", [*QUICK_OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.full) for name in OPTIMIZERS[2:])]
)


def run_ranks(*runs, device="cpu", variables=None):
    """Each run is (number of ranks, folder, timeout_s, jobs); exit codes of the ranks that are not silent, by run."""
    described = []
    for num_ranks, folder, timeout_s, jobs in runs:
        folder.mkdir(parents=True, exist_ok=True)
        silent = next((j["trouble"]["whom"] for j in jobs if j.get("trouble", {}).get("kind") == "silent"), None)
        described.append(
            {
                "ranks": num_ranks, "folder": str(folder), "timeout_s": timeout_s, "jobs": jobs, "silent": silent,
                "device": device, "is_odd": folder.name == "odd",
                "copies_slowly": folder.name == "slow",
                **({"ending_s": 20.0} if folder.name == "killed" else {}),
            }
        )  # fmt: skip
    runs_file = runs[0][1] / "runs.json"
    runs_file.write_text(json.dumps(described))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= variables or {}
    worker = [sys.executable, str(ROOT / "tests/unit/train/rank_worker.py"), str(runs_file)]
    with subprocess.Popen(worker, env=environment, start_new_session=True) as process:
        try:
            process.wait(timeout=900)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks it forked
    return [
        {rank: int(f.read_text()) for rank in range(n) if (f := folder / f"exit-{rank}.txt").exists()}
        for n, folder, _, _ in runs
    ]


def compared_jobs(model, folder, optimizers):
    return [
        {
            "model": str(model), "out": str(folder / f"{optimizer}, {kind}"), "steps": STEPS, "batches": kind,
            "checkpoints": str(folder / "checkpoints" / f"{optimizer}, {kind}"), "settings": {"optimizer": optimizer},
        }
        for optimizer in optimizers
        for kind in KINDS
    ]  # fmt: skip


def possible_variants(variants, num_ranks):
    possible = variants | (REPLICATED if num_ranks == 4 else {})
    return {name: s for name, s in possible.items() if num_ranks % s.get("context_parallel", 1) == 0}


def variant_jobs(model, folder, variants):
    return [
        {
            "model": str(model), "out": str(folder / name), "steps": 2, "batches": "alive",
            "checkpoints": str(folder / "checkpoints" / name), "settings": {"micro_tokens": 24, **settings},
        }
        for name, settings in variants.items()
    ]  # fmt: skip


def resumed_jobs(model, folder, variants, num_ranks=2):
    """Each setting three times: undisturbed; stopped by one rank in its third step; resumed from there."""
    jobs = []
    for name, settings in variants.items():
        plain = {"model": str(model), "steps": 4, "batches": "alive", "settings": settings}
        stop = {"kind": "stop", "whom": 1, "after": 2 * whole_looks(settings, num_ranks)}
        saved = {kind: str(folder / "checkpoints" / f"{kind} {name}") for kind in ("whole", "cut")}
        jobs += [
            plain | {"out": str(folder / f"whole {name}"), "checkpoints": saved["whole"]},
            plain | {"out": str(folder / f"cut {name}" / "a"), "checkpoints": saved["cut"], "trouble": stop},
            plain | {"out": str(folder / f"cut {name}" / "b"), "checkpoints": saved["cut"], "resume": True, "seed": 77},
        ]
    return jobs


def whole_looks(settings, num_ranks):
    """How often each rank checks for a stop in one step: before each turn."""
    config = TrainConfig(**(rank_worker.SETTINGS | settings))
    micros = rank_worker.pack(rank_worker.batches("alive", 1)[0], config).micros
    return max(map(len, balance([m.cost for m in micros], num_ranks // config.context_parallel)))


@pytest.fixture(scope="session")
def runs_folder(request, tmp_path_factory):
    """The model and the runs with 1 and 2 ranks, for `full` tests with 3 too. The first pytest worker makes them, the
    others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "is_complete").exists():
            is_full = any(item.get_closest_marker("full") for item in request.session.items)
            model = write_tiny_model(folder / "model", hidden_size=32, num_layers=2)
            if is_full:
                make_runs(model, folders_in(folder), OPTIMIZERS, VARIANTS, (2, 3, 4))
                run_all(
                    (n, folders_in(folder)[n] / "more", 60.0, resumed_jobs(model, folders_in(folder)[n] / "more", v, n))
                    for n, v in MORE_RESUMED.items()
                )
            else:
                make_runs(model, folders_in(folder), QUICK_OPTIMIZERS, QUICK_VARIANTS, (2,))
            (folder / "is_complete").touch()
    return folder


@pytest.fixture(scope="session")
def model(runs_folder):
    return runs_folder / "model"


@pytest.fixture(scope="session")
def results(runs_folder):
    """{number of ranks: folder}."""
    return folders_in(runs_folder)


def folders_in(folder):
    return {n: folder / f"ranks{n}" for n in (1, 2, 3, 4)}


def make_runs(model, folders, optimizers, variants, rank_counts):
    alone = {name: settings | {"shard": "fsdp2", "context_parallel": 1} for name, settings in variants.items()}
    for job in [*compared_jobs(model, folders[1], optimizers), *variant_jobs(model, folders[1], alone)]:
        rank_worker.run_job(job, ALONE)
    rank_worker.run_job(longer_job(model, folders[1]), ALONE)
    runs = []
    for num_ranks in rank_counts:
        folder = folders[num_ranks]
        shutil.copytree(folders[1] / "checkpoints" / "adamw, alive", folder / "checkpoints" / "longer")
        jobs = [*compared_jobs(model, folder, optimizers), longer_job(model, folder) | {"resume": True}]
        jobs += variant_jobs(model, folder, possible_variants(variants, num_ranks))
        runs.append((num_ranks, folder, 60.0, jobs + (resumed_jobs(model, folder, RESUMED) if num_ranks == 2 else [])))
    run_all(runs)


def run_all(runs):
    """`run_ranks`; all ranks must succeed."""
    runs = list(runs)
    for (num_ranks, folder, _, _), found in zip(runs, run_ranks(*runs), strict=True):
        output = "".join(file.read_text()[-2000:] for file in folder.glob("stderr-*.txt"))
        assert list(found.values()) == [0] * num_ranks, output


def longer_job(model, folder):
    """Two steps more than the compared ones."""
    return {
        "model": str(model), "out": str(folder / "longer"), "steps": STEPS + 2, "batches": "alive",
        "checkpoints": str(folder / "checkpoints" / "longer"),
    }  # fmt: skip


def rows(folder):
    return json.loads((folder / "rows.json").read_text())


@EACH_NUMBER_OF_RANKS
@pytest.mark.parametrize("kind", KINDS)
@EACH_OPTIMIZER
def test_several_ranks_train_as_one_does(results, num_ranks, kind, optimizer):
    alone, together = (results[n] / f"{optimizer}, {kind}" for n in (1, num_ranks))
    expected = load_file(alone / "weights-0.safetensors")
    weights = [load_file(together / f"weights-{rank}.safetensors") for rank in range(num_ranks)]
    coarse = 2e-4 if optimizer == "muon" else 2e-6  # Muon multiplies matrices in bf16, where roundings grow
    for name, wanted in expected.items():
        torch.testing.assert_close(weights[0][name], wanted, atol=coarse, rtol=1e-4)
        assert all(torch.equal(other[name], weights[0][name]) for other in weights[1:])
    gradients = load_file(together / "gradients-0.safetensors")
    for name, wanted in load_file(alone / "gradients-0.safetensors").items():
        torch.testing.assert_close(gradients[name], wanted, atol=coarse, rtol=1e-3)
    assert len(rows(together)) == STEPS
    num_micros = [row["batch/microbatches_per_step"] for row in rows(together)]
    assert num_micros[1] == 0 if kind == "some dead" else min(num_micros) > 3
    assert num_micros[0] == 1 or kind == "alive"  # one for all ranks
    for got, wanted in zip(rows(together), rows(alone), strict=True):
        assert {key: got[key] for key in NOT_OF_TIME} == pytest.approx(
            {key: wanted[key] for key in NOT_OF_TIME},
            rel=10 * coarse if optimizer == "muon" else 1e-4,
            abs=1e-6,
            nan_ok=True,
        )
        assert got.keys() == wanted.keys()
    assert json.loads((together / "acknowledged.json").read_text()) == [1, 2, 3]


@EACH_NUMBER_OF_RANKS
@pytest.mark.parametrize(
    "name",
    [*QUICK_VARIANTS, *(pytest.param(n, marks=pytest.mark.full) for n in (*FOUR_BITS, *OBJECTIVES, *REPLICATED))],
)
def test_losses_and_gradients_of_several_ranks_are_those_of_one(results, num_ranks, name):
    if name not in possible_variants(VARIANTS, num_ranks):
        pytest.skip("the ranks cannot be divided like this")
    alone, together = results[1] / (name if name in VARIANTS else "grpo"), results[num_ranks] / name
    for got, wanted in zip(rows(together), rows(alone), strict=True):
        keys = [*NOT_OF_TIME, *(key for key in wanted if key.startswith("distill/"))]
        assert ("distill/reverse_kl" in keys) == (name == "teacher")
        assert {key: got[key] for key in keys} == pytest.approx(
            {key: wanted[key] for key in keys}, rel=1e-5, abs=1e-7, nan_ok=True
        )
    gradients = load_file(together / "gradients-0.safetensors")
    for parameter, wanted in load_file(alone / "gradients-0.safetensors").items():
        assert float((gradients[parameter] - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-12, parameter


@pytest.mark.full
def test_no_rank_loads_the_whole_model_into_memory(tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden_size=512, num_layers=12)
    job = {
        "model": str(model), "out": str(tmp_path / "out"), "steps": 0, "batches": "alive", "saves": [],
        "checkpoints": str(tmp_path / "checkpoints"),
    }  # fmt: skip
    assert run_ranks((2, tmp_path, 100.0, [job]), variables=RETURNED_AT_ONCE) == [{0: 0, 1: 0}]
    num_bytes = (model / "model.safetensors").stat().st_size
    for rank in (0, 1):
        share = json.loads((tmp_path / "out" / f"outcome-{rank}.json").read_text())["loading_bytes"] / num_bytes
        print(f"rank {rank}: {share:.2f} of the model")
        assert 0.4 < share < 0.9  # its half, and two whole layers of twelve in the self-test


@pytest.mark.full
def test_a_rollout_of_32k_tokens_has_the_gradient_of_one_rank(tmp_path):
    """The two ranks of a context group share it: each has half of the tokens, and of the heads in attention."""
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    jobs = [
        {
            "model": str(model), "out": str(tmp_path / name), "steps": 0, "batches": "long", "saves": ["gradients"],
            "checkpoints": str(tmp_path / "checkpoints"),
            "settings": {"seq_len": rank_worker.LONG, "micro_tokens": 1024, "context_parallel": number},
        }
        for name, number in (("alone", 1), ("together", 2))
    ]  # fmt: skip
    rank_worker.run_job(jobs[0], ALONE)
    assert run_ranks((2, tmp_path, 200.0, jobs[1:])) == [{0: 0, 1: 0}], (tmp_path / "stderr-0.txt").read_text()
    gradients = load_file(tmp_path / "together" / "gradients-0.safetensors")
    for parameter, wanted in load_file(tmp_path / "alone" / "gradients-0.safetensors").items():
        gap = float((gradients[parameter] - wanted).norm() / wanted.norm())
        print(f"{parameter}: {gap:.1e}")
        assert gap <= 1e-5, parameter


@EACH_NUMBER_OF_RANKS
@EACH_OPTIMIZER
def test_each_rank_keeps_its_rows_of_every_weight(results, num_ranks, optimizer):
    together, alone = (results[n] / f"{optimizer}, alive" for n in (num_ranks, 1))
    (total,), sizes = (
        [json.loads((folder / f"outcome-{rank}.json").read_text())["num_own"] for rank in range(n)]
        for folder, n in ((alone, 1), (together, num_ranks))
    )
    assert sum(sizes) == total
    assert max(sizes) < 1.1 * total / num_ranks
    state = load_file(together / "state-0.safetensors")
    assert state.keys() == load_file(alone / "state-0.safetensors").keys()


def test_a_step_without_signal_changes_nothing_on_any_rank(results):
    norms = [row["grad_norm"] for row in rows(results[2] / "adamw, some dead")]
    assert math.isnan(norms[1])  # there is no gradient
    assert norms[0] > 0
    assert norms[2] > 0


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        *((2, name) for name in RESUMED),
        *(pytest.param(n, name, marks=pytest.mark.full) for n, variants in MORE_RESUMED.items() for name in variants),
    ],
)
def test_ranks_stop_together_and_resume_bit_for_bit(results, num_ranks, name):
    """Only rank 1 is asked to stop, in the middle of the third step: all end after the second. And all ranks have the
    same weights, also those that are replicas of each other."""
    folder = results[num_ranks] if name in RESUMED else results[num_ranks] / "more"
    whole, cut = folder / f"whole {name}", folder / f"cut {name}"
    for rank in range(num_ranks):
        assert json.loads((cut / "a" / f"outcome-{rank}.json").read_text())["stopped"] is True
        outcome = json.loads((cut / "b" / f"outcome-{rank}.json").read_text())
        assert (outcome["stopped"], outcome["restored"]) == (False, 2)
        for what in ("weights", "state"):
            expected = load_file(whole / f"{what}-{rank}.safetensors")
            got = load_file(cut / "b" / f"{what}-{rank}.safetensors")
            assert expected.keys() == got.keys()
            assert all(torch.equal(got[key], expected[key]) for key in expected)
            of_first = load_file(whole / f"{what}-0.safetensors")
            assert all(torch.equal(of_first[key], expected[key]) for key in expected)
    wanted = [[row[key] for key in NOT_OF_TIME] for row in rows(whole)]
    assert [[row[key] for key in NOT_OF_TIME] for row in (*rows(cut / "a"), *rows(cut / "b"))] == wanted
    assert len({row[5] for row in wanted}) == 4  # four different gradients


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_one_process_goes_on_from_the_checkpoint_of_two(results, model, tmp_path, name):
    whole = results[2] / f"whole {name}"
    job = {
        "model": str(model), "out": str(tmp_path), "steps": 4, "batches": "alive", "settings": RESUMED[name],
        "checkpoints": str(results[2] / "checkpoints" / f"whole {name}"), "resume": True,
    }  # fmt: skip
    rank_worker.run_job(job, ALONE)
    assert json.loads((tmp_path / "outcome-0.json").read_text())["restored"] == 4
    for parameter, weight in load_file(whole / "weights-0.safetensors").items():
        assert torch.equal(load_file(tmp_path / "weights-0.safetensors")[parameter], weight)
    saved = load_file(whole / "state-0.safetensors")
    got = load_file(tmp_path / "state-0.safetensors")
    assert got.keys() == saved.keys()
    if name == "adamw":  # adamw_8bit rounds its moments again, because blocks do not end where shards end
        assert all(torch.equal(got[key], saved[key]) for key in saved)


@EACH_NUMBER_OF_RANKS
def test_several_ranks_go_on_from_the_checkpoint_of_one(results, num_ranks):
    last = num_ranks - 1
    assert json.loads((results[num_ranks] / "longer" / f"outcome-{last}.json").read_text())["restored"] == STEPS
    got = load_file(results[num_ranks] / "longer" / f"weights-{last}.safetensors")
    for name, wanted in load_file(results[1] / "longer" / "weights-0.safetensors").items():
        torch.testing.assert_close(got[name], wanted, atol=5e-6, rtol=1e-4)


@pytest.mark.full  # tests/e2e/test_trainer_restarts.py kills a rank of a run
def test_a_lost_rank_ends_the_others_with_a_sentence(model, tmp_path):
    def job(kind):
        return {
            "model": str(model), "out": str(tmp_path / kind / "out"), "steps": 3, "batches": "alive",
            "checkpoints": str(tmp_path / kind / "checkpoints"), "trouble": {"kind": kind, "whom": 1, "after": 3},
        }  # fmt: skip

    runs = (
        (3, tmp_path / "killed", 100.0, [job("killed")]),
        (2, tmp_path / "silent", 6.0, [job("silent")]),
        (2, tmp_path / "odd", 60.0, []),
    )
    assert run_ranks(*runs) == [{0: 1, 1: -9, 2: 1}, {0: 1}, {0: 1, 1: 1}]
    ends = [(tmp_path / "killed" / f"exit-{rank}.txt").stat().st_mtime for rank in range(3)]
    assert max(ends) - ends[1] < 60  # the connections of a killed rank close: nobody waits for the timeout
    for kind, rank, size in (("killed", 0, 3), ("killed", 2, 3), ("silent", 0, 2)):
        output = (tmp_path / kind / f"stderr-{rank}.txt").read_text()
        # A rank that noticed first may have ended too when this one looks: then both are named.
        lost = r"(rank \d \(process \d+\), )?rank 1 \(process " if kind == "killed" else "the others while "
        assert re.search(rf"treadle: rank {rank} of {size} lost {lost}", output), output
        assert "-> the rank that ended first says why in its log" in output
        assert "Traceback" not in output
    assert "rank 1 has another seed than rank 0" in (tmp_path / "odd" / "stderr-1.txt").read_text()


@pytest.mark.full  # a rare wait
def test_rank_0_may_work_alone_for_longer_than_the_timeout(tmp_path):
    """It copies checkpoints; or waits for the engine in a publish, syncs a checkpoint, and verifies it."""
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    job = {"model": str(model), "checkpoints": str(tmp_path / "checkpoints"), "is_slow": True}
    run_all([(2, tmp_path / "slow", 4.0, []), (2, tmp_path / "slow disk", 4.0, [job])])


@EACH_NUMBER_OF_RANKS
def test_collective_operations_give_the_same_result_on_each_rank(results, num_ranks):
    exchanged = [json.loads((results[num_ranks] / f"exchanged-{r}.json").read_text()) for r in range(num_ranks)]
    for rank in exchanged:
        assert rank["gathered"] == ["", "x", "xx", "xxx"][:num_ranks]
        assert rank["broadcast"] == ["hello", ""]
        assert rank["led"] == (1 if rank is exchanged[0] else None)
        assert rank["numbers"] == [{2: 3.0, 3: 6.0, 4: 10.0}[num_ranks], num_ranks - 1]


def test_a_single_process_opens_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks(TrainConfig()) is ALONE
    assert not torch.distributed.is_initialized()
    assert ALONE.turns([3.0, 1.0, 2.0]) == [0, 1, 2]


def test_variables_of_atropos_broadcast_without_effect_are_reported(monkeypatch, caplog):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in (("NUM_INFERENCE_NODES", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "26756")):
        monkeypatch.setenv(name, value)
    one_engine = "NUM_INFERENCE_NODES has no effect: the trainer publishes to the one engine of --engine-url"
    with caplog.at_level("WARNING", logger="treadle.ranks"):
        join_ranks(TrainConfig(device="cpu"))
        monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it, MASTER_ADDR and MASTER_PORT too
        join_ranks(TrainConfig(device="cpu"))
    first, second, third = [record.treadle_fields["note"] for record in caplog.records]
    assert first == third == one_engine
    assert second.startswith("MASTER_ADDR and MASTER_PORT have no effect: they name where a broadcast meets")


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE is set and RANK"):
        join_ranks(TrainConfig(device="cpu"))
    with pytest.raises(ConfigError, match="no rank 5 among 2"):
        join_ranks(TrainConfig(device="cpu", ranks=2, trainer_rank=5))


def test_offloaded_weights_need_several_ranks_with_gpus(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="and there is one rank") as refusal:
        join_ranks(TrainConfig(device="cpu", offload_weights=True))
    assert "--train.optimizer adamw_cpu" in refusal.value.fix
    with pytest.raises(ConfigError, match="the ranks compute on a CPU") as refusal:
        join_ranks(TrainConfig(device="cpu", ranks=2, offload_weights=True))
    assert "leave --train.offload-weights out" in refusal.value.fix
    with pytest.raises(ValidationError, match="adamw_8bit changes weights on the GPU"):
        TrainConfig(offload_weights=True, optimizer="adamw_8bit")


def test_ranks_cannot_share_a_gpu():
    assert choose_rank_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda:1"):
        choose_rank_device("cuda:1", 0)


def test_a_batch_is_sent_unchanged():
    groups = rank_worker.batches("some dead", 2)[0]
    groups[0].advantages = [[0.1] * len(t) for t in groups[0].tokens]
    groups[1].inference_logprobs = None
    groups[1].generation_params = {"temperature": 0.7}
    batch = LeasedBatch(step=4, token="t", lease_s=2.5, groups=groups)
    assert unpack_batch(pack_batch(batch)) == batch
    values = [[math.nan, *[-0.5] * (len(t) - 1)] for t in groups[2].tokens]
    batch.groups[2] = taught_group(groups[2], values)
    got = unpack_batch(pack_batch(batch)).groups[2]
    assert str(got.teacher_logprobs) == str(values)  # a NaN equals nothing
    assert got.weight == groups[2].weight
