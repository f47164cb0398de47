"""The real stores on a real file or server, driven at random, killed and opened again; against a model in memory."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.postgres_server import PostgresServer, cut_connections
from treadle.hub.batching import plan
from treadle.store import (
    BatchPruned,
    HeldByAnother,
    KeyReused,
    Lease,
    LeaseTerms,
    Limits,
    NewGroup,
    Post,
    QueueFull,
    SqliteStore,
    StaleToken,
    Store,
    groups,
    runs,
)
from treadle.store.postgres import PostgresStore
from treadle.wire.hub import RegisterEnv, RegisterTrainer

from .queue_model import LEASE_S, MAX_DELIVERIES, Group, Model, Record

STEPS = st.integers(1, 4)
HOLDERS = st.sampled_from("abc")
KEEPS = st.sampled_from([0, 60, 2**40])
STALE = st.sampled_from([None, None, 0, 1])
SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 2), st.sampled_from([None, 0, 1, 3])), min_size=1,
                 max_size=5)  # fmt: skip
LIMITS = Limits(groups=60)
BASE_TERMS = LeaseTerms(lease_s=LEASE_S, max_deliveries=MAX_DELIVERIES, plan=plan, is_alive=lambda _: True)
TRAINER = RegisterTrainer(
    wandb_group="g", wandb_project="p", batch_size=4, max_token_len=9, checkpoint_dir="c",
    save_checkpoint_interval=1, starting_step=0, num_steps=9,
)  # fmt: skip
numbers = itertools.count()


class StoreMachine(RuleBasedStateMachine):
    folder: Path

    @initialize(size=st.sampled_from([None, 4, 4, 4]))
    def begin(self, size):
        self.now_s = 1000.0
        self.model = Model()
        self.tokens: list[tuple[int, str]] = [(1, "nobody's")]
        self.last_event = 0
        self._new_place()
        self.store = self._open()
        if size is not None:
            self.register_trainer(size, 0, 1, None)

    def teardown(self):
        self.store.close()
        for file in self.folder.iterdir():
            file.unlink()

    def _new_place(self) -> None:
        self.path = self.folder / f"{next(numbers)}.sqlite"

    def _open(self) -> Store:
        return SqliteStore.open(self.path, clock=lambda: self.now_s)

    def _post_of(self, sizes, key: str | None) -> tuple[Post, list[Group]]:
        groups = [
            Group(size, env if 0 <= env < len(self.model.envs) else None, version, b'{"n":%d}' % next(numbers))
            for size, env, version in sizes
        ]
        news = [NewGroup(g.payload, g.size, g.size, env_id=g.env, policy_version=g.version) for g in groups]
        return Post(news, key, key.encode() if key else b""), groups

    # ---- groups come in

    @rule(sizes=SIZES, keyed=st.booleans())
    def post(self, sizes, keyed):
        key = f"k{next(numbers)}" if keyed else None
        post, groups = self._post_of(sizes, key)
        if len(self.model.ids("queued")) + len(groups) > LIMITS.groups:
            with pytest.raises(QueueFull):
                self.store.append(post, LIMITS).result()
            return
        appended = self.store.append(post, LIMITS).result()
        assert (appended.num_groups, appended.duplicate) == (len(groups), False)
        self._accepted(post, groups)

    def _accepted(self, post: Post, groups: list[Group]) -> None:
        self.model.post(groups)
        if post.key is not None:
            self.model.keys[post.key] = (post.body_hash, len(groups))

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data(), same=st.booleans())
    def post_again(self, data, same):
        key = data.draw(st.sampled_from(sorted(self.model.keys)))
        body_hash, num_groups = self.model.keys[key]
        post, _ = self._post_of([(1, -1, None)], None)
        if same:
            again = self.store.append(replace(post, key=key, body_hash=body_hash), LIMITS).result()
            assert (again.num_groups, again.duplicate) == (num_groups, True)
        else:
            with pytest.raises(KeyReused):
                self.store.append(replace(post, key=key, body_hash=b"other"), LIMITS).result()

    # ---- batches go out

    def _terms(self, stale) -> LeaseTerms:
        return replace(BASE_TERMS, drop_older_than=stale)

    def _is_held(self, record: Record) -> bool:
        return record.holder is not None and record.until_s > self.now_s

    def _chosen(self, step: int, stale: int | None, lease: Lease | None) -> Record | None:
        """The store had to choose a batch for `step`: follow it, after checking that it could and did."""
        model = self.model
        if stale is not None and model.batch_size:
            model.drop_stale(step - 1 - stale)
        could = model.can_form()
        self._follow_misfits()
        assert (lease is not None) == could
        return None if lease is None else model.form(step, json.loads(lease.group_ids))

    def _follow_misfits(self) -> None:
        rows = self._rows("SELECT id, size FROM groups WHERE aside_reason = 'never_fits'")
        for group_id, size in rows:
            assert self.model.batch_size % size, "a group that fits was dropped"
            self.model.move([group_id], "dropped")

    @rule(step=STEPS, holder=HOLDERS, stale=STALE)
    def lease(self, step, holder, stale):
        model, terms = self.model, self._terms(stale)
        record = model.live.get(step) if model.batch_size is not None else None
        if record is not None and record.holder != holder and self._is_held(record):
            with pytest.raises(HeldByAnother):
                self.store.lease(step, holder, terms).result()
            return
        if record is not None and record.state == "pruned":
            with pytest.raises(BatchPruned):
                self.store.lease(step, holder, terms).result()
            return
        lease = self.store.lease(step, holder, terms).result()
        if model.batch_size is None:
            assert lease is None
            return
        if record is not None and record.state == "open" and record.deliveries >= MAX_DELIVERIES:
            model.bury(record)
            record = None
        if record is None:
            record = self._chosen(step, stale, lease)
        if record is None:
            return
        record.deliveries += 1
        record.token, record.holder, record.until_s = lease.token, holder, self.now_s + LEASE_S
        self._delivered(lease, record)

    @rule(holder=HOLDERS, times=st.integers(1, 3), seconds=st.sampled_from([0.0, 61.0]))
    def lease_again(self, holder, times, seconds):
        """The same step once more: its trainer died, or its lease ran out."""
        for _ in range(times):
            self.now_s += seconds
            self.lease(self.tokens[-1][0], holder, None)

    @rule(stale=STALE, arrives=st.sampled_from([True, True, False, None]), keep=KEEPS)
    def take(self, stale, arrives, keep):
        """As /batch does it: lease, then acknowledge; or give back what did not arrive; or (None) the hub is killed."""
        model = self.model
        lease = self.store.take(self._terms(stale)).result()
        if model.batch_size is None:
            assert lease is None
            return
        while True:
            record, earlier = self._next_to_take(), None
            if record is None or record.state != "open":
                step = model.step + 1
                while (held := model.live.get(step)) is not None and self._is_held(held):
                    step += 1
                earlier = model.live.pop(step, None)
                record = self._chosen(step, stale, lease)
                if record is None and earlier is not None:
                    model.live[step] = earlier
                elif earlier is not None:
                    model.superseded.append(earlier)
            if record is None or record.deliveries < MAX_DELIVERIES:
                break
            model.bury(record)
        if record is None:
            return
        record.deliveries += 1
        record.token, record.holder, record.until_s = lease.token, "/batch", self.now_s + LEASE_S
        self._delivered(lease, record)
        if arrives:
            self.store.ack(lease.step, lease.token, keep_trained_bytes=keep).result()
            model.finish(record, keep)
        elif arrives is False:
            give_back = {"reason": "r", "max_deliveries": MAX_DELIVERIES, "counts": False}
            assert not self.store.nack(lease.step, lease.token, **give_back).result()
            record.deliveries -= 1
            model.release(record)

    def _next_to_take(self) -> Record | None:
        """The oldest batch that was given back; else the record at the first step that nobody holds."""
        model = self.model
        for step in sorted(model.live):
            record = model.live[step]
            if step <= model.step and record.state == "open" and not self._is_held(record):
                return record
        step = model.step + 1
        while (record := model.live.get(step)) is not None and self._is_held(record):
            step += 1
        return record

    def _delivered(self, lease: Lease, record: Record) -> None:
        assert json.loads(lease.group_ids) == record.ids
        assert (lease.step, lease.deliveries) == (record.step, record.deliveries)
        self.tokens.append((lease.step, lease.token))
        if not any(self.model.groups[group_id].pruned for group_id in record.ids):
            batch = self.store.batch_of(lease)
            assert [group.payload for group in batch.groups] == [self.model.groups[i].payload for i in record.ids]

    def _pick(self, data) -> tuple[int, str, Record | None]:
        step, token = data.draw(st.sampled_from(self.tokens[-4:]))
        record = self.model.live.get(step)
        return step, token, record if record is not None and record.token == token else None

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 61.0]))
    def renew(self, data, seconds):
        self.now_s += seconds
        step, token, record = self._pick(data)
        if record is None or record.holder is None:
            with pytest.raises(StaleToken):
                self.store.renew(step, token, LEASE_S).result()
        else:
            self.store.renew(step, token, LEASE_S).result()
            record.until_s = self.now_s + LEASE_S

    @rule(data=st.data(), keep=KEEPS, times=st.integers(1, 2))
    def ack(self, data, keep, times):
        step, token, record = self._pick(data)
        for _ in range(times):
            if record is None or self.model.batch_size is None:
                with pytest.raises(StaleToken):
                    self.store.ack(step, token, keep_trained_bytes=keep).result()
            else:
                self.store.ack(step, token, keep_trained_bytes=keep).result()
                if record.holder is not None:
                    self.model.finish(record, keep)

    @rule(data=st.data(), counts=st.booleans())
    def nack(self, data, counts):
        step, token, record = self._pick(data)
        give_back = {"reason": "r", "max_deliveries": MAX_DELIVERIES, "counts": counts}
        if record is None or record.holder is None:
            with pytest.raises(StaleToken):
                self.store.nack(step, token, **give_back).result()
            return
        is_dead = self.store.nack(step, token, **give_back).result()
        assert is_dead == (counts and record.state == "open" and record.deliveries >= MAX_DELIVERIES)
        if is_dead:
            self.model.bury(record)
        else:
            record.deliveries -= 0 if counts else 1
            self.model.release(record)

    @precondition(lambda self: self.model.batch_size is not None)
    @rule(first_step=STEPS, num_steps=st.integers(1, 3), keep=KEEPS, holder=HOLDERS)
    def train(self, first_step, num_steps, keep, holder):
        """Whole steps as they usually go, so that runs get further than chance would take them."""
        self.post([(self.model.batch_size, -1, None)], keyed=False)
        for step in range(first_step, first_step + num_steps):
            self.lease(step, holder, None)
            record = self.model.live.get(step)
            if record is not None and record.holder == holder:
                self.store.ack(step, record.token, keep_trained_bytes=keep).result()
                self.model.finish(record, keep)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds):
        self.now_s += seconds

    # ---- who is there

    @rule(data=st.data())
    def rarely(self, data):
        """What happens seldom shares one rule, so that most steps are posts and batches."""
        what = data.draw(st.sampled_from(["crash", "open", "env", "leave", "trainer", "crash", "env", "reset"]))
        if what == "trainer":
            size = data.draw(st.sampled_from([2, 3, 4, 4, 4, 4, 8]))
            steps, intervals = st.integers(0, 3), st.integers(0, 1)
            self.register_trainer(size, data.draw(steps), data.draw(intervals), data.draw(st.none() | HOLDERS))
        elif what == "env":
            weights = st.sampled_from([0.0, 1.0, 3.0])
            resume, gone = data.draw(st.booleans()), data.draw(st.booleans())
            self.register_env(data.draw(st.sampled_from("xy")), data.draw(weights), resume, gone)
        elif what == "leave":
            self.disconnect_env(data.draw(st.integers(0, 3)))
        elif what == "crash":
            self.crash(data.draw(SIZES))
        elif what == "open":
            self.reopen()
        else:
            self.reset()

    def register_trainer(self, size, step, interval, holder):
        trainer = RegisterTrainer(**{
            **{name: getattr(TRAINER, name) for name in TRAINER.__struct_fields__},
            "batch_size": size, "starting_step": step, "save_checkpoint_interval": interval,
        })  # fmt: skip
        self.store.register_trainer(trainer, holder).result()
        self.model.register(size, step, interval, holder, self._is_held)

    def register_env(self, name, weight, resume, gone):
        env = RegisterEnv(max_token_length=9, desired_name=name, weight=weight, group_size=2)
        idle_s = 11.0 if gone else 1.0
        record = self.store.write(
            runs.register_env, env, resume=resume, idle_s=lambda _: idle_s, gone_after_s=10.0
        ).result()
        namesakes = [env_id for env_id, known in enumerate(self.model.envs) if known == name]
        if namesakes and (resume or gone):
            assert record.env_id == namesakes[0]
        else:
            assert record.env_id == len(self.model.envs)
            self.model.envs.append(name)
        assert record.name == f"{name}_{sum(known == name for known in self.model.envs[: record.env_id])}"
        assert record.groups_accepted == self.model.accepted_of_env.get(record.env_id, 0)
        assert record.connected

    def disconnect_env(self, env_id):
        assert self.store.write(runs.disconnect_env, env_id).result() == (env_id < len(self.model.envs))

    # ---- ends and beginnings

    def crash(self, sizes):
        """The files as a killed process leaves them, a post under way; its sender asks again after the restart."""
        post, groups = self._post_of(sizes, f"k{next(numbers)}")
        is_full = len(self.model.ids("queued")) + len(groups) > LIMITS.groups
        under_way = self.store.append(post, LIMITS)
        self._kill(under_way)
        if not is_full:
            self.store.append(post, LIMITS).result()
            self._accepted(post, groups)
        self._new_process()

    def _kill(self, under_way: Future) -> None:
        killed = self.path
        self.path = self.folder / f"{next(numbers)}.sqlite"
        for ending in (".progress", "", "-wal"):
            shutil.copyfile(f"{killed}{ending}", f"{self.path}{ending}")
        under_way.exception()
        self.store.close()
        self.store = self._open()

    def reopen(self):
        self.store.close()
        self.store = self._open()
        self._new_process()

    def _new_process(self) -> None:
        for record in self.model.live.values():
            record.until_s = 0.0

    def reset(self):
        self.store.write(runs.reset).result()
        self.model = Model(next_id=self.model.next_id)

    # ---- what holds at any time

    def _rows(self, sql: str) -> list[tuple]:
        db = sqlite3.connect(self.path)
        try:
            return db.execute(sql).fetchall()
        finally:
            db.close()

    @invariant()
    def the_store_says_what_the_model_says(self):
        model = self.model
        states = dict(self._rows("SELECT id, state FROM groups"))
        assert states == {group_id: group.state for group_id, group in model.groups.items()}
        live = self._rows(
            "SELECT step, state, group_ids, deliveries, token, holder FROM batches"
            " WHERE state IN ('open', 'trained', 'pruned') ORDER BY step"
        )
        assert [(*row[:2], json.loads(row[2]), *row[3:]) for row in live] == [
            (each.step, each.state, each.ids, each.deliveries, each.token, each.holder)
            for _, each in sorted(model.live.items())
        ]
        run = self.store.read(runs.read_run)
        assert (run.current_step, run.trainer is None) == (model.step, model.batch_size is None)
        counts = self.store.read(groups.counts)
        num = Counter(states.values())
        counted = {state: getattr(counts, state).groups for state in ("queued", "leased", "trained", "dropped", "dead")}
        assert counted == {state: num[state] for state in counted}
        assert counts.accepted_groups == len(model.groups)
        assert [env.groups_accepted for env in self.store.read(runs.read_envs)] == [
            model.accepted_of_env.get(env_id, 0) for env_id in range(len(model.envs))
        ]

    @invariant()
    def no_group_is_in_two_batches(self):
        seen = [group_id for record in self.model.live.values() for group_id in record.ids]
        seen += [group_id for record in self.model.superseded for group_id in record.ids]
        assert len(seen) == len(set(seen))
        leased = {group_id for record in self.model.live.values() if record.state == "open" for group_id in record.ids}
        assert leased == set(self.model.ids("leased"))

    @invariant()
    def the_tally_is_a_recount(self):
        recount = self._rows(
            "SELECT state, coalesce(CAST(env_id AS TEXT), 'none'), size, count(*), CAST(sum(num_bytes) AS BIGINT)"
            " FROM groups GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        assert recount == self._rows("SELECT * FROM tally WHERE groups > 0 ORDER BY 1, 2, 3")
        kept = {group_id for group_id, group in self.model.groups.items() if not group.pruned}
        assert {group_id for (group_id,) in self._rows("SELECT id FROM payloads")} == kept

    @invariant()
    def events_only_go_on(self):
        ids = [event.id for event in self.store.read(runs.events_after, 0, limit=10_000)]
        assert ids == sorted(set(ids))
        newest = ids[-1] if ids else 0
        assert newest >= self.last_event
        self.last_event = newest


class PostgresMachine(StoreMachine):
    """Two hubs take turns on one database. A crash cuts all connections while a post is under way; so does the restart
    of a server. The hubs stay up: what the database does with the transaction decides."""

    server: PostgresServer

    def _new_place(self) -> None:
        self.url = self.server.new_database()
        self.looking = psycopg.connect(self.url, autocommit=True, options="-csearch_path=treadle")

    def _open(self) -> Store:
        self.other = PostgresStore.open(self.url, clock=lambda: self.now_s)
        return PostgresStore.open(self.url, clock=lambda: self.now_s)

    def teardown(self):
        self.other.close()
        self.store.close()
        self.looking.close()

    def _kill(self, under_way: Future) -> None:
        cut_connections(self.url)
        under_way.exception()
        self.store, self.other = self.other, self.store

    def reopen(self):
        self.store.close()
        self.store, self.other = self.other, PostgresStore.open(self.url, clock=lambda: self.now_s)

    def _new_process(self) -> None:
        pass  # leases are on the clock of the server, which goes on

    def _accepted(self, post: Post, groups: list[Group]) -> None:
        (newest,) = self._rows("SELECT max(id) FROM groups")[0]  # an undone transaction leaves a hole
        self.model.next_id = newest + 1 - len(groups)
        super()._accepted(post, groups)

    def _rows(self, sql: str) -> list[tuple]:
        return self.looking.execute(sql).fetchall()


def test_the_store_agrees_with_the_model_whatever_happens(scratch):
    StoreMachine.folder = scratch
    run_state_machine_as_test(StoreMachine)


@pytest.mark.full  # tests/unit/store runs on PostgreSQL, and test_hub_postgres.py kills hubs
def test_two_hubs_on_postgresql_agree_with_the_model(postgres):
    PostgresMachine.server = postgres
    chosen = settings(max_examples=max(8, settings.default.max_examples // 8), stateful_step_count=40)
    run_state_machine_as_test(PostgresMachine, settings=chosen)
