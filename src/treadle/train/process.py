"""The trainer process: put the parts together, restore, and run the loop."""

from __future__ import annotations

from pathlib import Path

import torch

from treadle.config import TrainConfig
from treadle.errors import ConfigError, ModelError
from treadle.log import get_logger
from treadle.sync.layout import Layout
from treadle.sync.offline import OfflineSync
from treadle.sync.shared_memory import SharedMemorySync
from treadle.track import JsonlTracker
from treadle.train.checkpoint import Checkpoints
from treadle.train.feed import HubFeed
from treadle.train.loop import Sync, train
from treadle.train.optim import Optimizer
from treadle.train.policy import Policy, load_policy, share_policy
from treadle.train.stop import StopRequested, StopSwitch
from treadle.wire.hub import RegisterTrainer

MAX_REASON_CHARS = 1000
log = get_logger("trainer")


def run_trainer(config: TrainConfig) -> None:
    stop = StopSwitch()
    stop.install()
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    sync, policy, folder = _connect(config)
    optimizer = Optimizer(policy, config)
    checkpoints = Checkpoints(config.save_path, folder)
    step = checkpoints.restore(policy, optimizer)
    tracker = JsonlTracker(config.metrics_file or config.save_path / "metrics.jsonl")
    tracker.truncate_after(step)
    feed = HubFeed(config.atropos_url, stop.check)
    feed.register(_registration(config, step, policy.vocab_size))
    log.info("ready", step=step, steps=config.steps, sequences_per_step=config.sequences_per_step)
    try:
        train(config, policy, optimizer, feed, sync, checkpoints, tracker, first_step=step, check_stop=stop.check)
    except StopRequested:
        feed.give_back("the trainer was stopped", counts=False)
        log.info("stopped", reason="asked to")
    except Exception as error:
        feed.give_back(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS], counts=True)
        raise


def _connect(config: TrainConfig) -> tuple[Sync, Policy, Path]:
    """The sync mode decides where the live weights are."""
    if config.weight_bridge_mode == "shared_memory":
        shared = SharedMemorySync(config.engine_url)
        layout = shared.fetch_layout()
        _check_same_model(config, layout)
        policy = share_policy(layout, logprob_chunk=config.logprob_chunk, device=config.device)
        return shared, policy, Path(layout.model)
    folder = Path(config.model)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder '{folder}'", fix="without an engine, --model takes a folder")
    policy = load_policy(folder, dtype=config.dtype, device=config.device, logprob_chunk=config.logprob_chunk)
    return OfflineSync(), policy, folder


def _check_same_model(config: TrainConfig, layout: Layout) -> None:
    """With shared weights the engine decides what is trained; a different wish is a mistake."""
    wished = Path(config.model)
    if wished.is_dir() and wished.resolve() != Path(layout.model).resolve():
        raise ConfigError(f"the engine serves {layout.model}, not {wished}", fix="give both the same --model")
    if config.dtype not in ("auto", layout.dtype):
        raise ConfigError(
            f"the engine's weights are {layout.dtype}, not {config.dtype}", fix="set --dtype at the engine"
        )


def _registration(config: TrainConfig, step: int, vocab_size: int) -> RegisterTrainer:
    return RegisterTrainer(
        wandb_group="",
        wandb_project="",
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path),
        save_checkpoint_interval=config.checkpoint_interval or config.steps,
        starting_step=step,
        num_steps=config.steps,
        vocab_size=vocab_size,
    )
