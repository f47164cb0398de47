"""The trainer process: put the parts together, restore, and run the loop."""

from __future__ import annotations

import httpx
import torch
from safetensors import SafetensorError

from treadle.config import TrainConfig
from treadle.config.secret_settings import without_secrets
from treadle.errors import EngineError, HubError, OutOfMemory, SyncError, UserError, is_out_of_memory
from treadle.loading import choose_device, report_loading
from treadle.log import get_logger
from treadle.sync.layout import Layout
from treadle.sync.modes import choose_sync
from treadle.sync.verify import check_saved_weights
from treadle.track import Tracker, build_tracker
from treadle.track.fan import DEFAULT_PROJECT, group_of
from treadle.train.checkpoint import Checkpoints
from treadle.train.feed import HubFeed
from treadle.train.join import join_ranks
from treadle.train.loop import Sync, train
from treadle.train.optim import build_optimizer
from treadle.train.policy import build_policy
from treadle.train.rank_ports import FollowingSync, FollowingTracker, open_feed
from treadle.train.ranks import Ranks
from treadle.train.stop import StopRequested, StopSwitch
from treadle.train.token_record import open_token_record
from treadle.train.watched import Progress, WatchedMode
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog
from treadle.wire.hub import RegisterTrainer, Trackers

MAX_REASON_CHARS = 1000
# What goes wrong around a batch and not with it: settings, a full disk, the hub, the engine, the files, a key press.
AROUND_THE_BATCH = (
    UserError, HubError, EngineError, SyncError, OSError, httpx.HTTPError, SafetensorError,
    KeyboardInterrupt, SystemExit,
)  # fmt: skip
log = get_logger("trainer")


def run_trainer(config: TrainConfig) -> None:
    stop = StopSwitch()
    ranks = join_ranks(config)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    config = config.on_device(gpu=choose_device(config.device).type == "cuda")
    waits = Waits()
    mode = WatchedMode(choose_sync(config), waits, config)
    name = "trainer" if ranks.size == 1 else f"trainer {ranks.rank}"
    progress = Progress(mode, stop.check)
    with Watchdog("trainer", name, waits, config.atropos_url, progress.about):
        try:
            _train(config, ranks, mode, waits, stop, progress)
        except RuntimeError as error:
            if (told := no_room(error, config)) is not None:
                raise told from error
            raise
    ranks.leave()


def no_room(error: RuntimeError, config: TrainConfig) -> OutOfMemory | None:
    """For an error of torch's that says that there is no memory left."""
    words = f"{type(error).__name__}: {error}"
    if not is_out_of_memory(words):
        return None
    smaller = [f"--micro-tokens {config.micro_tokens // 2}"] if config.micro_tokens > 1 else []
    smaller += [] if config.gradient_checkpointing else ["--gradient-checkpointing true"]
    smaller += ["--gradient-dtype bfloat16"] if config.gradient_dtype == "float32" else []
    return OutOfMemory(
        f"the trainer has no memory left: {words.splitlines()[0]}",
        fix=f"{', '.join([*smaller, '--optimizer adafactor'])}, or less for the engine "
        "(--engine.gpu-memory-utilization); `treadle plan` with the flags of the run says which of them fit",
    )


def _train(
    config: TrainConfig, ranks: Ranks, mode: WatchedMode, waits: Waits, stop: StopSwitch, progress: Progress
) -> None:
    engine = mode.attach()
    # The sync mode decides where the live weights are; rank 0 alone publishes them.
    with report_loading(progress.loads):
        policy = build_policy(engine, config, ranks)
    sync: Sync = mode if ranks.leads else FollowingSync()
    if not ranks.leads:
        torch.manual_seed(config.seed + ranks.rank)  # adapters begin alike everywhere, dropouts differ
    reference = policy.reference(engine.folder) if config.kl_coef > 0 and config.kl_against == "reference" else None
    optimizer = build_optimizer(policy, config)
    checkpoints = Checkpoints(config.save_path, engine.folder, config.keep_checkpoints, ranks)
    restored = checkpoints.restore(policy, optimizer)
    has_frozen_base = policy.is_the_engines and policy.adapter is not None
    if engine.layout is not None and restored.step == 0 and not has_frozen_base:
        _refuse_trained_weights(engine.layout)
    if policy.is_the_engines and (restored.step == 0 or has_frozen_base):
        weights = ((name, weight.detach()) for name, weight in policy.weights.items())
        log.info("weights_compared", number=check_saved_weights(weights, engine.folder))
    tracker = _open_tracker(config) if ranks.leads else FollowingTracker()
    tracker.truncate_after(restored.step)
    feed = open_feed(
        ranks, stop.check, lambda check: HubFeed(config.atropos_url, check, waits, config.batch_patience_s)
    )
    policy.computing = stop.computing
    stop.install()  # from here on there is something to end in order; before, a signal simply ends the process
    registration = _registration(config, restored.step, policy.vocab_size)
    is_done = restored.step >= config.steps  # killed between its last checkpoint and its final model
    if not is_done:
        feed.register(registration)
    log.info("ready", step=restored.step, steps=config.steps, sequences_per_step=config.sequences_per_step)
    try:
        train(
            config, policy, optimizer, feed, sync, checkpoints, tracker,
            reference=reference, restored=restored, check_stop=progress.check,
            tokens=open_token_record(config, config.metrics_path, ranks.rank),
        )  # fmt: skip
        if is_done:
            feed.register(registration)  # not before the weights are published: environments now evaluate them
    except StopRequested:
        feed.give_back("the trainer was stopped", counts=False)
        log.info("stopped", reason="asked to")
    except BaseException as error:
        # A batch that failed too often is set aside: only what it can have caused itself may count.
        counts = not isinstance(error, AROUND_THE_BATCH)
        feed.give_back(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS], counts=counts)
        raise
    finally:
        tracker.close()


def _open_tracker(config: TrainConfig) -> Tracker:
    return build_tracker(config, config.metrics_path, without_secrets(config.model_dump(mode="json")))


def _refuse_trained_weights(layout: Layout) -> None:
    """Without a checkpoint training begins from the engine's weights: they must be those that it loaded.

    A trainer that was killed leaves what it last published, or, when that was not finished, something half written
    with the engine held. A checkpoint makes up for both: it writes every weight that is trained, and no other changes.
    """
    if layout.policy_version not in (None, 0):
        problem = f"the engine already serves version {layout.policy_version} of this policy"
    elif layout.is_held:
        problem = "the engine is held in the middle of a publish, and its weights may be half written"
    else:
        return
    raise SyncError(
        f"{problem}, and there is no checkpoint to continue from", fix="restart the engine, then the trainer"
    )


def _registration(config: TrainConfig, step: int, vocab_size: int) -> RegisterTrainer:
    trackers = Trackers(
        sinks=config.sinks,
        project=config.wandb_project or DEFAULT_PROJECT,
        group=group_of(config, config.metrics_path) if config.sinks else "",
    )
    uses_wandb = "wandb" in config.sinks
    return RegisterTrainer(  # environments of Atropos log to this project and group at W&B
        wandb_group=trackers.group if uses_wandb else "",
        wandb_project=trackers.project if uses_wandb else "",
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path),
        save_checkpoint_interval=config.checkpoint_interval or config.steps,
        starting_step=step,
        num_steps=config.steps,
        vocab_size=vocab_size,
        publish_interval=config.publish_interval,
        trackers=trackers,
    )
