"""Copies of checkpoints in an object store (--train.checkpoint-url), so that no shared disk is needed.

    URL/step_25/model.safetensors ...   while training goes on
    URL/step_25/trainer.json            last: a checkpoint without its manifest was not copied completely
    URL/final_model/...                 config.json last

A trainer that starts on a machine without checkpoints, or with older or damaged ones, gets the newest whole copy, and a
checkpoint whose copy was interrupted is copied again. Credentials come from the environment, as of the store's own
tools: AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and so on; AWS_ENDPOINT_URL for
other S3 servers. This module needs the extra `object-store`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

from treadle.config import TrainConfig
from treadle.errors import ConfigError, DiskFull, TrainingError
from treadle.log import get_logger
from treadle.train.checkpoint import CheckpointDamaged, verify
from treadle.train.model_files import ADAPTER, FULL, FolderKind, write_folder
from treadle.train.ranks import ALONE, Ranks

log = get_logger("checkpoint")

LAST_FILES = ("config.json", "adapter_config.json", "trainer.json")  # in this order, after all others
READ_BYTES = 16 << 20
PROGRESS_S = 15.0  # between two log lines of a long copy
AFTER_ERROR_S = 60.0  # for copies that have begun, before a run ends with its error
ENDED = None


@contextmanager
def copied_checkpoints(config: TrainConfig, ranks: Ranks = ALONE) -> Iterator[CheckpointCopies | None]:
    """Get the newest copy first, and wait for the last ones at the end. Rank 0 does both; None on the others."""
    copies = ranks.lead("fetching a checkpoint", lambda: _start_copies(config))
    try:
        yield copies
    except Exception:
        if copies is not None:
            copies.stop(AFTER_ERROR_S)
        raise
    ranks.lead("copying checkpoints", copies.finish if copies is not None else lambda: None)


def _start_copies(config: TrainConfig) -> CheckpointCopies:
    url = config.checkpoint_url
    try:
        store = (
            LocalStore(urlsplit(url).path, mkdir=True, automatic_cleanup=True)
            if urlsplit(url).scheme == "file"
            # An S3 server of one's own may speak plain HTTP; the URL of the server says which.
            else from_url(url, client_options={"allow_http": True})
        )
        copies = CheckpointCopies(store, url, config.keep_checkpoints)
        copies.try_out()  # an error now, not after the first checkpoint
    except Exception as error:  # obstore's errors have no common base class
        raise ConfigError(
            f"checkpoints cannot be copied to {url}: {_first_line(error)}",
            fix="check the URL and the credentials in the environment, or leave --train.checkpoint-url out",
        ) from error
    copies.match_newest(config.save_path, ADAPTER if config.lora else FULL)
    return copies


class CheckpointCopies:
    """`copies.add(folder)` returns at once; `copies.finish()` waits until the newest folders are in the store.

    A copy that fails is reported and does not end the run: the next checkpoint is tried again.
    """

    def __init__(self, store: ObjectStore, url: str, keep: int) -> None:
        self._store = store
        self._url = url
        self._keep = keep
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._failed: dict[str, str] = {}  # problem of the newest copy of each kind
        self._thread: threading.Thread | None = None

    def try_out(self) -> None:
        name = ".treadle-was-here"
        obstore.put(self._store, name, b"")
        obstore.delete(self._store, name)

    def add(self, folder: Path) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy_forever, name="checkpoint-copies", daemon=True)
            self._thread.start()
        self._waiting.put(folder)

    def finish(self) -> None:
        """Raises TrainingError if the newest checkpoint or the final model could not be copied."""
        self.stop()
        if self._failed:
            problems = "; ".join(f"{name}: {problem}" for name, problem in self._failed.items())
            raise TrainingError(
                f"not everything was copied to {self._url}: {problems}", fix="copy the folders of the run by hand"
            )

    def stop(self, limit_s: float | None = None) -> None:
        """Wait for the copies, for at most `limit_s`."""
        if self._thread is None:
            return
        self._waiting.put(ENDED)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("checkpoint_not_copied", url=self._url, reason=f"not done {limit_s:g} s after the error")
        self._thread = None

    def match_newest(self, root: Path, kind: FolderKind) -> None:
        """Make the newest whole checkpoint the same in `root` and in the store: a newer copy is fetched, a newer folder
        is copied. What is damaged, here or there, is skipped."""
        here = steps_of((folder.name for folder in root.glob(f"{kind.prefix}*")), kind.prefix)
        there = self._complete_steps(kind.prefix)
        damaged: list[str] = []

        def skip(place: str, reason: CheckpointDamaged) -> None:
            damaged.append(f"{place} ({reason})")
            log.warning("checkpoint_damaged", folder=place, reason=str(reason))

        for step in sorted({*here, *there}, reverse=True):
            folder = root / f"{kind.prefix}{step}"
            if step in here:
                try:
                    verify(folder, step)
                except CheckpointDamaged as reason:
                    skip(str(folder), reason)
                else:
                    if step not in there:  # the copy was interrupted
                        self.add(folder)
                    return
            if step in there:
                try:
                    self._fetch(root, folder.name, step)
                except CheckpointDamaged as reason:
                    skip(f"{self._url}/{folder.name}", reason)
                else:
                    return
        if there:
            raise TrainingError(
                f"no checkpoint is whole: {', '.join(damaged)}",
                fix="put back a copy of one of them, or delete them to start a fresh run",
            )

    def _fetch(self, root: Path, name: str, step: int) -> None:
        """Raises CheckpointDamaged, and leaves `root` as it was, if the copy is not whole."""
        started = time.monotonic()
        root.mkdir(parents=True, exist_ok=True)
        log.info("fetching_checkpoint", checkpoint=name, url=self._url)

        def fill(folder: Path) -> None:
            for path in self._files(name):
                with (folder / path.rpartition("/")[2]).open("wb") as file:
                    for chunk in obstore.get(self._store, path).stream(min_chunk_size=READ_BYTES):
                        file.write(chunk)
            verify(folder, step)

        try:
            folder = write_folder(root, name, fill)
        except (CheckpointDamaged, DiskFull):
            raise
        except Exception as error:
            raise TrainingError(
                f"{self._url}/{name} cannot be read: {_first_line(error)}",
                fix="start again, or leave --train.checkpoint-url out to go on from what is here",
            ) from error
        log.info("fetched_checkpoint", folder=str(folder), seconds=time.monotonic() - started)

    def _copy_forever(self) -> None:
        while (folder := self._waiting.get()) is not ENDED:
            kind = folder.name.rstrip("0123456789")
            try:
                self._copy(folder)
                if step := folder.name.removeprefix(kind):
                    self._remove_others(kind, int(step))
            except Exception as error:
                if isinstance(error, FileNotFoundError) and not folder.exists():  # a store's 404 is one too
                    log.warning("checkpoint_not_copied", folder=str(folder), reason="a newer one has replaced it")
                    continue
                log.error("checkpoint_not_copied", folder=str(folder), url=self._url, reason=_first_line(error))
                self._failed[kind] = _first_line(error)
            else:
                self._failed.pop(kind, None)

    def _copy(self, folder: Path) -> None:
        started = reported = time.monotonic()
        files = sorted(folder.iterdir(), key=lambda file: (_place(file.name), file.name))
        total, done = sum(file.stat().st_size for file in files), 0
        self._delete([f"{folder.name}/{LAST_FILES[-1]}"])  # of an earlier copy, which is not complete from now on
        for file in files:
            obstore.put(self._store, f"{folder.name}/{file.name}", file)
            done += file.stat().st_size
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                log.info("copying", folder=folder.name, gb_copied=done / 1e9, gb=total / 1e9)
        names = {f"{folder.name}/{file.name}" for file in files}
        self._delete([path for path in self._files(folder.name) if path not in names])
        log.info("copied", folder=folder.name, url=self._url, gb=total / 1e9, seconds=time.monotonic() - started)

    def _remove_others(self, prefix: str, step: int) -> None:
        """Keep the newest complete copies up to `step`, which was just copied. Later ones are of a run that was taken
        back to an earlier step: as in the folder of the run, they must not be found again. Copies that are not complete
        count as old: their checkpoint was removed before its copy had ended."""
        kept = [s for s in self._complete_steps(prefix) if s <= step][-self._keep :]
        for other in self._list_steps(prefix):
            if other not in kept:
                name = f"{prefix}{other}"
                self._delete([f"{name}/{LAST_FILES[-1]}"])  # first: from now on it is not complete
                self._delete(self._files(name))

    def _complete_steps(self, prefix: str) -> list[int]:
        return [s for s in self._list_steps(prefix) if f"{prefix}{s}/{LAST_FILES[-1]}" in self._files(f"{prefix}{s}")]

    def _list_steps(self, prefix: str) -> list[int]:
        return steps_of(obstore.list_with_delimiter(self._store)["common_prefixes"], prefix)

    def _files(self, folder: str) -> list[str]:
        return list(self._listed(f"{folder}/"))

    def _listed(self, prefix: str) -> Iterator[str]:
        for page in obstore.list(self._store, prefix=prefix):
            yield from (str(item["path"]) for item in page)

    def _delete(self, paths: list[str]) -> None:
        for path in paths:
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError:
                continue


def steps_of(names: Iterable[str], prefix: str) -> list[int]:
    """`steps_of(["step_50", "step_25", "final_model"], "step_") == [25, 50]`"""
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def _place(name: str) -> int:
    return LAST_FILES.index(name) if name in LAST_FILES else -1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
