"""A PostgreSQL server for tests: Debian's package, on a free port, in a folder of its own, as a user other than root.

Without one (scripts/setup-postgres.sh) these tests fail: a store that never met its server was not tested.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg

from tests.e2e.processes import end_of, free_port

USER, PASSWORD = "hub", "s3cret"
READY_S = 60.0
_numbers = count(1)


def _programs() -> Path:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    found = shutil.which("postgres")
    folder = Path(found).parent if found else (folders[-1] if folders else None)
    assert folder is not None, "no PostgreSQL server is installed; install one: scripts/setup-postgres.sh"
    return folder


class PostgresServer:
    """`with PostgresServer() as server: PostgresStore.open(server.new_database())`"""

    def __init__(self, *, is_durable: bool = False) -> None:
        self._programs = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        # The server refuses to run as root.
        self._user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        self._is_durable = is_durable
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        password_file = self._folder / "password"
        password_file.write_text(PASSWORD)
        if self._user is not None:
            for path in (self._folder, password_file):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        made = self._run(
            "initdb", f"--username={USER}", f"--pwfile={password_file}", "--auth=scram-sha-256", "--no-sync",
            "--encoding=UTF8", "--locale=C", f"--pgdata={self._folder / 'data'}",
        )  # fmt: skip
        assert made.wait(READY_S) == 0, end_of(self._folder / "initdb.log")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def _run(self, program: str, *flags: str) -> subprocess.Popen[bytes]:
        own = {} if self._user is None else {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._programs / program), *flags], stdout=log, stderr=log, cwd=self._folder, env={"LC_ALL": "C"},
                **own,
            )  # fmt: skip

    def start(self) -> None:
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200")
        settings += () if self._is_durable else ("fsync=off",)
        flags = [f"--{setting}" for setting in settings]
        self._process = self._run("postgres", "-D", str(self._folder / "data"), "-p", str(self.port), *flags)
        until_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(psycopg.OperationalError), self.connect():
                return
            assert self._process.poll() is None, end_of(self._folder / "postgres.log")
            assert time.monotonic() < until_s, end_of(self._folder / "postgres.log")
            time.sleep(0.05)

    def stop(self) -> None:
        """As an administrator restarts it: connections are ended, nothing is lost."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(READY_S)

    def kill(self) -> None:
        """SIGQUIT is its kill -9 for all of its processes: the next start recovers from the log."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(READY_S)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self.url(database), autocommit=True, options="-csearch_path=treadle,public")

    def new_database(self) -> str:
        """The URL of an empty one."""
        name = f"run{next(_numbers)}"
        with self.connect() as db:
            db.execute(f"CREATE DATABASE {name}")
        return self.url(name)


@contextlib.contextmanager
def serving(*, is_durable: bool = False) -> Iterator[PostgresServer]:
    with PostgresServer(is_durable=is_durable) as server:
        yield server


def cut_connections(url: str) -> None:
    """End all connections of hubs to a database, as an administrator does."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'treadle hub'"
        )


def rows_of(url: str, sql: str) -> list[tuple]:
    with psycopg.connect(url, autocommit=True, options="-csearch_path=treadle") as db:
        found = db.execute(sql)
        return found.fetchall() if found.description is not None else []
