"""The process that runs Python tests. It never runs the answer's code: it asks the process that does (`answer.py`)."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType

from treadle.envs.sandbox.values import GONE, Line, decode, encode, replace_content

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
        problem = _problem(lambda test=test: answer.run(test))  # type: ignore[misc]
        if line.is_closed:  # the test has failed, whatever it has caught
            tell(problem or GONE)
            return
        tell(problem)


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
            namespace[name] = self._request("name", [name])
        exec(code, namespace)  # noqa: S102  # tests come with the data, and are fenced in as answers are

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Do something with the answer's things over there; lists that it changes in place change here as well."""
        sent = [encode(value, _number_of) for value in args]
        named = {name: encode(value, _number_of) for name, value in kwargs.items()}
        return self._request(operation, sent, named, given=dict([*enumerate(args), *kwargs.items()]))

    def _request(
        self,
        operation: str,
        sent: Sequence[Any] = (),
        named: Mapping[str, Any] = MappingProxyType({}),
        *,
        given: Mapping[int | str, Any] = MappingProxyType({}),
    ) -> Any:
        self._line.send([operation, sent, dict(named)])
        response = self._line.receive()
        if "raised" in response:
            _raise(str(response["raised"]), str(response["message"]))
        for place, now in response.get("changed", ()):
            replace_content(given[place], decode(now, self._remote))
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


def _forward(operation: str) -> Callable[..., Any]:
    def method(self: Remote, /, *args: Any, **kwargs: Any) -> Any:
        return self._answer.ask(operation, self, *args, **kwargs)

    return method


def _forward_among_remotes(operation: str) -> Callable[[Remote, object], Any]:
    """The answer neither learns the 2 that its object is compared with, nor decides how far off it is."""

    def method(self: Remote, other: object) -> Any:
        return self._answer.ask(operation, self, other) if isinstance(other, Remote) else NotImplemented

    return method


# Not "contains": Python then looks for the value among the members, and compares them here.
for _name in ("call", "setattr", "getitem", "setitem", "delitem", "len", "str", "repr", "bool", "next"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("abs", "int", "float", "neg"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _forward_among_remotes(_name))


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value.__dict__["_number"])
    raise TypeError(f"a test can hand plain values to an answer, but not a {type(value).__name__}")


def _raise(name: str, message: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):  # SystemExit is caught by `except Exception` nowhere
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
