"""Run the trainer process: build its parts, restore a checkpoint, run the loop, report to the watchdog."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError

from treadle.config import TrainConfig
from treadle.config.files import without_secrets
from treadle.errors import EngineError, HubError, MissingExtra, OutOfMemory, SyncError, UserError, is_out_of_memory
from treadle.loading import choose_device, report_loading
from treadle.log import get_logger
from treadle.net.address import shown_url
from treadle.sync.layout import Layout
from treadle.sync.model_folders import local_folder
from treadle.sync.modes import choose_sync
from treadle.sync.protocol import AttachedModel, EngineLink, Publishable, PublishResult, SyncMode
from treadle.sync.verify import check_saved_weights
from treadle.track import Tracker, build_tracker
from treadle.track.files import HEALTH_FILE, TOKENS_FOLDER, HealthFile
from treadle.track.trackers import DEFAULT_PROJECT, group_of
from treadle.train.card_sharing import share_card
from treadle.train.checkpoint import Checkpoints
from treadle.train.feed import Aside, HubFeed, open_feed
from treadle.train.loop import Feed, RecentTokenRecord, StepMetrics, all_metrics, train
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import Policy, build_policy, compile_ahead
from treadle.train.publishing import Welcome
from treadle.train.ranks import Ranks, join_ranks
from treadle.train.stop import StopRequested, StopSwitch
from treadle.train.teacher import Teacher, open_teacher
from treadle.watch.waits import Waits, WaitSpec
from treadle.watch.watchdog import ProcessFacts, Watchdog
from treadle.wire.bridge import ReloadWeights, Updated
from treadle.wire.hub import RegisterTrainer, Trackers, WorkReport

if TYPE_CHECKING:
    from treadle.train.checkpoint_copies import CheckpointCopies

LOADING_S = 900.0
# A publish fails at its deadline; stacks are dumped before that, while all processes are still where they hang.
SHARE_OF_DEADLINE = 0.5
MAX_REASON_CHARS = 1000
# Errors that a batch cannot cause: settings, a full disk, the hub, the engine, files, a key press.
NOT_CAUSED_BY_BATCH = (
    UserError, HubError, EngineError, SyncError, OSError, SafetensorError,
    KeyboardInterrupt, SystemExit,
)  # fmt: skip
log = get_logger("trainer")


class WatchedSync(SyncMode):
    """SyncMode wrapper that registers every wait with the watchdog. `version`: the last one that the engine adopted."""

    def __init__(self, mode: SyncMode, waits: Waits, config: TrainConfig) -> None:
        self._mode = mode
        self._waits = waits
        self._config = config
        self.version: int | None = None

    def attach(self) -> AttachedModel:
        loaded = WaitSpec(
            f"the engine at {' '.join(map(shown_url, self._config.engine_url))} to be ready",
            fix="start it with `treadle engine`, or name another with --engine-url; its log says how far it is",
            of="engine",
            deadline_s=LOADING_S,
        )
        with self._waits.waiting(loaded):
            return self._mode.attach()

    def settle(self) -> None:
        self._mode.settle()

    def welcome(self) -> Callable[[Publishable], None] | None:
        return self._mode.welcome()

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        answer = WaitSpec(
            "the engine to say which weights it has",
            fix="the engine's log says what it does; --publish-timeout-s ends this wait",
            of="engine",
            deadline_s=SHARE_OF_DEADLINE * self._config.publish_deadline_s,
        )
        with self._waits.waiting(answer):
            self._mode.settle()
        adoption = WaitSpec(
            f"the engine to adopt version {version}",
            fix="the engine's log says what it does; --publish-timeout-s ends this wait",
            of="engine",
            holding=f"step {version}",
            deadline_s=SHARE_OF_DEADLINE * self._config.publish_deadline_s,
        )
        with self._waits.waiting(adoption):
            receipt = self._mode.publish(policy, version)
        self.version = receipt.version
        return receipt


class TrainerProgress:
    """The trainer's report for the watchdog: a step may take longer than others wait without a sign of life."""

    def __init__(self, mode: WatchedSync, check_stop: Callable[[], None]) -> None:
        self._mode = mode
        self._check_stop = check_stop
        self._num_micros = 0
        self._loading: WorkReport | None = None  # None: unknown

    def loads(self, what: str, done: int, total: int) -> None:
        """Called before the first publish."""
        self._loading = WorkReport(what=what, done=done, total=total)

    def check(self) -> None:
        """Called before each micro."""
        self._num_micros += 1
        self._check_stop()

    def about(self) -> ProcessFacts:
        version = self._mode.version
        if version is None:
            return ProcessFacts(state="loading", work=self._loading)
        state = f"training step {version + 1}"
        return ProcessFacts(state=state, policy_version=version, counts={"micros": float(self._num_micros)})


