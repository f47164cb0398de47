"""Publish to a real vLLM that is split over two workers (tensor parallel), in every mode that works with it.

One server for all tests; the last ones damage it.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.vllm.conftest import HAS_GPU, Served
from tests.vllm.reference import load
from tests.vllm.test_verify import Trained
from treadle.config import EngineConfig, TrainConfig
from treadle.errors import ConfigError, EngineError, RequestError, SyncError
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.canary import ask_canary, prepare_canary
from treadle.sync.fingerprint import fingerprints as fingerprints_of
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import EngineLink
from treadle.sync.verify import PublishVerifier

pytestmark = [
    pytest.mark.xdist_group("split"),
    pytest.mark.skipif(HAS_GPU and torch.cuda.device_count() < 2, reason="it needs two GPUs, or a CPU alone"),
]
ATTENTION = "model.layers.0.self_attn"
Q, O_PROJ = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.o_proj.weight"
SOON_S = 60.0  # for what must not take a deadline of minutes
ON_CPU = 1e-4  # nats between this vLLM and a plain forward


class Publishing(Trained):
    """What modes that write files ask of a policy, besides."""

    def __init__(self, folder):
        super().__init__(folder)
        self._base = folder

    def change(self, seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.view(-1)[torch.randint(weight.numel(), (5,))] += 0.5

    def write_live_weights(self):
        pass

    def save_model(self, root, name):
        return self._save(root / name, dict(self.served_weights()), None)

    def save_weights(self, root, name, tensors, metadata):
        return self._save(root / name, tensors, metadata)

    def _save(self, folder, tensors, metadata):
        folder.mkdir()
        for file in self._base.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file({n: t.detach().clone() for n, t in tensors.items()}, folder / "model.safetensors", metadata=metadata)
        return folder


@pytest.fixture(scope="module")
def split(qwen2_model, tmp_path_factory):
    """Of 82 tokens the second worker has 18, besides the padding; biases, and an output layer of its own."""
    few = "--max-loras=2 --max-cpu-loras=4"
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "vllm_args": few}
    settings |= {"adapter_root": qwen2_model.parents[1], "vllm_python": sys.executable, "tensor_parallel_size": 2}
    served = Served(EngineConfig(engine="vllm", model=str(qwen2_model), enable_lora=True, max_lora_rank=16, **settings))
    yield served
    served.close()


@pytest.fixture
def publish(split, tmp_path):
    """Publish with a mode; every publish is verified by fingerprints and a canary."""

    def publish(policy, mode, *, timeout_s=120.0, **settings):
        config = TrainConfig(
            engine_url=split.url, save_path=split.folder.parent / "run", weight_bridge_mode=mode,
            publish_timeout_s=timeout_s, verify_publish="always", canary_tolerance=ON_CPU, steps=1000, **settings,
        )  # fmt: skip
        sync = choose_sync(config)
        sync.attach()

        def next_version():
            result = sync.publish(policy, split.engine.policy_version + 1)
            sync.settle()
            return result

        return next_version

    return publish


def num_bytes(policy):
    return sum(weight.nbytes for _, weight in policy.served_weights())


def check(split, policy):
    """Raise SyncError if a worker has other weights, or computes otherwise."""
    config = TrainConfig(engine_url=split.url, canary_tolerance=ON_CPU)
    verifier = PublishVerifier(config, EngineLink(split.url, 120.0))
    version = split.engine.policy_version
    return verifier.check(verifier.expect(policy, version), version)


def reload(split, folder):
    split(split.engine.reload(folder, split.engine.policy_version + 1))


def test_broadcasts_and_files_reach_both_workers_and_bad_shards_are_named(split, publish, tmp_path):
    policy = Publishing(split.folder)
    policy.model = load(split.folder)
    check(split, policy)  # vLLM's own loader wrote these: each worker's parts are where we look for them
    policy = Publishing(split.folder)
    with pytest.raises(SyncError, match=r"weights differ, .* on worker [01] of 2"):
        check(split, policy)
    for mode, settings in (("shared_vllm", {"use_shared_memory": True}), ("reload", {})):
        next_version = publish(policy, mode, **settings)
        for seed in range(2):
            policy.change(seed)
            result = next_version()
            assert result.verified.canary_mean < ON_CPU
            assert num_bytes(policy) <= result.num_bytes < 1.1 * num_bytes(policy) + 100_000
    right = dict(policy.served_weights())
    rows, columns = right[Q].chunk(2), right[O_PROJ].chunk(2, dim=1)
    faults = {
        f"{Q} on worker 0 of 2 and {Q} on worker 1 of 2 have changed places": {Q: torch.cat(rows[::-1])},
        f"1 of .* differ, {O_PROJ} on worker 1 of 2": {O_PROJ: torch.cat([columns[0], columns[0]], dim=1)},
    }
    for number, (words, wrong) in enumerate(faults.items()):
        reload(split, policy._save(tmp_path / str(number), right | wrong, None))
        with pytest.raises(SyncError, match=words):
            check(split, policy)
    reload(split, policy.save_model(tmp_path, "right"))
    check(split, policy)


def test_one_copy_is_refused_by_trainer_and_engine(split, publish):
    for mode, settings in (
        ("shared_vllm", {}), ("shared_vllm", {"single_copy": True}), ("lora_only", {"single_copy": True}),
        ("shared_vllm", {"use_shared_memory": True, "broadcast_by": "memory"}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"split over 2 GPUs .* cannot share its weights") as refused:
            publish(None, mode, **settings)
        assert "one GPU" in refused.value.fix


@pytest.mark.full
def test_a_delta_changes_the_elements_of_both_workers(split, publish):
    policy = Publishing(split.folder)
    next_version = publish(policy, "delta")
    for seed in range(3):
        policy.change(seed)
        next_version()
    wrong = {Q: torch.zeros(3, 3)}
    with pytest.raises(RequestError, match=rf"worker 0 of 2: {Q} in .* does not fit: it is \[3, 3\]"):
        reload(split, policy._save(split.folder.parent / "wrong", wrong, None))
    check(split, policy)


def write_adapter(split):
    """(its folder, its matrices as an engine has them, the model with it merged in)."""
    torch.manual_seed(3)
    settings = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    folder = split.folder.parent / "adapter"
    adapted = get_peft_model(load(split.folder), settings)
    adapted.save_pretrained(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model.").removesuffix(".weight"): weight for name, weight in saved.items()}
    matrices = {name: weight * 4 if name.endswith("lora_B") else weight for name, weight in named.items()}
    merged = Publishing(split.folder)
    merged.model = adapted.merge_and_unload()
    return folder, matrices, merged


def check_adapter(split, matrices, merged):
    assert split(split.engine.fingerprints(7, "adapter")) == fingerprints_of(matrices.items(), 7)
    canary, version = prepare_canary(merged), split.engine.policy_version
    assert ask_canary(EngineLink(split.url, 60.0), canary, version).is_within(ON_CPU)


@pytest.mark.full
def test_an_adapter_is_loaded_by_both_workers_and_has_its_fingerprints(split):
    folder, *expected = write_adapter(split)
    reload(split, split.folder)
    split(split.engine.load_adapter("adapter", folder, split.engine.policy_version + 1))
    check_adapter(split, *expected)
    split(split.engine.unload_adapter("adapter"))


@pytest.mark.full
def test_a_restart_from_saved_weights_or_an_adapter_reaches_both_workers(split, publish):
    policy = Publishing(split.folder)
    publish(policy, "none", timeout_s=900.0)()
    check(split, policy)
    folder, *expected = write_adapter(split)
    split(split.engine.restart(split.folder, folder, split.engine.policy_version + 1), timeout_s=900.0)
    check_adapter(split, *expected)
    split(split.engine.unload_adapter("adapter"))


def worker_1(split):
    return next(p for p in split.processes() if p.name().endswith("Worker_TP1"))


@pytest.mark.full
def test_a_worker_that_hangs_or_dies_in_a_broadcast_is_named(split):
    policy = Publishing(split.folder)
    engine = EngineLink(split.url, 120.0, save_path=split.folder.parent / "run")

    def begin(timeout_s):
        link = WeightBroadcaster([Receiver(engine, 2)], "gloo", timeout_s=timeout_s)
        link.join(policy)
        split(split.engine.hold("keep", 60))
        return link, worker_1(split), time.monotonic()

    link, hanging, started = begin(timeout_s=10.0)
    hanging.suspend()
    try:
        with pytest.raises(SyncError, match=r"\(worker 1 of 2 of the engine did not report\)"):
            link.send(policy)
    finally:
        hanging.resume()
    assert time.monotonic() - started < SOON_S
    with pytest.raises(EngineError, match="nothing may be sampled from a mixture"):
        split(split.engine.release(None))
    link, _, _ = begin(timeout_s=60.0)
    link.send(policy)
    split(split.engine.release(split.engine.policy_version + 1))
    check(split, policy)

    link, dying, started = begin(timeout_s=120.0)
    dying.suspend()
    threading.Timer(1.0, dying.kill).start()
    with pytest.raises(SyncError, match="worker 1 of 2"):
        link.send(policy)
    assert time.monotonic() - started < SOON_S
