"""Which files a hub accepts as its queue, who else uses them, and whether they were moved or deleted."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle.errors import ConfigError
from treadle.store import Limits, NewGroup, Post, SqliteStore, StorageFailed, Store, groups, set_aside
from treadle.store.file import refuse_locked

LIMITS = Limits(99)
GROUP = NewGroup(payload=b"{}", size=1, num_tokens=1)
HOLD = """
import pathlib, sys
from treadle.store import SqliteStore, Store
with SqliteStore.open(pathlib.Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.readline()
"""


def post(store: Store, key: str | None = None) -> None:
    store.append(Post([GROUP], key=key), LIMITS).result(timeout=60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "q.sqlite"


# ---- one hub a file


@pytest.fixture
def holder(path: Path) -> Iterator[int]:
    """The pid of another process that has the queue open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process.pid
    process.communicate("\n", timeout=60)


def test_no_other_name_of_the_file_lets_a_second_hub_in(path: Path, holder: int):
    symlink, hard_link = path.with_name("symlink"), path.with_name("hard_link")
    symlink.symlink_to(path)
    hard_link.hardlink_to(path)
    for beside in path.parent.glob("q.sqlite.*"):
        beside.unlink()
    for name in (path, symlink, hard_link):
        with pytest.raises(ConfigError, match=rf"in use by another hub, process {holder}\b"):
            SqliteStore.open(name)
        with pytest.raises(ConfigError, match=rf"process {holder}\b"):
            set_aside(name)
        with pytest.raises(ConfigError, match=rf"is open in process {holder}\b") as caught:
            refuse_locked(name)
        assert f"kill {holder}" in str(caught.value.fix)


def test_a_queue_that_nobody_has_open_is_not_called_locked(tmp_path: Path):
    refuse_locked(tmp_path / "nowhere.sqlite")
    SqliteStore.open(tmp_path / "q.sqlite").close()
    refuse_locked(tmp_path / "q.sqlite")


def test_a_file_is_free_when_its_process_was_killed(path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    process.kill()
    process.communicate()
    with SqliteStore.open(path) as store:
        post(store)


def test_a_refused_second_store_leaves_sqlites_locks_alone(path: Path):
    """They belong to the process: closing any descriptor of the file would drop them."""
    with SqliteStore.open(path) as store:
        with pytest.raises(ConfigError, match=rf"process {os.getpid()}\b"):
            SqliteStore.open(path)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        assert [lock[1:5] for lock in locks if lock[5].endswith(f":{path.stat().st_ino}") and lock[1] == "POSIX"] == [
            ["POSIX", "ADVISORY", "READ", str(os.getpid())]
        ]
        post(store)


def test_a_queue_with_two_names_is_refused(path: Path):
    """SQLite finds its log by the name: under the other one, what a killed hub had accepted would be missing."""
    SqliteStore.open(path).close()
    other = path.with_name("other")
    other.hardlink_to(path)
    with pytest.raises(ConfigError, match="2 names"):
        SqliteStore.open(path)
    other.unlink()
    SqliteStore.open(path).close()


# ---- files that go away


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("part", ["", "-wal"])
@pytest.mark.parametrize(
    ("harm", "problem"), [(Path.unlink, "was deleted"), (move_away, "moved"), (replace, "replaced")]
)
def test_nothing_is_promised_once_a_file_is_not_in_its_place(
    path: Path, part: str, harm: Callable[[Path], object], problem: str
):
    failures: list[str] = []
    with SqliteStore.open(path, on_failure=lambda: failures.append("failed")) as store:
        post(store)
        harm(Path(f"{path}{part}"))
        with pytest.raises(StorageFailed, match=problem):
            post(store)
        with pytest.raises(StorageFailed, match=problem):
            post(store)
        assert problem in store.failure
    assert failures == ["failed"]
    assert problem in store.failure, "also once it is closed"


def test_a_deleted_file_is_noticed_while_nobody_writes(path: Path):
    failures: list[str] = []
    with SqliteStore.open(path, on_failure=lambda: failures.append("failed")):
        path.unlink()
        until_s = time.monotonic() + 60
        while not failures and time.monotonic() < until_s:
            time.sleep(0.02)
        assert failures == ["failed"]


def test_a_store_that_stays_in_its_place_never_fails(path: Path):
    with SqliteStore.open(path) as store:
        post(store)
        assert store.failure == ""
    assert store.failure == ""


def test_what_was_accepted_is_there_after_the_log_was_deleted(path: Path):
    with SqliteStore.open(path) as store:
        post(store)
        Path(f"{path}-wal").unlink()
        with pytest.raises(StorageFailed):
            post(store)
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).accepted_groups >= 1


def test_a_hub_whose_file_was_replaced_does_not_touch_the_new_ones_log(path: Path):
    old = SqliteStore.open(path)
    post(old)
    for part in ("", "-wal", "-shm", ".progress"):
        Path(f"{path}{part}").unlink()
    with SqliteStore.open(path) as new:
        post(new)
        old.close()
        post(new)
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).accepted_groups == 2


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_lost_file_is_no_new_queue_unless_that_is_asked_for(path: Path, is_deleted: bool):
    with SqliteStore.open(path) as store:
        post(store)
    if is_deleted:
        path.unlink()
    else:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is gone: .*says that it had 1 changes") as refused:
        SqliteStore.open(path)
    assert "--fresh" in refused.value.fix
    set_aside(path)
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).accepted_groups == 0