class RegisteredFeed(Feed, Protocol):
    """A feed with a call for the beginning of training, and one for an early end."""

    def register(self, registration: RegisterTrainer) -> None: ...

    def give_back(self, reason: str, *, counts: bool) -> None: ...


class Stage(Protocol):
    """What a trainer is fed with, and what it measures: rollouts from the hub, or rows (treadle.sft)."""

    keeps_tokens: bool  # whether the values of each token are kept for the page

    def connect(self, engine: AttachedModel, ranks: Ranks, waits: Waits) -> None:
        """Called before the policy is built: what would make training impossible is found early."""

    def open_feed(self, ranks: Ranks, check_stop: Callable[[], None], waits: Waits, aside: Aside) -> RegisteredFeed: ...

    def begin(self, policy: Policy, tracker: Tracker | None, step: int) -> StepMetrics:
        """`step`: the last one that was taken before; called on all ranks, `tracker` is that of rank 0."""


class Reinforcement:
    """Train on rollouts that the hub leases, if asked for with the logprobs of a teacher."""

    keeps_tokens = True

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._teacher: Teacher | None = None

    def connect(self, engine: AttachedModel, ranks: Ranks, waits: Waits) -> None:
        self._teacher = open_teacher(self._config, ranks, engine.folder, waits)

    def open_feed(self, ranks: Ranks, check_stop: Callable[[], None], waits: Waits, aside: Aside) -> RegisteredFeed:
        open_hub = partial(HubFeed, self._config.hub_url, waits=waits, teacher=self._teacher)
        return open_feed(ranks, check_stop, aside, open_hub)

    def begin(self, _policy: Policy, _tracker: Tracker | None, _step: int) -> StepMetrics:
        teacher = self._teacher
        return all_metrics if teacher is None else lambda _step, metrics: metrics | teacher.metrics()


def run_trainer(config: TrainConfig, build_stage: Callable[[TrainConfig], Stage] = Reinforcement) -> None:
    stop = StopSwitch()
    ranks = join_ranks(config)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    config = config.on_device(gpu=choose_device(config.device).type == "cuda")
    waits = Waits()
    mode = WatchedSync(choose_sync(config), waits, config)
    name = f"trainer-{ranks.rank}" if ranks.rank else "trainer"  # as treadle run calls its process
    progress = TrainerProgress(mode, stop.check)
    with Watchdog("trainer", name, waits, config.hub_url, progress.about):
        try:
            with _copied_checkpoints(config, ranks) if config.checkpoint_url else nullcontext() as copies:
                _train(config, build_stage(config), ranks, mode, waits, stop, progress, copies)
        except RuntimeError as error:
            if (out_of_memory := out_of_memory_error(error, config)) is not None:
                raise out_of_memory from error
            raise
    ranks.close()


def out_of_memory_error(error: RuntimeError, config: TrainConfig) -> OutOfMemory | None:
    """OutOfMemory with a fix, for an error of torch that reports a lack of memory."""
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


def _copied_checkpoints(config: TrainConfig, ranks: Ranks) -> AbstractContextManager[CheckpointCopies | None]:
    try:
        from treadle.train.checkpoint_copies import copied_checkpoints
    except ImportError as error:
        problem = "--train.checkpoint-url needs obstore, which is not installed"
        raise MissingExtra(problem, fix="pip install 'treadle[object-store]'") from error
    return copied_checkpoints(config, ranks)


