"""The ranks of tests/unit/train/test_ranks.py, as processes: python rank_worker.py RUNS.json

A run is {"ranks": 2, "timeout_s": 60, "folder": ..., "jobs": [...], "device": "cpu"}: that many processes, which do the
jobs one after the other; on a GPU all on the first one, as on a host each. All runs go on at the same time, forked from
here so that torch is imported once. Each rank leaves stderr-N.txt and exit-N.txt in the folder. The test imports
`run_job` too, to do the same jobs alone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.e2e.processes import free_port
from treadle.config import TrainConfig
from treadle.errors import TreadleError
from treadle.sync.modes import OfflineSync
from treadle.sync.protocol import PublishResult
from treadle.train import checkpoint
from treadle.train import ranks as ranks_module
from treadle.train.checkpoint import Checkpoints, Totals
from treadle.train.checkpoint_copies import CheckpointCopies, copied_checkpoints
from treadle.train.feed import open_feed
from treadle.train.loop import FROM_THE_START, FrozenLogprobs, accumulate_gradients, train
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.train.publishing import Welcome, publish_with_ranks
from treadle.train.ranks import join_ranks
from treadle.train.sharding import join_parts, own_part, whole
from treadle.train.stop import StopRequested
from treadle.wire.groups import LeasedBatch, ScoredGroup

SETTINGS = {
    "lr": 1e-3, "warmup_steps": 0, "dtype": "float32", "device": "cpu", "micro_tokens": 13,
    "share_prompts": "off", "schedule": "constant",
}  # fmt: skip


LONG = 32_768  # tokens of a rollout


def group(scores, *, seed=0, logprob=-4.0, lengths=()):
    """`lengths`: of the completions, after two tokens of the prompt; by default 2, 3, 4, ..."""
    random = torch.Generator().manual_seed(seed)
    lengths = lengths or range(2, 2 + len(scores))
    completions = [torch.randint(3, 60, (length,), generator=random).tolist() for length in lengths]
    return ScoredGroup(
        tokens=[[5, 6, *c] for c in completions],
        masks=[[-100, -100, *c] for c in completions],
        scores=list(scores),
        inference_logprobs=[[1.0, 1.0, *[logprob] * len(c)] for c in completions],
        distill_token_ids=[
            [[], [], *([token] for token in c)] for c in completions
        ],  # read when something is distilled
        distill_logprobs=[[[], [], *([-token / 10] for token in c)] for c in completions],
        policy_version=0,
        metrics={"accuracy": 0.5},
        weight=0.75,
    )


def batches(kind, num_steps):
    """All groups teach something; or some steps have few such groups, and the second has none. "long": one group."""
    if kind == "long":
        return [[group([1.0, 0.0], lengths=(LONG - 2, 200))]]
    if kind == "alive":
        return [[group([1.0, 0.0, 0.25], seed=9 * s + i) for i in range(4)] for s in range(num_steps)]
    alive, dead = group([1.0, 0.0], seed=5), group([1.0, 1.0], seed=6)
    return [[alive, dead, dead], [dead, dead], *[[dead, group([0.0, 2.0], seed=s)] for s in range(2, num_steps)]]


class ListFeed:
    """Rank 0's hub."""

    def __init__(self, batches, check):
        self.batches = batches
        self.check = check
        self.acknowledged = []

    def lease(self, step):
        self.check()
        return LeasedBatch(step=step, token=str(step), lease_s=1.0, groups=self.batches[step - 1])

    def lease_ahead(self, step):
        self.check()

    def look_ahead(self, step):
        pass

    def ack(self, batch):
        self.acknowledged.append(batch.step)

    def give_back(self, reason, *, counts):
        raise AssertionError(reason)

    def register(self, registration):
        raise AssertionError(registration)


class ListTracker:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})


class Trouble:
    """The fault to inject into a rank, at its first read of a batch after `after` batches."""

    def __init__(self, rank, *, kind=None, whom=0, after=0):
        self._kind = kind if rank == whom else None
        self._left = after

    def __call__(self):
        self._left -= 1
        if self._kind is None or self._left >= 0:
            return
        if self._kind == "stop":
            raise StopRequested
        if self._kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "silent":
            time.sleep(600)


