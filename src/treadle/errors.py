"""Every error a user can meet. Each says what happened and, after it, what to do about it.

TreadleError
├── UserError           exit code 2: something the user can change
│   ├── SeveralProblems   several of these, found by independent checks
│   ├── ConfigError       a key, flag or value that cannot be right
│   ├── MissingExtra      an optional dependency is not installed
│   ├── ModelError        a model that does not exist or that we refuse to load
│   ├── DownloadError     a file that did not arrive, or arrived with the wrong hash
│   ├── PortInUse         another program listens there
│   ├── DiskFull          no room left for the queue, the logs or a checkpoint
│   └── OutOfMemory       no room left on the GPU, or in main memory
├── ProcessDied         exit code 1: a process of the run ended that should not have
├── RunStalled          nothing in the run has moved for too long
├── HubError            the hub refused a call or could not be reached
├── EngineError         the engine refused a call or could not be reached
│   └── RequestError      a request that cannot be served as it was asked
├── SyncError           new weights did not reach the engine, or cannot be shown to have reached it
├── ScoringError        exit code 2: no answer could be scored, because a reward or an environment fails
└── TrainingError       the numbers went bad (NaN) or a batch cannot be trained
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class TreadleError(Exception):
    """An error with its remedy: `TreadleError("port 8000 is in use", fix="pass --port 8001")`."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.fix}" if self.fix else self.message


class UserError(TreadleError):
    exit_code = 2


class SeveralProblems(UserError):
    """Several user errors, reported at once: `Problems` collects them."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        lines = [f"{number}. {problem}".replace("\n", "\n   ") for number, problem in enumerate(problems, start=1)]
        super().__init__("\n".join([f"{len(problems)} problems:", *lines]))
        self.problems = tuple(problems)


class ConfigError(UserError):
    pass


class MissingExtra(UserError):
    pass


class ModelError(UserError):
    pass


class DownloadError(UserError):
    pass


class PortInUse(UserError):
    pass


class DiskFull(UserError):
    pass


class OutOfMemory(UserError):
    pass


class RunStalled(TreadleError):
    pass


class ProcessDied(TreadleError):
    pass


class HubError(TreadleError):
    pass


class EngineError(TreadleError):
    pass


class RequestError(EngineError):
    pass


class SyncError(TreadleError):
    pass


class ScoringError(TreadleError):
    exit_code = 2  # the user's code must be changed; a retry fails again


class TrainingError(TreadleError):
    pass


def require(extra: str, *packages: str) -> None:
    """Check that optional packages are installed: `require("train", "torch", "transformers")`."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"this needs {package}, which is not installed", fix=f"pip install 'treadle[{extra}]'")


class Problems:
    """Collects the user errors of independent checks, so that all of them are reported at once.

    problems = Problems()
    with problems.collected():
        require("train", "torch")
    with problems.collected():
        check_port(8000)
    problems.raise_all()
    """

    def __init__(self) -> None:
        self._found: dict[str, UserError] = {}  # by its text: two checks may find the same

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Catch and keep a user error that the block raises."""
        try:
            yield
        except SeveralProblems as error:
            self._add(*error.problems)
        except UserError as error:
            self._add(error)
        except OSError as error:
            known = as_user_error(error) or as_path_error(error)
            if known is None:
                raise
            self._add(known)

    def _add(self, *problems: UserError) -> None:
        for problem in problems:
            self._found.setdefault(str(problem), problem)

    @property
    def is_empty(self) -> bool:
        return not self._found

    def raise_all(self) -> None:
        """Raise what was collected: the error itself when it is the only one."""
        found = list(self._found.values())
        if found:
            raise found[0] if len(found) == 1 else SeveralProblems(found)


_NO_MEMORY = (
    "MemoryError", "out of memory", "can't allocate memory", "Cannot allocate memory",
    "No available memory for the cache", "less than desired GPU memory utilization",  # vLLM's words
)  # fmt: skip


def is_out_of_memory(words: str) -> bool:
    """Whether an error of torch's, Python's or vLLM's says so, on a GPU or on a CPU.

    >>> is_out_of_memory("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    True
    """
    return any(sign in words for sign in _NO_MEMORY)


def as_user_error(error: BaseException) -> UserError | None:
    """The operating system's errors that a user can fix, in plain words; None for all others."""
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return DiskFull(f"the disk is full{where}", fix="free some space, or use a folder on another disk")
    if error.errno == errno.EADDRINUSE:
        return PortInUse("the port is in use by another program", fix="choose another port")
    return None


_OF_A_PATH = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
)
_OF_PATHLIB = ("Could not determine home directory", "Symlink loop")  # how its RuntimeErrors begin


def as_path_error(error: OSError | RuntimeError) -> UserError | None:
    """A file or folder that is missing or may not be used, in plain words; None for other errors."""
    if isinstance(error, RuntimeError):
        is_known = str(error).startswith(_OF_PATHLIB)
        return UserError(f"a path cannot be followed: {error}", fix="write it in full, without ~") if is_known else None
    if error.errno not in _OF_A_PATH:
        return None
    reason = os.strerror(error.errno).lower()
    if error.filename is None:
        return UserError(f"the current folder cannot be used: {reason}", fix="go to another folder")
    return UserError(f"cannot use {error.filename}: {reason}", fix="check that it is there and that you may use it")
