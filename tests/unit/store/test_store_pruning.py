"""Which trained data is deleted, and which a resumed trainer can still lease."""

from __future__ import annotations

import msgspec
import pytest

from treadle.store import BatchPruned, Limits, NewGroup, Post, StaleToken, groups, runs


@pytest.fixture
def steps(store, trainer):
    """Twelve batches of one group each, and a trainer that saves at every step."""
    store.register_trainer(msgspec.structs.replace(trainer, save_checkpoint_interval=1)).result()
    for tag in range(12):
        store.append(Post([NewGroup(payload=b'{"tag":%02d}' % tag, size=4, num_tokens=4)]), Limits(99)).result()
    return store


def train(store, terms, step: int, keep: int) -> str:
    lease = store.lease(step, "a", terms).result()
    store.ack(step, lease.token, keep_trained_bytes=keep).result()
    return lease.token


def num_payloads(queue) -> int:
    return queue.rows("SELECT count(*) FROM payloads")[0][0]


def test_steps_before_the_last_two_checkpoints_are_refused(queue, steps, terms):
    for step in range(1, 7):
        train(steps, terms, step, keep=0)
    with pytest.raises(BatchPruned, match="keep-trained-bytes"):
        steps.lease(4, "a", terms).result()
    assert steps.batch_of(steps.lease(5, "a", terms).result()).groups[0].payload == b'{"tag":04}'
    assert steps.read(groups.counts).trained.groups == 6
    assert num_payloads(queue) == 6 + 2


def test_nothing_is_forgotten_while_there_is_room(queue, steps, terms):
    for step in range(1, 7):
        train(steps, terms, step, keep=10 * 6)
    assert num_payloads(queue) == 12
    train(steps, terms, 7, keep=10 * 6)
    assert num_payloads(queue) == 10


def test_a_step_that_is_pruned_while_it_is_repeated_stays_pruned(steps, terms):
    train(steps, terms, 1, keep=2**40)
    repeated = steps.lease(1, "slow", terms).result()
    for step in range(2, 7):
        train(steps, terms, step, keep=0)
    with pytest.raises(BatchPruned):
        steps.batch_of(repeated)
    steps.ack(1, repeated.token).result()
    with pytest.raises(BatchPruned):
        steps.lease(1, "a", terms).result()


def test_batches_that_others_took_the_place_of_are_forgotten_first(queue, steps, terms, trainer):
    """A trainer without acknowledgements counts from 0 each time it starts; its old data is never asked for."""
    never_saves = msgspec.structs.replace(trainer, save_checkpoint_interval=0)
    steps.register_trainer(never_saves).result()
    for keep in (2**40, 30):
        for _ in range(3):
            lease = steps.take(terms).result()
            steps.ack(lease.step, lease.token, keep_trained_bytes=keep).result()
        steps.register_trainer(never_saves).result()
    assert (num_payloads(queue), steps.read(groups.counts).trained.groups) == (12 - 3, 6)
    assert steps.read(groups.counts).trained.bytes == 30


def test_a_lease_lost_by_a_reset_is_not_reported_as_damage(steps, terms):
    lease = steps.lease(1, "a", terms).result()
    steps.write(runs.reset).result()
    with pytest.raises(StaleToken, match="reset"):
        steps.batch_of(lease)


def test_another_batch_size_sends_untrained_batches_back_into_the_queue(steps, terms, trainer):
    steps.append(Post([NewGroup(payload=b"{}", size=2, num_tokens=2)] * 2), Limits(99)).result()
    train(steps, terms, 1, keep=2**40)
    lease = steps.lease(2, "a", terms).result()
    steps.register_trainer(msgspec.structs.replace(trainer, batch_size=8)).result()
    assert (steps.read(groups.counts).leased.groups, steps.read(groups.counts).queued.groups) == (0, 13)
    with pytest.raises(StaleToken):
        steps.ack(2, lease.token).result()
    assert steps.lease(2, "a", terms).result().group_ids == "[2,3]"
    steps.register_trainer(msgspec.structs.replace(trainer, batch_size=2)).result()
    assert (steps.read(groups.counts).dropped.groups, steps.read(groups.counts).queued.groups) == (11, 2)


def test_the_same_batch_size_leaves_batches_as_they_are(steps, terms, trainer):
    lease = steps.lease(1, "a", terms).result()
    steps.register_trainer(trainer).result()
    assert steps.lease(1, "a", terms).result().group_ids == lease.group_ids
