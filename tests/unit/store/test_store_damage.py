"""Damaged files (flipped bits, zeroed blocks, a missing end) are detected and named, and never served."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from treadle.errors import ConfigError
from treadle.store import DamagedGroups, Limits, NewGroup, Post, SqliteStore, Store, groups, runs

LIMITS = Limits(99)


def payload(tag: int, num_bytes: int = 20_000) -> bytes:
    return b'{"tag":%d,"text":"%s"}' % (1000 + tag, random.Random(tag).randbytes(num_bytes // 2).hex().encode())


def fill(store: Store, count: int) -> None:
    for tag in range(count):
        group = NewGroup(payload=payload(tag), size=2, num_tokens=2, item=tag, metrics=b'{"reward":0.5}')
        store.append(Post([group], key=f"k{tag}", body_hash=b"h"), LIMITS).result()


def rot(path: Path, find: bytes, put: bytes) -> None:
    content = path.read_bytes()
    assert content.count(find) == 1
    path.write_bytes(content.replace(find, put))


def as_killed(store: Store, folder: Path) -> Path:
    """The files as they would be found after kill -9: the newest changes are in the log only."""
    folder.mkdir()
    for ending in (".progress", "", "-wal"):
        shutil.copyfile(f"{store.path}{ending}", folder / f"q.sqlite{ending}")
    return folder / "q.sqlite"


@pytest.fixture
def rotten(tmp_path, trainer):
    """Six groups of two sequences, batches of four; the content of the second has one flipped bit."""
    path = tmp_path / "q.sqlite"
    with SqliteStore.open(path) as store:
        store.register_trainer(trainer).result()
        fill(store, 6)
    rot(path, b'"tag":1001', b'"tag":1003')
    with SqliteStore.open(path) as store:
        yield store


def tags(batch) -> list[int]:
    return [msgspec.json.decode(group.payload)["tag"] - 1000 for group in batch.groups]


def aside(store) -> list[tuple[int, str]]:
    return [(group.id, group.reason) for group in store.read(groups.dead_groups)]


def test_a_damaged_group_is_named_and_set_aside_and_training_goes_on(rotten, terms):
    lease = rotten.lease(1, "a", terms).result()
    with pytest.raises(DamagedGroups, match=r"groups \[2\] are not as they were written"):
        rotten.batch_of(lease)
    assert aside(rotten) == [(2, "damaged")]
    again = rotten.lease(1, "a", terms).result()
    assert tags(rotten.batch_of(again)) == [0, 2]
    rotten.ack(1, again.token).result()
    counts = rotten.read(groups.counts)
    assert (counts.queued.groups, counts.trained.groups, counts.dead.groups) == (3, 2, 1)


def test_a_batch_that_was_taken_with_a_damaged_group_counts_no_step(rotten, terms):
    with pytest.raises(DamagedGroups):
        rotten.batch_of(rotten.take(terms).result())
    assert rotten.read(runs.read_run).current_step == 0
    for taken in ([0, 2], [3, 4]):
        lease = rotten.take(terms).result()
        assert tags(rotten.batch_of(lease)) == taken
        rotten.ack(lease.step, lease.token).result()
    assert rotten.read(runs.read_run).current_step == 2
    assert aside(rotten) == [(2, "damaged")]


def test_a_step_whose_data_rotted_after_training_is_repeated_on_other_data(rotten, terms):
    lease = rotten.lease(1, "a", terms).result()
    rotten.ack(1, lease.token).result()  # trained before it rotted
    with pytest.raises(DamagedGroups):
        rotten.batch_of(rotten.lease(1, "a", terms).result())
    assert tags(rotten.batch_of(rotten.lease(1, "a", terms).result())) == [2, 3]
    counts = rotten.read(groups.counts)
    assert (counts.trained.groups, counts.leased.groups, counts.dead.groups) == (1, 2, 1)


@pytest.mark.parametrize("where", range(0, 20_000, 2_500))
def test_content_that_turned_to_zeros_is_found_wherever_it_is(tmp_path, trainer, terms, where):
    path = tmp_path / "q.sqlite"
    with SqliteStore.open(path) as store:
        store.register_trainer(trainer).result()
        fill(store, 6)
    whole = payload(1)
    rot(path, whole[where : where + 400], bytes(len(whole[where : where + 400])))
    with SqliteStore.open(path) as store:
        with pytest.raises(DamagedGroups):
            store.batch_of(store.lease(1, "a", terms).result())
        assert tags(store.batch_of(store.lease(1, "a", terms).result())) == [0, 2]


def test_figures_beside_the_content_are_covered_too(tmp_path, trainer, terms):
    path = tmp_path / "q.sqlite"
    with SqliteStore.open(path) as store:
        store.register_trainer(trainer).result()
        fill(store, 2)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE groups SET item = 77 WHERE id = 1")
    with SqliteStore.open(path) as store, pytest.raises(DamagedGroups):
        store.batch_of(store.lease(1, "a", terms).result())


@pytest.mark.parametrize("kind", ["flip", "zero", "cut"])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_rots_in_the_file_nothing_wrong_is_served(tmp_path, trainer, terms, kind, seed):
    """Either the file is refused with a sentence, or every group that is served is as it was posted."""
    path = tmp_path / "q.sqlite"
    with SqliteStore.open(path) as store:
        store.register_trainer(trainer).result()
        fill(store, 20)
    spoil(path, kind, random.Random(seed))
    opened, refused = opened_or_refused(path)
    if opened is None:
        assert str(path) in refused.message
        assert refused.fix
        return
    with opened as store:
        served: list[int] = []
        for _ in range(25):
            try:
                lease = store.lease(len(served) // 2 + 1, "a", terms).result()
                if lease is None:
                    break
                batch = store.batch_of(lease)
            except DamagedGroups:
                continue
            assert [group.payload for group in batch.groups] == [payload(tag) for tag in tags(batch)]
            served += tags(batch)
        assert served == sorted(set(served))
        lost = 20 - len(served)
        assert lost <= len(store.read(groups.dead_groups)) + store.read(groups.counts).queued.groups
        assert store.read(groups.counts).accepted_groups == 20


def opened_or_refused(path: Path) -> tuple[Store | None, ConfigError | None]:
    try:
        return SqliteStore.open(path), None
    except ConfigError as error:
        return None, error


def spoil(path: Path, kind: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = rng.choice([place for place in range(len(content)) if content[place]])  # what is zero already cannot be zeroed
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        at -= at % 4096
        content[at : at + 4096] = bytes(4096)
    else:
        del content[at:]
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["flip", "zero", "cut"])
@pytest.mark.parametrize("seed", range(8))
def test_a_log_that_rots_is_refused_and_not_quietly_left_out(tmp_path, trainer, kind, seed):
    with SqliteStore.open(tmp_path / "q.sqlite") as store:
        store.register_trainer(trainer).result()
        fill(store, 6)
        path = as_killed(store, tmp_path / "killed")
    spoil(Path(f"{path}-wal"), kind, random.Random(seed))
    found = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    with pytest.raises(ConfigError, match=r"lost its last \d+ changes") as refused:
        SqliteStore.open(path)
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == found, "left as it is, for whoever can repair it"
    assert f"delete {path}.progress" in refused.value.fix
    Path(f"{path}.progress").unlink()  # the fix that the error names
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).accepted_groups < 6


def test_a_log_as_a_killed_hub_leaves_it_is_no_damage(tmp_path, trainer):
    with SqliteStore.open(tmp_path / "q.sqlite") as store:
        store.register_trainer(trainer).result()
        fill(store, 6)
        path = as_killed(store, tmp_path / "killed")
    with Path(f"{path}-wal").open("ab") as log:  # the next change had only begun to be written
        log.write(random.Random(1).randbytes(5000))
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).queued.groups == 6
        assert not Path(f"{path}-wal").stat().st_size, "the log of the killed process is folded in at once"


def test_a_row_that_does_not_agree_with_the_counts_is_found_at_once(tmp_path):
    path = tmp_path / "q.sqlite"
    with SqliteStore.open(path) as store:
        fill(store, 2)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE tally SET groups = 3")
    with pytest.raises(ConfigError, match="not those that were counted"):
        SqliteStore.open(path)


def test_a_queue_too_long_to_be_checked_in_time_is_opened_all_the_same(tmp_path, monkeypatch):
    with SqliteStore.open(tmp_path / "q.sqlite") as store:
        posted = [NewGroup(payload=b"{}", size=1, num_tokens=1)] * 500
        store.append(Post(posted), Limits(500)).result()
    monkeypatch.setattr("treadle.store.database.CHECK_S", -1.0)
    monkeypatch.setattr("treadle.store.database.CHECK_EVERY", 10)
    with SqliteStore.open(tmp_path / "q.sqlite") as store:
        assert store.read(groups.counts).queued.groups == 500
