from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from treadle.store import HeldByAnother, Limits, NewGroup, Post, QueueFull, SqliteStore, StaleToken, Store, groups, runs
from treadle.wire.hub import RegisterEnv


@pytest.fixture
def full(store, trainer):
    """A registered trainer (batches of 4) and six groups of two sequences, tagged 0 to 5."""
    store.register_trainer(trainer).result()
    fill(store, 6)
    return store


def fill(store: Store, count: int) -> None:
    for tag in range(count):
        group = NewGroup(payload=b'{"tag":%d}' % tag, size=2, num_tokens=8)
        store.append(Post([group]), Limits(100)).result()


def tags(lease) -> list[int]:
    return [group_id - 1 for group_id in msgspec.json.decode(lease.group_ids)]


def test_a_lease_is_read_as_it_was_posted(full, terms):
    lease = full.lease(2, "a", terms).result()
    batch = full.batch_of(lease)
    assert [msgspec.json.decode(group.payload)["tag"] for group in batch.groups] == tags(lease) == [0, 1]
    assert (batch.step, batch.token, batch.deliveries) == (2, lease.token, 1)


def test_batches_come_in_the_order_of_arrival(full, terms):
    assert [tags(full.lease(step, "a", terms).result()) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert full.lease(4, "a", terms).result() is None


def test_ack_counts_the_step_and_the_groups(full, terms):
    batch = full.lease(1, "a", terms).result()
    full.ack(1, batch.token).result()
    counts = full.read(groups.counts)
    assert full.read(runs.read_run).current_step == 1
    assert (counts.queued.groups, counts.leased.groups, counts.trained.groups) == (4, 0, 2)
    assert counts.accepted_groups == 6


def test_a_repeated_ack_is_answered_and_changes_nothing(full, terms):
    first = full.lease(1, "a", terms).result()
    full.ack(1, first.token).result()
    second = full.lease(2, "a", terms).result()
    full.ack(2, second.token).result()
    full.ack(1, first.token).result()
    assert full.read(runs.read_run).current_step == 2


def test_a_trained_step_is_leased_again_unchanged_with_a_new_token(full, terms):
    first = full.lease(1, "a", terms).result()
    full.ack(1, first.token).result()
    again = full.lease(1, "a", terms).result()
    assert again.group_ids == first.group_ids
    assert again.token != first.token
    with pytest.raises(StaleToken):
        full.ack(1, first.token).result()
    full.ack(1, again.token).result()
    assert full.read(groups.counts).trained.groups == 2


def test_a_live_lease_is_not_given_to_another_holder(full, terms):
    full.lease(1, "a", terms).result()
    with pytest.raises(HeldByAnother, match="leased by 'a'"):
        full.lease(1, "b", terms).result()


def test_a_lease_that_ran_out_goes_to_another_and_fences_the_first_off(full, terms, clock):
    late = full.lease(1, "a", terms).result()
    clock.now_s += 61
    taken = full.lease(1, "b", terms).result()
    assert tags(taken) == tags(late)
    for verb in (lambda: full.ack(1, late.token), lambda: full.renew(1, late.token, 60.0)):
        with pytest.raises(StaleToken):
            verb().result()
    full.ack(1, taken.token).result()


def test_renewing_keeps_a_lease(full, terms, clock):
    batch = full.lease(1, "a", terms).result()
    clock.now_s += 50
    full.renew(1, batch.token, 60.0).result()
    clock.now_s += 50
    with pytest.raises(HeldByAnother):
        full.lease(1, "b", terms).result()


def test_a_lease_that_ran_out_but_was_not_taken_can_be_acknowledged(full, terms, clock):
    batch = full.lease(1, "a", terms).result()
    clock.now_s += 1000
    full.ack(1, batch.token).result()
    assert full.read(runs.read_run).current_step == 1


def test_a_batch_given_back_comes_again_until_it_is_dead_lettered(full, terms):
    for delivery in (1, 2, 3):
        batch = full.lease(1, "a", terms).result()
        assert (tags(batch), batch.deliveries) == ([0, 1], delivery)
        is_dead = full.nack(1, batch.token, reason="loss is NaN", max_deliveries=3).result()
        assert is_dead == (delivery == 3)
    dead = full.read(groups.dead_groups)
    assert [(group.id, group.step, group.reason) for group in dead] == [
        (2, 1, "loss is NaN"),
        (1, 1, "loss is NaN"),
    ]
    assert tags(full.lease(1, "a", terms).result()) == [2, 3]
    assert full.read(groups.counts).accepted_groups == 6


def test_a_batch_that_nobody_ever_acknowledges_is_dead_lettered_too(full, terms):
    for _ in range(3):
        assert tags(full.lease(1, "a", terms).result()) == [0, 1]
    assert tags(full.lease(1, "a", terms).result()) == [2, 3]
    assert "never acknowledged" in full.read(groups.dead_groups)[0].reason


def test_a_batch_that_kills_its_trainer_is_dead_lettered_alone(full, terms, trainer):
    for _ in range(3):
        assert tags(full.lease(1, "a", terms).result()) == [0, 1]
        assert tags(full.lease(2, "a", terms).result()) == [2, 3]
        full.register_trainer(trainer, holder="a").result()
    assert tags(full.lease(1, "a", terms).result()) == [4, 5]
    assert tags(full.lease(2, "a", terms).result()) == [2, 3]
    assert [group.id - 1 for group in full.read(groups.dead_groups)] == [1, 0]


def test_giving_back_a_batch_that_was_trained_only_releases_it(full, terms):
    for _ in range(5):
        batch = full.lease(1, "a", terms).result()
        full.ack(1, batch.token).result()
    batch = full.lease(1, "a", terms).result()
    assert full.nack(1, batch.token, reason="", max_deliveries=3).result() is False
    assert full.read(groups.counts).trained.groups == 2
    assert tags(full.lease(1, "b", terms).result()) == [0, 1]


def test_registering_releases_the_leases_of_that_holder_only(full, terms, trainer):
    mine = full.lease(1, "a", terms).result()
    full.lease(2, "b", terms).result()
    full.register_trainer(trainer, holder="a").result()
    full.lease(1, "c", terms).result()
    with pytest.raises(HeldByAnother):
        full.lease(2, "c", terms).result()
    with pytest.raises(StaleToken):
        full.ack(1, mine.token).result()


def test_a_restarted_hub_gives_out_the_leases_of_its_earlier_process(tmp_path: Path, clock, terms, trainer):
    with SqliteStore.open(tmp_path / "q.sqlite", clock=clock) as store:
        store.register_trainer(trainer).result()
        fill(store, 4)
        held = store.lease(1, "a", terms).result()
    with SqliteStore.open(tmp_path / "q.sqlite", clock=clock) as store:
        assert tags(store.lease(1, "b", terms).result()) == tags(held)
        with pytest.raises(StaleToken):
            store.ack(1, held.token).result()


def test_a_trainer_keeps_its_lease_over_a_restart_when_nobody_takes_it(queue, clock, terms, trainer):
    with queue.open(clock=clock) as store:
        store.register_trainer(trainer).result()
        fill(store, 4)
        held = store.lease(1, "a", terms).result()
    with queue.open(clock=clock) as store:
        store.renew(1, held.token, 60.0).result()
        store.ack(1, held.token).result()
        assert store.read(runs.read_run).current_step == 1


def deliver(store: Store, terms) -> list[int]:
    """As the hub does for a caller of /batch: take, send, acknowledge in its place."""
    lease = store.take(terms).result()
    store.ack(lease.step, lease.token).result()
    return tags(lease)


def test_taking_gives_each_batch_once_and_counts_the_step(full, terms):
    assert [deliver(full, terms) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert full.take(terms).result() is None
    assert full.read(runs.read_run).current_step == 3


def test_taking_after_a_registration_from_zero_gives_new_data(full, terms, trainer):
    deliver(full, terms)
    full.register_trainer(trainer).result()
    assert deliver(full, terms) == [2, 3]
    assert full.read(runs.read_run).current_step == 1


def test_two_concurrent_takes_get_different_batches(full, terms):
    first, second = full.take(terms).result(), full.take(terms).result()
    assert (tags(first), tags(second)) == ([0, 1], [2, 3])
    full.ack(second.step, second.token).result()
    full.ack(first.step, first.token).result()
    assert full.read(runs.read_run).current_step == 2


def test_a_batch_that_did_not_arrive_is_taken_again_before_any_other(full, terms):
    lost, arrived = full.take(terms).result(), full.take(terms).result()
    full.ack(arrived.step, arrived.token).result()
    full.nack(lost.step, lost.token, reason="", max_deliveries=3, counts=False).result()
    again = full.take(terms).result()
    assert (tags(again), again.step, again.deliveries) == ([0, 1], 1, 1)
    full.ack(again.step, again.token).result()
    assert full.read(runs.read_run).current_step == 2
    assert deliver(full, terms) == [4, 5]


def test_a_hub_that_died_while_it_sent_a_batch_sends_it_again(queue, clock, terms, trainer):
    with queue.open(clock=clock) as store:
        store.register_trainer(trainer).result()
        fill(store, 4)
        assert tags(store.take(terms).result()) == [0, 1]
    clock.now_s += 61  # several hubs share the clock of a server: there the lease runs out first
    with queue.open(clock=clock) as store:
        assert [deliver(store, terms) for _ in range(2)] == [[0, 1], [2, 3]]


def test_taking_delivers_first_what_was_given_back(full, terms):
    batch = full.lease(1, "a", terms).result()
    full.nack(1, batch.token, reason="", max_deliveries=3).result()
    assert deliver(full, terms) == [0, 1]


def test_a_group_is_never_in_two_batches(full, terms, clock):
    seen: list[int] = []
    for step in (1, 2, 3):
        for holder in ("a", "b"):
            batch = full.lease(step, holder, terms).result()
            clock.now_s += 61
        seen += tags(batch)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_a_restarted_step_count_gets_returned_batches_first(full, terms, trainer):
    """Atropos' trainers register from 0: the batch of step 3 must not wait until the new one is at its step 3."""
    assert [deliver(full, terms) for _ in range(2)] == [[0, 1], [2, 3]]
    lost = full.take(terms).result()
    full.nack(lost.step, lost.token, reason="", max_deliveries=3, counts=False).result()
    full.register_trainer(trainer).result()
    assert deliver(full, terms) == [4, 5]
    assert full.read(runs.read_run).current_step == 1


def test_a_restarted_step_count_does_not_take_leased_batches(full, terms, trainer):
    held = full.lease(1, "a", terms).result()
    full.register_trainer(trainer).result()
    assert tags(full.take(terms).result()) == [2, 3]
    full.ack(1, held.token).result()


@pytest.mark.parametrize(("minimum", "num_more"), [(None, 1), (0.5, 1), (1.0, 2)])
def test_a_full_queue_still_takes_what_a_batch_may_lack(store, trainer, minimum, num_more):
    """An environment that posts ahead must not lock out the one whose groups complete the batch."""
    store.register_trainer(trainer).result()
    for name, share in (("a", None), ("b", minimum)):
        env = RegisterEnv(max_token_length=9, desired_name=name, weight=1.0, group_size=2, min_batch_allocation=share)
        store.write(runs.register_env, env, resume=False, idle_s=lambda _: 0.0, gone_after_s=10.0).result()
    limits = Limits(groups=3)

    def post(env_id: int | None) -> None:
        store.append(Post([NewGroup(payload=b"{}", size=2, num_tokens=2, env_id=env_id)]), limits).result()

    for _ in range(3):
        post(0)
    for _ in range(num_more):
        post(1)
    for env_id in (0, 1, None):
        with pytest.raises(QueueFull):
            post(env_id)
