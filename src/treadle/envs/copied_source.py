"""Write functions and classes of a script or a notebook into a file that other processes can import.

The environment and the reward workers are separate processes and import code by its address (rewards/addresses.py).
Code in a notebook cell, in the running script, or inside a function has no address, so its source is copied, with
everything that it uses:

modules, and what can be imported from them     as import statements
functions and classes of the same session       copied recursively, with their aliases
numbers, texts, lists, dicts, compiled patterns by value
secrets, and anything else                      refused with a ConfigError that names it
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import os
import re
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from treadle.config.files import NOT_STORED, without_secrets
from treadle.envs.rewards.addresses import COPIED
from treadle.envs.rewards.base import FunctionReward
from treadle.errors import ConfigError

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OWN_FOLDER = str(Path(__file__).parents[2])  # of an editable install
_MOVE = "move all of this to a .py file beside your script and import it"
_MIN_SECRET_CHARS = 8  # a shorter value of an environment variable such as X_TOKEN is in many texts by chance


class CopiedSource:
    """Builds the text of one file. Names are kept.

    source = CopiedSource()
    name = source.add(my_reward)
    path.write_text(source.text)
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._parts: list[str] = []
        self._folders: dict[str, None] = {}  # to import from, in order

    @property
    def text(self) -> str:
        paths = "".join(f"sys.path.append({folder!r})\n" for folder in self._folders)
        head = (
            '"""Copied by treadle.train(): code of the script or notebook that started the run."""\n'
            f"from __future__ import annotations\n\nimport re\nimport sys\n\n{COPIED} = True\n{paths}"
        )
        return "\n\n".join([head, *self._parts]) + "\n"

    def add(self, thing: Any) -> str:
        """Add a function, a class, or a function decorated with @reward; returns its name in the file."""
        name: str = _function_in(thing).__name__
        if name == "<lambda>":
            raise ConfigError("a reward cannot be a lambda: it needs a name", fix="write it with def")
        self._add(name, thing, needed_by="")
        return name

    def append(self, part: str) -> None:
        self._parts.append(part)

    def _add(self, name: str, value: Any, needed_by: str) -> None:
        target = _function_in(value)
        if name in self._values:
            if self._values[name] is not target and self._values[name] != target:
                raise ConfigError(f"two different things are called '{name}'", fix="rename one of them")
            return
        self._values[name] = target
        written = self._as_import(name, value)
        if not written and (written := _as_value(name, value)) and _has_secret(name, value):
            raise ConfigError(
                f"'{needed_by}' uses '{name}', which looks like a secret, and would be written to a file",
                fix="read it from os.environ inside the function; if it is none, rename it",
            )
        if not written:
            is_method = inspect.ismethod(target)
            if is_method or not (inspect.isroutine(target) or inspect.isclass(target)):
                kind = "method" if is_method else type(value).__qualname__
                raise ConfigError(
                    f"'{needed_by}' uses '{name}', a {kind}, which cannot be copied to the process that scores",
                    fix=f"make it inside the function, or {_MOVE}",
                )
            written = self._copy(name, value)
        self._parts.append(written)

    def _copy(self, name: str, value: Any) -> str:
        """The source of a function or class, after adding everything that it uses."""
        target = _function_in(value)
        if target.__name__ == "<lambda>":
            raise ConfigError(f"'{name}' is a lambda, which cannot be copied", fix="write it with def")
        if name != target.__name__:
            _check_is_whole(value)
            self._add(target.__name__, value, needed_by=name)
            return f"{name} = {target.__name__}"
        inner = inspect.unwrap(target)
        text = source_text(inner)
        if _num_wrappers(target) > _num_decorators(text):
            raise ConfigError(
                f"'{name}' has a decorator that is not above its def, so the copy would not have it",
                fix=f"write @decorator above the def, or {_MOVE}",
            )
        scope = _scope_of(inner)
        for used in _names_read(text):
            if used in scope:
                self._add(used, scope[used], needed_by=name)
        return text

    def _as_import(self, name: str, value: Any) -> str:
        """The import statement for another process; "" if it cannot be imported."""
        if isinstance(value, ModuleType):
            return f"import {value.__name__} as {name}" if self._can_import(value.__name__) else ""
        target = _function_in(value)
        module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(path, str) or not self._can_import(module):
            return ""
        found: Any = sys.modules[module]
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not value:
            return ""
        if "." in path:
            return f"import {module}\n{name} = {module}.{path}"
        return f"from {module} import {path}" + (f" as {name}" if name != path else "")

    def _can_import(self, module: str) -> bool:
        """Whether another process can import a module; the folder of one that is not installed is added to sys.path."""
        found = sys.modules.get(module)
        if found is None or module == "__main__" or getattr(found, COPIED, False):
            return False
        top = sys.modules.get(module.partition(".")[0])
        file = getattr(top, "__file__", None)
        if file is None:  # built in, or a namespace package, which has a folder in several places
            for place in getattr(top, "__path__", ()):
                self._use_folder(Path(place).resolve().parent)
            return True
        folder = Path(file).resolve().parent
        return self._use_folder(folder.parent if Path(file).name == "__init__.py" else folder)

    def _use_folder(self, folder: Path) -> bool:
        """Let the copy import from a folder; False: it is not on sys.path here."""
        is_by_name = str(folder) in {str(Path(place or ".").resolve()) for place in sys.path}
        if is_by_name and not str(folder).startswith((*_INSTALLED, _OWN_FOLDER)):
            self._folders[str(folder)] = None
        return is_by_name