class PeakMemory:
    """Samples how far the anonymous memory of this process rises in the block."""

    def __init__(self):
        self.num_bytes = 0
        self._is_done = threading.Event()

    def __enter__(self):
        self._before = self._anonymous()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        return self

    def __exit__(self, *_):
        self._is_done.set()
        self._sampler.join()

    def _sample(self):
        while not self._is_done.wait(0.002):
            self.num_bytes = max(self.num_bytes, self._anonymous() - self._before)

    def _anonymous(self):
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def run_job(job, ranks):
    """Train, and leave in job["out"] what this rank has at the end."""
    out = Path(job["out"])
    model = Path(job["model"])
    groups = batches(job["batches"], max(1, job["steps"]))
    config = TrainConfig(steps=max(1, job["steps"]), **(SETTINGS | job.get("settings", {})))
    torch.manual_seed(job.get("seed", 0))
    uses_gpu = config.device == "cuda"
    if uses_gpu:
        gc.collect()  # parts of the job before this one
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as loading:
        policy = load_policy(model, config, ranks=ranks)
    needs_reference = config.kl_coef > 0 and config.kl_against == "reference"
    reference = policy.reference(model) if needs_reference else None
    optimizer = build_optimizer(policy, config)
    checkpoints = Checkpoints(Path(job["checkpoints"]), model, 2, ranks)
    restored = checkpoints.restore(policy, optimizer) if job.get("resume") else FROM_THE_START
    tracker = ListTracker() if ranks.leads else None
    trouble = Trouble(ranks.rank, **job.get("trouble", {}))
    mode = OfflineSync(config)
    feed = open_feed(ranks, lambda: None, Welcome(mode, policy), lambda check: ListFeed(groups, check))
    was_stopped = False
    saves = job.get("saves", ["weights", "gradients", "state"])
    start = {name: whole(p.detach()).to("cpu", copy=True) for name, p in policy.live.items() if "start" in saves}
    try:
        if job["steps"]:
            train(
                config, policy, optimizer, feed, mode.publish, checkpoints, tracker, restored=restored,
                check_stop=trouble, reference=reference,
            )  # fmt: skip
    except StopRequested:
        was_stopped = True
    peak_bytes = torch.cuda.max_memory_allocated() if uses_gpu else 0
    sizes = {name: own_part(p).numel() for name, p in policy.live.items()}
    weights = {name: whole(p.detach()) for name, p in policy.live.items()}
    batch = pack(groups[0], config, token_cost=policy.token_cost)
    accumulate_gradients(policy, batch, config, FrozenLogprobs(reference))
    gradients = {name: whole(join_parts(policy.live[name], g)) for name, g in optimizer.gradients.items()}
    state = {name: whole(tensor).contiguous() for name, tensor in optimizer.state().items()}
    out.mkdir(parents=True, exist_ok=True)
    for what, tensors in {"start": start, "weights": weights, "gradients": gradients, "state": state}.items():
        if what in saves:
            save_file(tensors, out / f"{what}-{ranks.rank}.safetensors")
    outcome = {
        "stopped": was_stopped, "restored": restored.step, "num_own": sum(sizes.values()), "peak_bytes": peak_bytes,
        "loading_bytes": loading.num_bytes,
    }  # fmt: skip
    (out / f"outcome-{ranks.rank}.json").write_text(json.dumps(outcome))
    if ranks.leads:
        (out / "rows.json").write_text(json.dumps(tracker.rows))
        (out / "acknowledged.json").write_text(
            json.dumps(feed._hub.acknowledged if ranks.size > 1 else feed.acknowledged)
        )


def exchange(ranks):
    """What this rank has after a few exchanges."""
    return {
        "gathered": [m.decode() for m in ranks.gather("a test", b"x" * ranks.rank)],
        "broadcast": [ranks.broadcast("a test", message * ranks.leads).decode() for message in (b"hello", b"")],
        "led": ranks.lead("a test", lambda: ranks.rank + 1),
        "numbers": [ranks.reduce(ranks.rank + 1.0, "sum"), ranks.reduce(ranks.rank, "max")],
    }


