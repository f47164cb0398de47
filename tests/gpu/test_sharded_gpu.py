"""Two ranks on one GPU train as one does, and broadcast to an engine. Never run in CI: pytest -m gpu tests/gpu.

NCCL accepts two ranks on one GPU if each has a host name of its own; it then connects them by sockets. The jobs and the
processes are those of tests/unit/train/test_ranks.py, where the same code runs on a CPU over Gloo.

Compared with one rank: bf16 weights, fp32 masters and sums. Attention adds gradients in another order in every run, so
two runs of one rank differ too; that difference is printed beside the one of two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.gpu.test_nccl import AS_TWO_HOSTS
from tests.tiny_model import write_tiny_model
from tests.unit.train.test_ranks import ROOT, run_ranks
from treadle.budget.estimate import estimate
from treadle.budget.hardware import Machine
from treadle.budget.job import PlannedJob
from treadle.budget.shapes import read_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 3
SMALL = {
    "vocab_size": 16_000, "hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 6,
    "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}  # fmt: skip
SETTINGS = {"dtype": "bfloat16", "device": "cuda", "compile": "off", "micro_tokens": 30, "checkpoint_interval": 0}
# Each is compared with one rank that has the first settings.
VARIANTS = {
    "llama": {}, "qwen3": {}, "zero2": {"shard": "zero2"}, "offload": {"offload_weights": True},
    "offload, adamw_cpu": {"offload_weights": True, "optimizer": "adamw_cpu"},
}  # fmt: skip
COMPILED = {"compiled": {"compile": "on"}}
VARIABLES = {**AS_TWO_HOSTS, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # no CUDA in the process that forks
MAX_NORM_GAP, MAX_CHANGE_GAP = 0.01, 0.05  # of the gradient norm; of the change of all weights together
# Of one rank's peak memory: half of everything, two whole layers and the embeddings; with zero2 all weights.
MAX_SHARE, MAX_SHARE_ZERO2 = 0.75, 0.9


def jobs(models, out, names):
    return [
        {
            "model": str(models.get(name, models["llama"])), "out": str(out / name), "steps": STEPS,
            "batches": "alive", "checkpoints": str(out / "checkpoints" / name),
            "settings": SETTINGS | (VARIANTS | COMPILED)[name],
            "saves": ["start", "weights"],
        }
        for name in names
    ]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, config in (("llama", LlamaConfig(**SMALL)), ("qwen3", Qwen3Config(**SMALL))):
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder / name)
    return {name: folder / name for name in ("llama", "qwen3")}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """The folder of the run that does each variant with two ranks; "one", "again": one rank, twice."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("one", "again", "two", "offload")}
    alone = ("llama", "qwen3")
    offloaded = [name for name in VARIANTS if "offload" in name]
    plain = [name for name in VARIANTS if name not in offloaded]
    runs = [(1, folders[kind], 120.0, jobs(models, folders[kind], alone)) for kind in ("one", "again")]
    runs += [
        (2, folders[kind], 120.0, jobs(models, folders[kind], names))
        for kind, names in (("two", plain), ("offload", offloaded))
    ]
    run_ranks(*runs, device="cuda", variables=VARIABLES)
    return folders | dict.fromkeys(plain, folders["two"]) | dict.fromkeys(offloaded, folders["offload"])


def ended_well(folder):
    """The folder of a run, all of whose ranks must have ended without an error."""
    said = "".join(file.read_text()[-3000:] for file in folder.glob("stderr-*.txt"))
    assert {file.read_text() for file in folder.glob("exit-*.txt")} == {"0"}, said
    return folder


def outcome(folder, rank=0):
    return json.loads((folder / f"outcome-{rank}.json").read_text())


def norms(folder):
    return torch.tensor([row["grad_norm"] for row in json.loads((folder / "rows.json").read_text())])


def changes(folder, rank=0):
    """What the steps changed, of all weights together."""
    start, end = (load_file(folder / f"{what}-{rank}.safetensors") for what in ("start", "weights"))
    return torch.cat([(end[name].float() - start[name].float()).flatten().cpu() for name in start])


