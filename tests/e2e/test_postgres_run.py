"""`treadle run` with its queue in PostgreSQL: it sets an earlier queue aside, goes on when its hub is killed, is read
and resumed, and refuses the queue of another run."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

import treadle
from tests.e2e.processes import environment
from tests.e2e.runs import TINY_RUN, command, ending, newest_run, resume
from tests.postgres_server import PASSWORD, PostgresServer, rows_of
from tests.tiny_model import write_tiny_model
from treadle.store import Limits, NewGroup, Post, batches
from treadle.store.postgres import PostgresStore
from treadle.wire.hub import RegisterTrainer

PATIENCE_S = 300.0


def trained_steps(url: str, schema: str = "treadle") -> list[int]:
    rows = rows_of(url, f"SELECT step FROM {schema}.batches WHERE state = 'trained' ORDER BY step")  # noqa: S608
    return [step for (step,) in rows]


def earlier_queues(url: str) -> list[str]:
    names = rows_of(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'treadle\\_%' ORDER BY nspname")
    return [name for (name,) in names]


def write_queue_of_another_run(url: str, folder: Path, *, fresh: bool) -> None:
    """With a trainer and one group."""
    registration = RegisterTrainer(
        wandb_group="g", wandb_project="p", batch_size=4, max_token_len=128, checkpoint_dir=str(folder),
        save_checkpoint_interval=5, starting_step=0, num_steps=10,
    )  # fmt: skip
    with PostgresStore.open(url, fresh=fresh) as store:
        store.write(batches.register_trainer, registration, None, store._moment).result()
        store.append(Post([NewGroup(payload=b"{}", size=1, num_tokens=1)]), Limits(groups=9)).result()


def num_steps(output: Path) -> int:
    metrics = newest_run(output) / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def run_with_a_killed_hub(output: Path, url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`treadle run` to its end; kill -9 of its hub once step 1 is trained."""
    words = command(output, *flags)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            until_s = time.monotonic() + PATIENCE_S
            while process.poll() is None and not num_steps(output):
                assert time.monotonic() < until_s, newest_run(output)
                time.sleep(0.05)
            for child in psutil.Process(process.pid).children():
                if "hub" in child.cmdline():
                    child.kill()
            stdout, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


@pytest.mark.full  # tests/contract/test_hub_postgres.py kills hubs on a database too, without a run around them
def test_a_run_on_postgresql_survives_its_hub_and_stays_apart_from_others(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
):
    url = postgres.new_database()
    model = write_tiny_model(tmp_path / "model")
    write_queue_of_another_run(url, tmp_path / "other", fresh=False)

    flags = ("--model", str(model), *TINY_RUN, "--steps", "8", "--hub.store", url)
    result = run_with_a_killed_hub(tmp_path / "runs", url, *flags)
    run = newest_run(tmp_path / "runs")
    assert result.returncode == 0, ending(result, run)
    assert "hub died after step" in result.stdout, "it was killed"
    assert trained_steps(url) == list(range(1, 9))
    (earlier,) = earlier_queues(url)
    assert rows_of(url, f"SELECT count(*) FROM {earlier}.groups") == [(1,)]  # noqa: S608
    assert not (run / "hub.sqlite").exists()
    texts = {
        path: path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in (".json", ".log", ".jsonl")
    }
    assert [path for path, text in texts.items() if PASSWORD in text] == []
    assert PASSWORD not in result.stdout + result.stderr

    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert len(treadle.load(run).rollouts(step=1)) == 10

    resumed = resume(run, "--steps", "9", "--hub.store", url)
    assert resumed.returncode == 0, ending(resumed, run)
    assert trained_steps(url) == list(range(1, 10))

    write_queue_of_another_run(url, tmp_path / "other", fresh=True)
    assert trained_steps(url, earlier_queues(url)[-1]) == list(range(1, 10))
    refused = resume(run, "--steps", "10", "--hub.store", url)
    assert refused.returncode == 2
    assert "has the queue of another run" in refused.stderr
