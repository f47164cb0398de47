"""Write groups to a file with an HTML page, without a hub (`treadle env NAME process`).

Groups are sampled concurrently and written in the order of their items, so the same seed and policy give the same file.
Groups with equal scores are written too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from treadle.config.env import EnvConfig, ServerConfig
from treadle.envs.base import Item, stable_seed
from treadle.envs.chat import RolloutSampling
from treadle.envs.concurrency import ReportProgress, groups_at_once, in_order, show_progress
from treadle.envs.engine_pool import open_engine
from treadle.envs.group_file import GroupFile, as_written
from treadle.envs.grouping import apply_group_rules, build_group, drop_reason
from treadle.envs.page import write_page
from treadle.envs.process import load_tokenizer, open_context, prepare_environment
from treadle.envs.rollout import EnvContext, Rollout, roll_group
from treadle.envs.transport import RetryPolicy
from treadle.errors import ConfigError

DEFAULT_NUM_GROUPS = 16


@dataclass
class WriteStats:
    """Statistics of the groups that were written."""

    num_groups: int = 0
    num_rollouts: int = 0
    num_right: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    first_error: str = ""  # of scoring
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # until the last group

    def add(self, rollouts: Sequence[Rollout], reason_to_drop: str | None) -> None:
        self.seconds = time.monotonic() - self.started
        self.num_tokens += sum(rollout.num_sampled for rollout in rollouts)
        errors = (rollout.score.error or rollout.score.outcome for rollout in rollouts if rollout.score.reward is None)
        self.first_error = self.first_error or next(errors, "")
        if reason_to_drop is not None:
            self.dropped[reason_to_drop] += 1
            return
        self.num_groups += 1
        self.num_rollouts += len(rollouts)
        self.num_right += sum(rollout.score.is_right for rollout in rollouts)
        self.rewards += [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]

    @property
    def brief(self) -> str:
        mean = sum(self.rewards) / max(len(self.rewards), 1)
        right = self.num_right / max(self.num_rollouts, 1)
        speed = self.num_tokens / max(self.seconds, 1e-9)
        return f"mean score {mean:.3f}, {right:.1%} right, {speed:.0f} generated tokens/s"

    def summary(self) -> str:
        lines = [f"{self.num_groups} groups, {self.num_rollouts} rollouts: {self.brief}"]
        if not self.num_groups:
            lines = ["no group was fit to be written"]
        unscored = self.num_rollouts - len(self.rewards)
        if unscored:
            lines.append(f"  not scored: {unscored} of these rollouts; not right, and in no mean")
        if self.dropped:
            reasons = ", ".join(f"{reason}: {times}" for reason, times in self.dropped.items())
            lines.append(f"  dropped groups: {self.dropped.total()} ({reasons})")
        if self.first_error:
            lines.append(f"  the first that could not be scored: {self.first_error}")
        return "\n".join(lines)


async def write_groups(env: EnvConfig, server: ServerConfig) -> int:
    """`treadle env NAME process`; exit code 1 if no group was written."""
    environment = await prepare_environment(env)
    total = num_groups_to_write(environment.config)
    # A person waits for this command, so give up early if no engine runs.
    async with open_engine(server, retry_policy=RetryPolicy(give_up_after_s=5.0)) as engine:
        tokenizer = await load_tokenizer(engine, server)
        async with open_context(environment, engine, tokenizer) as context:
            with GroupFile(groups_path(context.config)) as file:
                stats = WriteStats()
                try:
                    with show_progress("groups", total) as report_progress:
                        await write_all(context, file, total, stats, report_progress)
                finally:  # also after an interruption
                    _conclude(file, stats)
    return 0 if stats.num_groups else 1


def _conclude(file: GroupFile, stats: WriteStats) -> None:
    print(stats.summary())
    if not stats.num_groups:
        file.path.unlink()
        return
    print(f"written to {file.path}")
    write_page(file.path, file.page)
    print(f"to look at: {file.page}")


def num_groups_to_write(config: EnvConfig) -> int:
    if config.total_steps == -1:
        return DEFAULT_NUM_GROUPS
    if config.total_steps < 1:
        raise ConfigError(
            f"there is nothing to write: total_steps is {config.total_steps}",
            fix=f"pass --env.total-steps {DEFAULT_NUM_GROUPS}: the number of groups",
        )
    return config.total_steps


def groups_path(config: EnvConfig) -> Path:
    return config.data_path_to_save_groups or Path("data") / f"{config.own_name}.jsonl"


async def write_all(
    context: EnvContext, file: GroupFile, total: int, stats: WriteStats, report_progress: ReportProgress
) -> None:
    """Sample the groups of the first `total` items, and write them in order."""
    config = context.config
    sampling = RolloutSampling(config.max_token_length, config.temperature)

    async def roll(index: int) -> tuple[int, Item, list[Rollout]]:
        item = context.environment.train_item(index)
        own = replace(sampling, seed=stable_seed(config.seed, "process", index))
        return (
            index,
            item,
            apply_group_rules(
                context.environment, await roll_group(context, item, own, num_rollouts=config.group_size)
            ),
        )

    at_once = config.max_num_workers if config.max_num_workers > 0 else groups_at_once(config.group_size)
    async with aclosing(in_order(roll, range(total), at_once=at_once)) as arriving:
        async for index, item, rollouts in arriving:
            reason = drop_reason(rollouts, drop_equal_scores=False)
            if reason is None:
                group = build_group(rollouts, temperature=config.temperature)
                group.item = index
                file.write(as_written(group, item, rollouts, context.tokenizer.decode))
            stats.add(rollouts, reason)
            report_progress(stats.num_groups + stats.dropped.total(), stats.brief)