def slow(act, ranks, is_slow=lambda *_: True):
    """`act` that takes longer than other ranks wait for a collective operation."""

    def act_slowly(*args):
        time.sleep(1.25 * ranks.timeout_s if is_slow(*args) else 0)
        return act(*args)

    return act_slowly


def publish_slowly(job, ranks):
    """Publish to a slow engine, save on a slow disk, and restore from it."""
    config = TrainConfig(**SETTINGS)
    policy = load_policy(Path(job["model"]), config, ranks=ranks)
    optimizer = build_optimizer(policy, config)
    load_in_engine = slow(list, ranks)

    def publish(leading, version):
        leading.write_live_weights()
        weights = list(leading.served_weights())
        load_in_engine(weights)
        leading.score_tokens([5, 6, 7])
        return PublishResult(version=version, wait_s=0.0, write_s=0.0)

    assert publish_with_ranks(publish, policy, 1).version == 1
    for name in ("sync_and_hash", "sha256"):  # of one file: others are hashed meanwhile, or are as slow
        setattr(checkpoint, name, slow(getattr(checkpoint, name), ranks, lambda file: file.suffix == ".tensors"))
    checkpoints = Checkpoints(Path(job["checkpoints"]), Path(job["model"]), 2, ranks)
    checkpoints.save(1, policy, optimizer, Totals())
    assert checkpoints.restore(policy, optimizer).step == 1


def copy_slowly(run, ranks):
    """Fetch and copy checkpoints, each slowly."""
    config = TrainConfig(save_path=Path(run["folder"]), checkpoint_url=f"file://{run['folder']}/copies")
    CheckpointCopies.match_newest = slow(CheckpointCopies.match_newest, ranks)
    CheckpointCopies.finish = slow(CheckpointCopies.finish, ranks)
    with copied_checkpoints(config, ranks) as copies:
        assert (copies is not None) == ranks.leads


def run_rank(run, rank, port):
    """A forked process: never returns."""
    with Path(run["folder"], f"stderr-{rank}.txt").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    device = run.get("device", "cpu")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    if device == "cuda":  # all on the first GPU, which NCCL allows to ranks of different hosts
        place |= {"LOCAL_RANK": 0, "NCCL_HOSTID": f"rank-{rank}", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in {**place, "WORLD_SIZE": run["ranks"]}.items()})
    code = 0
    try:
        own = {"seed": rank} if run.get("is_odd") else {}
        ranks_module.ENDING_S = run.get("ending_s", ranks_module.ENDING_S)
        ranks = join_ranks(TrainConfig(device=device, ranks_timeout_s=run["timeout_s"], **own))
        for job in run["jobs"]:
            (publish_slowly if job.get("is_slow") else run_job)(job, ranks)
        if run.get("copies_slowly"):
            copy_slowly(run, ranks)
        Path(run["folder"], f"exchanged-{rank}.json").write_text(json.dumps(exchange(ranks)))
        ranks.close()
    except TreadleError as error:
        sys.stderr.write(f"treadle: {error}\n")
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(runs_file):
    torch.set_num_threads(1)
    waited_for, silent = {}, set()
    runs = json.loads(Path(runs_file).read_text())
    if any(job.get("settings", {}).get("lora") for run in runs for job in run["jobs"]):
        importlib.import_module("peft")  # once, not in each rank
    for run in runs:
        port = free_port()
        for rank in range(run["ranks"]):
            pid = os.fork()
            if pid == 0:
                run_rank(run, rank, port)
            if run.get("silent") == rank:
                silent.add(pid)
            else:
                waited_for[pid] = Path(run["folder"], f"exit-{rank}.txt")
    while waited_for:
        pid, status = os.wait()
        if pid in waited_for:
            waited_for.pop(pid).write_text(str(os.waitstatus_to_exitcode(status)))
        silent.discard(pid)
    for pid in silent:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
