"""A long queue costs no more than a short one."""

from __future__ import annotations

import time

from treadle.store import Limits, NewGroup, Post, batches, groups, runs
from treadle.wire.hub import RegisterEnv

DEEP = """
WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {last})
INSERT INTO groups (env_id, size, num_tokens, num_bytes, crc, received_at) SELECT i % {num_envs}, 8, 8, 2, 0, i FROM n
"""


def deepen(queue, num_groups: int, num_envs: int) -> None:
    queue.rows(DEEP.format(last=num_groups - 1, num_envs=num_envs))


def best_of_5(call) -> float:
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return min(seconds)


def test_a_batch_out_of_a_hundred_thousand_groups_is_planned_at_once(queue, store, trainer, terms):
    store.register_trainer(trainer).result()
    deepen(queue, 100_000, 1)
    assert store.read(batches.plan_next, 64, terms).ids == list(range(1, 9))
    assert best_of_5(lambda: store.read(batches.plan_next, 64, terms)) < 0.02
    assert best_of_5(lambda: store.read(groups.counts)) < 0.005
    assert store.append(Post([NewGroup(payload=b"{}", size=8, num_tokens=8)]), Limits(200_000)).result().num_groups == 1


def test_so_it_is_with_two_hundred_environments(queue, store, trainer, terms):
    store.register_trainer(trainer).result()
    for number in range(200):
        env = RegisterEnv(max_token_length=8, desired_name=f"e{number}", weight=1.0 + number % 3, group_size=8)
        store.write(runs.register_env, env, resume=False, idle_s=lambda _: 0.0, gone_after_s=10.0).result()
    deepen(queue, 20_000, 200)
    assert len(store.read(batches.plan_next, 64, terms).ids) == 8
    assert best_of_5(lambda: store.read(batches.plan_next, 64, terms)) < 0.05


def test_weight_credit_is_kept_between_batches_and_cleared_by_a_reset(queue, store, trainer, terms):
    """Environment 0 weighs three times as much; what each is ahead is on disk, counted from the one that got least."""
    store.register_trainer(trainer).result()
    for weight in (3.0, 1.0):
        env = RegisterEnv(max_token_length=8, desired_name="e", weight=weight, group_size=1)
        store.write(runs.register_env, env, resume=False, idle_s=lambda _: 0.0, gone_after_s=10.0).result()
    for env_id in (1, 0):  # the light one comes first: the order of arrival does not decide
        posted = [NewGroup(payload=b"{}", size=1, num_tokens=1, env_id=env_id)] * 40
        store.append(Post(posted), Limits(99)).result()
    taken = [store.take(terms).result().group_ids.strip("[]").split(",") for _ in range(10)]
    assert sum(int(group_id) > 40 for ids in taken for group_id in ids) == 30
    tags = dict(queue.rows("SELECT env, tag FROM env_queues"))
    assert set(tags) == {"0", "1"}
    assert min(tags.values()) == 0.0
    assert max(tags.values()) < 4
