"""The process that runs Python tests. It never runs the answer's code: it asks the process that does (`answer.py`)."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType

from treadle.envs.sandbox.values import Line, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Names that a test may trust, whatever the answer calls its functions and imports.
_OWN_NAMES = frozenset(dir(builtins)) | sys.stdlib_module_names


class AnswerError(Exception):
    """What the answer raised, when it is no exception of Python's own."""


def run_tests(tests: Sequence[str], names: Sequence[str], line: Line, tell: Callable[[str], None]) -> None:
    """Tell that the answer is loaded, then of each test: "" when it passed, else why not. Ends with the answer."""
    answer = _Answer(line)
    tell(_problem(lambda: answer.load(names)))
    for test in tests:
        tell(_problem(lambda test=test: answer.run(test)))  # type: ignore[misc]
        if line.is_closed:
            return


def _problem(what: Callable[[], None]) -> str:
    try:
        what()
    except BaseException as error:  # whatever it is, the test has not passed
        return f"{type(error).__name__}: {error}"[:500]
    return ""


class _Answer:
    """The answer's names, for tests; what they do happens in the other process."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._names: set[str] = set()

    def load(self, names: Sequence[str]) -> None:
        self._names = {name for name in self._request("load") if name not in _OWN_NAMES or name in names}

    def run(self, source: str) -> None:
        """Names start afresh for every test; the answer's own state does not."""
        code = compile(source, "test", "exec")
        namespace: dict[str, Any] = {"__name__": "test"}
        for name in self._names.intersection(_names_in(code)):
            namespace[name] = self._request("name", name)
        exec(code, namespace)  # noqa: S102  # tests come with the data, and are fenced in as answers are

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Do something with the answer's things over there; lists that it changes in place change here as well."""
        sent = [encode(value, _number_of) for value in args]
        named = {name: encode(value, _number_of) for name, value in kwargs.items()}
        return self._request(operation, *sent, given=args, **named)

    def _request(self, operation: str, *sent: Any, given: Sequence[Any] = (), **named: Any) -> Any:
        self._line.send([operation, sent, named])
        response = self._line.receive()
        if "raised" in response:
            _raise(str(response["raised"]), str(response["message"]))
        for place, now in response.get("changed", ()):
            _replace_content(given[place], decode(now, self._remote))
        return decode(response["value"], self._remote)

    def _remote(self, number: int) -> Remote:
        return Remote(self, number)


class Remote:
    """A thing that only the answer's process has. It is used there; compared with a plain value it is another."""

    def __init__(self, answer: _Answer, number: int) -> None:
        self.__dict__.update(_answer=answer, _number=number)

    def __getattr__(self, name: str) -> Any:
        return self._answer.ask("getattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        members = self._answer.ask("iter", self)
        while True:
            try:
                yield self._answer.ask("next", members)
            except StopIteration:
                return

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._answer.ask("eq", self, other))

    def __hash__(self) -> int:
        return int(self._answer.ask("hash", self))

    def __instancecheck__(self, thing: object) -> bool:
        return bool(self._answer.ask("isinstance", thing, self))


def _forward(operation: str, *, is_reflected: bool = False, only_among_remotes: bool = False) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        if only_among_remotes and not isinstance(args[0], Remote):
            return NotImplemented  # an answer does not decide whether its object is more than 2
        return self._answer.ask(operation, *((*args, self) if is_reflected else (self, *args)), **kwargs)

    return method


for _name in ("call", "setattr", "getitem", "setitem", "delitem", "contains", "len", "str", "repr", "bool", "next"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("abs", "int", "float", "neg"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Remote, f"__{_name}__", _forward(_name))
    setattr(Remote, f"__r{_name}__", _forward(_name, is_reflected=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _forward(_name, only_among_remotes=True))


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value.__dict__["_number"])
    raise TypeError(f"a test can hand plain values to an answer, but not a {type(value).__name__}")


def _replace_content(old: Any, new: Any) -> None:
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


def _raise(name: str, message: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(message)
        except TypeError:  # UnicodeDecodeError wants five arguments
            error = AnswerError(f"{name}: {message}")
        raise error
    raise AnswerError(f"{name}: {message}")


def _names_in(code: CodeType) -> Iterator[str]:
    """Every name that the code and the functions in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