def test_another_queue_in_the_place_of_this_one_is_refused(path: Path, tmp_path: Path):
    other = tmp_path / "other.sqlite"
    with SqliteStore.open(path) as store:
        post(store)
    with SqliteStore.open(other) as store:
        for _ in range(3):
            post(store)
    other.rename(path)
    with pytest.raises(ConfigError, match="another queue than the one that was used here last") as refused:
        SqliteStore.open(path)
    assert f"delete {path}.progress" in refused.value.fix
    Path(f"{path}.progress").unlink()
    with SqliteStore.open(path) as store:
        assert store.read(groups.counts).accepted_groups == 3


# ---- files of others


def foreign_database(path: Path, journal: str) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA journal_mode = {journal}")
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    return db


def look(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        file.name: (file.read_bytes(), stat.S_IMODE(file.stat().st_mode), file.stat().st_mtime_ns)
        for file in folder.iterdir()
    }


@pytest.mark.parametrize("kind", ["delete", "wal", "text", "short"])
def test_a_foreign_file_is_refused_and_left_as_it_is(path: Path, kind: str):
    db = foreign_database(path, kind) if kind in ("delete", "wal") else None
    if kind in ("text", "short"):
        path.write_bytes(b"a thesis" * (1000 if kind == "text" else 1))
    path.chmod(0o644)
    before = look(path.parent)
    for refuse in (SqliteStore.open, set_aside):
        with pytest.raises(ConfigError, match="another program" if db else "no SQLite file"):
            refuse(path)
        assert look(path.parent) == before
    if db:
        db.close()


def test_setting_aside_overwrites_no_earlier_copy(path: Path):
    for num_groups in (1, 2, 3):
        with SqliteStore.open(path) as store:
            for _ in range(num_groups):
                post(store)
        os.utime(path, (1_000_000_000, 1_000_000_000))  # all within one second
        set_aside(path)
    assert not list(path.parent.glob("q.sqlite")), "set aside"
    copies = [file for file in path.parent.glob("q.sqlite.2*") if not file.name.endswith(".progress")]
    found = []
    for copy in copies:
        with SqliteStore.open(copy) as store:
            found.append(store.read(groups.counts).accepted_groups)
    assert sorted(found) == [1, 2, 3]


@pytest.mark.parametrize(
    "name", [":memory:", "file:q.sqlite?mode=memory", "file::memory:", "a\0b", "", "fifo", "loop", "a" * 300]
)
def test_a_name_that_is_no_file_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    for refuse in (SqliteStore.open, set_aside):
        with pytest.raises(ConfigError):
            refuse(Path(name))
    assert sorted(os.listdir()) == ["fifo", "loop"]
