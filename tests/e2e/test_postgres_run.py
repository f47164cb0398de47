"""`treadle run` with its queue in PostgreSQL: run, read the rollouts, resume, and start another run on the database."""

from __future__ import annotations

from pathlib import Path

import pytest

import treadle
from tests.e2e.runs import TINY_RUN, ending, resume, run_treadle
from tests.postgres_server import PASSWORD, PostgresServer, rows_of
from tests.tiny_model import write_tiny_model


def trained_steps(url: str, schema: str = "treadle") -> list[int]:
    rows = rows_of(url, f"SELECT step FROM {schema}.batches WHERE state = 'trained' ORDER BY step")  # noqa: S608
    return [step for (step,) in rows]


def test_a_run_on_postgresql_is_read_resumed_and_kept_apart_from_the_next(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    url = postgres.new_database()
    model = write_tiny_model(tmp_path / "model")
    flags = ("--model", str(model), *TINY_RUN, "--steps", "2", "--hub.store", url)
    result, run = run_treadle(tmp_path / "runs", *flags)
    assert result.returncode == 0, ending(result, run)
    assert trained_steps(url) == [1, 2]
    assert not (run / "hub.sqlite").exists()
    texts = {
        path: path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in (".json", ".log", ".jsonl")
    }
    assert [path for path, text in texts.items() if PASSWORD in text] == []
    assert PASSWORD not in result.stdout + result.stderr

    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert len(treadle.load(run).rollouts(step=1)) == 10

    resumed = resume(run, "--steps", "3", "--hub.store", url)
    assert resumed.returncode == 0, ending(resumed, run)
    assert trained_steps(url) == [1, 2, 3]

    result, second = run_treadle(tmp_path / "others", *flags)
    assert result.returncode == 0, ending(result, second)
    assert trained_steps(url) == [1, 2]
    ((earlier,),) = rows_of(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'treadle\\_%'")
    assert trained_steps(url, earlier) == [1, 2, 3]
    refused = resume(run, "--steps", "4", "--hub.store", url)
    assert refused.returncode == 2
    assert "has the queue of another run" in refused.stderr