def _train(
    config: TrainConfig,
    stage: Stage,
    ranks: Ranks,
    mode: WatchedSync,
    waits: Waits,
    stop: StopSwitch,
    progress: TrainerProgress,
    copies: CheckpointCopies | None,
) -> None:
    _compile_while_engine_loads(config, ranks, progress)
    engine = mode.attach()
    stage.connect(engine, ranks, waits)
    reset = ranks.lead("resetting the engine", partial(_with_untrained_weights, engine, mode, config))
    engine = reset or engine
    # The sync mode decides where the live weights are; rank 0 alone publishes them.
    with report_loading(progress.loads):
        policy = build_policy(engine, config, ranks)
    reference = policy.reference(engine.folder) if config.kl_coef > 0 and config.kl_against == "reference" else None
    optimizer = build_optimizer(policy, config)
    checkpoints = Checkpoints(config.save_path, engine.folder, config.keep_checkpoints, ranks, copies)
    restored = checkpoints.restore(policy, optimizer)
    has_frozen_base = policy.is_the_engines and policy.adapter is not None
    if ranks.leads and engine.layout is not None and restored.step == 0 and not has_frozen_base:
        _check_untrained(engine.layout)
    if policy.is_the_engines and (restored.step == 0 or has_frozen_base):
        weights = ((name, weight.detach()) for name, weight in policy.weights.items())
        log.info("weights_compared", number=check_saved_weights(weights, engine.folder))
    tracker: Tracker | None = None
    health_file: HealthFile | None = None
    if ranks.leads:  # rank 0 logs the metrics of all
        tracker, health_file = open_tracker(config), HealthFile(config.metrics_path.with_name(HEALTH_FILE))
        tracker.truncate_after(restored.step)
        health_file.truncate_after(restored.step)
    folder = config.metrics_path.parent / TOKENS_FOLDER
    tokens = RecentTokenRecord(folder, ranks.rank) if stage.keeps_tokens else None
    feed = stage.open_feed(ranks, stop.check, waits, Welcome(mode, policy))
    policy.computing = stop.computing
    stop.install()  # before this, a signal simply ends the process
    registration = _registration(config, restored.step, policy.vocab_size)
    is_done = restored.step >= config.steps  # it was killed between the last checkpoint and the final model
    if not is_done:
        feed.register(registration)
    log.info("ready", step=restored.step, steps=config.steps, sequences_per_step=config.sequences_per_step)
    try:
        measure = stage.begin(policy, tracker, restored.step)
        train(
            config, policy, optimizer, feed, mode.publish, checkpoints, tracker,
            reference=reference, restored=restored, tokens=tokens, health_file=health_file, check_stop=progress.check,
            card=share_card(config, engine.layout, policy.device) if ranks.leads else None, measure=measure,
        )  # fmt: skip
        if is_done:
            feed.register(registration)  # after the publish: environments now evaluate the weights
    except StopRequested:
        feed.give_back("the trainer was stopped", counts=False)
        log.info("stopped", reason="asked to")
    except BaseException as error:
        # The hub sets a batch aside after several failures, so only errors that it may have caused count.
        counts = not isinstance(error, NOT_CAUSED_BY_BATCH)
        feed.give_back(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS], counts=counts)
        raise
    finally:
        if tracker is not None:
            tracker.close()


def _compile_while_engine_loads(config: TrainConfig, ranks: Ranks, progress: TrainerProgress) -> None:
    """Only time is saved, so an error here is not one of the run."""
    folder = local_folder(config.model) if "model" in config.model_fields_set else None
    if folder is None or ranks.size > 1:  # sharded layers are compiled differently
        return
    progress.loads("compiling layers", 0, 1)
    try:
        compile_ahead(folder, config)
    except Exception as error:  # any family of models
        log.warning("not_compiled_ahead", problem=f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS])


def open_tracker(config: TrainConfig) -> Tracker:
    return build_tracker(config, config.metrics_path, without_secrets(config.model_dump(mode="json")))


def _with_untrained_weights(engine: AttachedModel, mode: WatchedSync, config: TrainConfig) -> AttachedModel:
    """A trainer that was killed before its first checkpoint leaves weights in the engine: without a checkpoint, the
    engine loads those of its model again. It refuses that to the trainer of another run."""
    layout = engine.layout
    if layout is None or config.mode.adapters or _has_checkpoint(config.save_path):
        return engine
    if layout.policy_version in (None, 0) and not layout.is_held:
        return engine
    log.warning("engine_reset", version=layout.policy_version, reason="there is no checkpoint to continue from")
    EngineLink.of_trainer(config).post("/reload_weights", ReloadWeights(policy_version=0), Updated)
    return mode.attach()


def _has_checkpoint(save_path: Path) -> bool:
    return any(not folder.name.startswith(".") for folder in save_path.glob("*step_*"))


def _check_untrained(layout: Layout) -> None:
    """Without a checkpoint training starts from the engine's weights: they must be the ones that it loaded.

    A killed trainer leaves the weights that it published last, or half-written ones with the engine paused. With a
    checkpoint neither matters: all trained weights are written, and the others never change.
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
        sinks=config.track,
        project=config.wandb_project or DEFAULT_PROJECT,
        group=group_of(config, config.metrics_path) if config.track else "",
    )
    uses_wandb = "wandb" in config.track
    return RegisterTrainer(  # Atropos' environments log to this W&B project and group
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