def source_text(target: Any) -> str:
    """The source of a function or class with its decorators, valid at the top level of a file."""
    wanted = ast.ClassDef if inspect.isclass(target) else ast.FunctionDef | ast.AsyncFunctionDef
    for file, line in _places_of(target):
        lines = linecache.getlines(file)
        for node in _nodes_of("".join(lines)):
            if isinstance(node, wanted) and node.name == target.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if line is None or first <= line <= (node.end_lineno or first):
                    text = "".join(lines[first - 1 : node.end_lineno]).rstrip()
                    # Not dedented: lines inside of strings must not change.
                    return f"if True:\n{text}" if text[0].isspace() else text
    raise ConfigError(
        f"the source of '{target.__name__}' cannot be found, so it cannot be copied to the process that scores",
        fix="define it in a notebook cell or in a .py file",
    )


def _function_in(value: Any) -> Any:
    return value.function if isinstance(value, FunctionReward) else value


def _num_wrappers(target: Any) -> int:
    """How many times it was wrapped with functools.wraps."""
    num = 0
    while (target := getattr(target, "__wrapped__", None)) is not None:
        num += 1
    return num


def _num_decorators(text: str) -> int:
    """Number of decorators of the outermost function or class in this source."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next(len(node.decorator_list) for node in _nodes_of(text) if isinstance(node, kinds))


def _check_is_whole(value: Any) -> None:
    """Refuse the inner function of a decorator without functools.wraps: its source includes that decorator."""
    if not inspect.isfunction(value):
        return
    inner = inspect.unwrap(value)
    is_by_name = _function_in(_scope_of(inner).get(value.__name__)) is value
    if not is_by_name and _num_decorators(source_text(inner)) > _num_wrappers(value):
        raise ConfigError(
            f"'{value.__name__}' has a decorator without functools.wraps, and cannot be copied",
            fix=f"use functools.wraps in the decorator, or {_MOVE}",
        )


def _nodes_of(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except SyntaxError:  # not Python
        return []


def _places_of(target: Any) -> Iterator[tuple[str, int | None]]:
    """Where its source may be: the file and line of its code, then the script, then the notebook's newest cells."""
    for function in _functions_of(target):
        yield function.__code__.co_filename, function.__code__.co_firstlineno
    if inspect.isclass(target):  # it may have no methods, like a dataclass
        script = getattr(sys.modules.get(target.__module__), "__file__", None)
        cells = [name for name, entry in reversed(linecache.cache.items()) if len(entry) > 1 and entry[1] is None]
        yield from ((file, None) for file in [*([script] if script else []), *cells])


def _functions_of(target: Any) -> Iterator[FunctionType]:
    members = vars(target).values() if inspect.isclass(target) else [target]
    for member in members:
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(inner, FunctionType):
            yield inspect.unwrap(inner)


def _scope_of(target: Any) -> Mapping[str, Any]:
    """The values of the names that a function or class can see, except builtins."""
    scope = dict(vars(sys.modules[target.__module__]))
    for function in _functions_of(target):
        scope |= function.__globals__
    for function in _functions_of(target):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                scope[name] = cell.cell_contents
    return {name: value for name, value in scope.items() if getattr(builtins, name, None) is not value}


def _names_read(text: str) -> list[str]:
    """The names that this source takes from outside; not those in annotations, which are not evaluated."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    names: dict[str, None] = {}
    waiting = [symtable.symtable(ast.unparse(tree), "copied", "exec")]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        is_top = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (is_top and not symbol.is_assigned())):
                names[symbol.get_name()] = None
    return list(names)


def _as_value(name: str, value: Any) -> str:
    """An assignment; "" for values without a literal form."""
    if isinstance(value, re.Pattern):
        return f"{name} = re.compile({value.pattern!r}, {int(value.flags) & ~int(re.UNICODE)})"
    return f"{name} = {value!r}" if _is_plain(value) else ""


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, str, bytes):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value))


def _has_secret(name: str, value: Any) -> bool:
    """By its name, the name of a key in it, or because a variable such as OPENAI_API_KEY has the same value."""
    if isinstance(value, int | float):
        return False
    if NOT_STORED in str(without_secrets({name: value})):
        return True
    secrets = [
        text
        for variable, text in os.environ.items()
        if len(text) >= _MIN_SECRET_CHARS and NOT_STORED in without_secrets({variable: f"{variable}={text}"})[variable]
    ]
    return any(text in str(value) for text in secrets)