def gap(changed, wanted):
    return float((changed - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_on_nccl_take_the_steps_of_one(results, name):
    one = name if name == "qwen3" else "llama"
    alone, again = (ended_well(results[kind]) / one for kind in ("one", "again"))
    two = ended_well(results[name]) / name
    wanted, changed = changes(alone), changes(two)
    norm_gap = float((norms(two) / norms(alone) - 1).abs().max())
    print(
        f"{name}: gradient norms {norms(two).tolist()}, of one rank {norms(alone).tolist()}; largest difference "
        f"{norm_gap:.2e} (one rank again {float((norms(again) / norms(alone) - 1).abs().max()):.2e}); change of the "
        f"weights differs by {gap(changed, wanted):.2e} (one rank again {gap(changes(again), wanted):.2e})"
    )
    assert float(wanted.norm()) > 0
    assert torch.isfinite(norms(two)).all()
    assert norm_gap < MAX_NORM_GAP
    assert gap(changed, wanted) < MAX_CHANGE_GAP
    assert torch.equal(changes(two, rank=1), changed)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_of_two_ranks_has_its_part_in_gpu_memory(results, models, name):
    one = outcome(ended_well(results["one"]) / (name if name == "qwen3" else "llama"))["peak_bytes"]
    peaks = [outcome(ended_well(results[name]) / name, rank)["peak_bytes"] for rank in (0, 1)]
    settings = VARIANTS[name]
    job = PlannedJob(
        read_shape(models.get(name, models["llama"]) / "config.json"), mode="none", train_gpus=2, engine_gpus=1,
        micro_tokens=30, prompt_tokens=2, completion_tokens=4, group_size=3, shares_prompts=False, is_compiled=False,
        shard=settings.get("shard", "fsdp2"), offloads_weights=settings.get("offload_weights", False),
        optimizer=settings.get("optimizer", "adamw"),
    )  # fmt: skip
    planned = estimate(job, Machine("card", 2**40, 2**40)).pools[0].trainer_tensors
    print(
        f"{name}: ranks {' and '.join(f'{peak / 1e9:.3f}' for peak in peaks)} GB of tensors, the plan says "
        f"{planned / 1e9:.3f} GB; one rank {one / 1e9:.3f} GB"
    )
    assert max(peaks) < (MAX_SHARE_ZERO2 if name == "zero2" else MAX_SHARE) * one


def test_compiled_layers_of_two_ranks_take_the_steps_of_one(models, tmp_path):
    """Compared with compiled layers of one rank, which round like them; fused code rounds otherwise than eager."""
    folders = {number: tmp_path / str(number) for number in (1, 2)}
    runs = [(number, folder, 200.0, jobs(models, folder, ["compiled"])) for number, folder in folders.items()]
    run_ranks(*runs, device="cuda", variables=VARIABLES)
    alone, two = (ended_well(folder) / "compiled" for folder in folders.values())
    norm_gap = float((norms(two) / norms(alone) - 1).abs().max())
    print(f"compiled: gradient norm {norm_gap:.2e}, change of the weights {gap(changes(two), changes(alone)):.2e}")
    assert norm_gap < MAX_NORM_GAP
    assert gap(changes(two), changes(alone)) < MAX_CHANGE_GAP


def publish_from_two_ranks(folder, device, backend):
    """What rank 0 received for each publish; the engine is the third host."""
    model = write_tiny_model(folder / "model", hidden_size=256)
    port, log = free_port(), folder / "engine.log"
    flags = ("--engine", "transformers", "--model", str(model), "--port", str(port), "--device", device,
             "--dtype", "bfloat16" if device == "cuda" else "float32", "--max-model-len", "256")  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (AS_TWO_HOSTS | {"NCCL_HOSTID": "engine"}).items():
            patch.setenv(name, value)
        with running("engine", *flags, log=log) as engine:
            wait_until_healthy(f"{url}/health", engine, log, timeout_s=120)
            worker = [sys.executable, str(ROOT / "tests/gpu/publishing_rank.py"), url, str(folder), device, backend]
            common = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            ranks = [
                subprocess.Popen(worker, env=common | {"RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"})
                for rank in (0, 1)
            ]
            try:
                assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
            finally:
                for rank in ranks:
                    rank.kill()
    return json.loads((folder / "published.json").read_text())


def test_two_ranks_broadcast_to_an_engine_by_nccl(tmp_path):
    """Each publish is proved by fingerprints of all weights, and by the canary."""
    published = publish_from_two_ranks(tmp_path, "cuda", "nccl")
    print(published)
    assert [receipt["version"] for receipt in published] == [0, 1, 2]
    assert all(receipt["canary_mean"] is not None for receipt in published)
