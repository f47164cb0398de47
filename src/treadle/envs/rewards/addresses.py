"""Address user code for other processes (`package.module:Name` or `/path/file.py:Name`), and locate its errors."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from treadle.errors import ConfigError, TreadleError

MAX_DETAIL = 500  # letters; an error may quote a whole completion
COPIED = "COPIED_BY_TREADLE"  # defined in files that copied_source.py wrote
# This package, the standard library and installed packages.
_NOT_USER_CODE = (
    f"{Path(__file__).parents[2]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
)


def address_of(thing: Any) -> str:
    """The address of a function or class: `address_of(LengthReward)` ends in `.text:LengthReward`."""
    attribute: str = thing.__qualname__
    if not attribute.replace(".", "").isidentifier():  # <locals>, <lambda>
        raise ConfigError(
            f"reward '{attribute}' cannot be found by the process that scores: it has no name at the top of a file",
            fix='move it to the top level of a module, or score with isolation="inline"',
        )
    module = sys.modules[thing.__module__]
    if thing.__module__ != "__main__" and PathFinder.find_spec(thing.__module__.partition(".")[0]) is not None:
        return f"{thing.__module__}:{attribute}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise ConfigError(
            f"reward '{attribute}' was typed into a session, so no other process can import it",
            fix='write it into a file, or score with isolation="inline"',
        )
    return f"{Path(file).resolve()}:{attribute}"


def is_session_code(thing: Any) -> bool:
    """Whether it was defined in a notebook or the running script, or copied from one: it may be defined again."""
    return thing.__module__ == "__main__" or hasattr(sys.modules.get(thing.__module__), COPIED)


def load_address(source: str) -> Any:
    """Import the function, reward or class at an address."""
    place, _, attribute = source.rpartition(":")
    module = load_file(Path(place)) if place.endswith(".py") else _import(place, source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{place} has no '{attribute}'", fix="check the name behind the colon")
        found = getattr(found, part)
    return found


def load_file(path: Path) -> ModuleType:
    """Import a file from any folder, once per process; ConfigError if that fails."""
    try:
        return _load_file(path.resolve())
    except TreadleError:
        raise
    except (Exception, SystemExit) as error:  # user code
        raise _cannot_be_loaded(path, error) from error


def user_code_location(error: BaseException) -> str:
    """The innermost line of user code in the traceback: "my_env.py:12"; "" if there is none."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    places = ((frame.f_code.co_filename, line) for frame, line in frames)
    file, line = next((place for place in places if not place[0].startswith(("<", *_NOT_USER_CODE))), ("", 0))
    return f"{_shown(file)}:{line}" if file else ""


def describe(error: BaseException) -> str:
    """`KeyError: 'level', at my_env.py:12`: with the innermost line of the user's own code."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ raises
        text = type(error).__name__
    place = user_code_location(error)
    return text[:MAX_DETAIL] + (f", at {place}" if place else "")


def _shown(file: str) -> str:
    """The path, relative to the current folder if it is below it."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


def _cannot_be_loaded(path: Path, error: BaseException) -> ConfigError:
    place = user_code_location(error)
    if isinstance(error, SyntaxError):
        file = _shown(error.filename or str(path))
        return ConfigError(f"{file} cannot be loaded: line {error.lineno}: {error.msg}", fix="correct that line")
    if isinstance(error, ModuleNotFoundError) and error.name:
        file, _, line = (place or f"{path}:1").rpartition(":")
        neighbour = path.resolve().with_name(f"{error.name.partition('.')[0]}.py")
        install = "install it into this environment"
        fix = f"put PYTHONPATH={neighbour.parent} before the command" if neighbour.is_file() else install
        return ConfigError(f"{file}, line {line}: {error}", fix=fix)
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ConfigError(f"{path} cannot be loaded: {said}", fix=f"correct {place}" if place else "correct the file")


@functools.cache
def _load_file(path: Path) -> ModuleType:
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == path:
        return main
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", fix="check the path before the colon")
    # Two files with the same name must not become the same module.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be run as Python", fix="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(module: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, but something that it imports is not
        raise ConfigError(
            f"no module '{module}' for the reward '{source}'", fix="check it, or give a file path"
        ) from None
