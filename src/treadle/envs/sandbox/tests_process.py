"""Process that runs Python tests. The answer's code runs in another process (`answer_process.py`)."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType

from treadle.envs.sandbox.values import GONE, JsonPipe, decode, encode, replace_content

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Names that a test can rely on, whatever the answer defines.
_OWN_NAMES = frozenset(dir(builtins)) | sys.stdlib_module_names


class AnswerError(Exception):
    """An exception of the answer that is not a builtin one."""


def run_tests(tests: Sequence[str], names: Sequence[str], pipe: JsonPipe, report: Callable[[str], None]) -> None:
    """Report the loading of the answer, then each test: "" if it passed, else the problem. Ends with the answer."""
    answer = _AnswerProxy(pipe)
    report(_problem(lambda: answer.load(names)))
    for test in tests:
        problem = _problem(lambda test=test: answer.run(test))  # type: ignore[misc]
        if pipe.is_closed:  # the test has failed, whatever it has caught
            report(problem or GONE)
            return
        report(problem)


def _problem(what: Callable[[], None]) -> str:
    try:
        what()
    except BaseException as error:  # the test has not passed
        return f"{type(error).__name__}: {error}"[:500]
    return ""


class _AnswerProxy:
    """Gives tests the names of the answer; operations on them are performed in the other process."""

    def __init__(self, pipe: JsonPipe) -> None:
        self._pipe = pipe
        self._names: set[str] = set()

    def load(self, names: Sequence[str]) -> None:
        self._names = {name for name in self._request("load") if name not in _OWN_NAMES or name in names}

    def run(self, source: str) -> None:
        """Run a test in a new namespace; the state of the answer is kept."""
        code = compile(source, "test", "exec")
        namespace: dict[str, Any] = {"__name__": "test"}
        for name in self._names.intersection(_names_in(code)):
            namespace[name] = self._request("name", [name])
        exec(code, namespace)  # noqa: S102  # restricted, like answers

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Perform an operation in the answer's process; arguments that it changes in place change here as well."""
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
        self._pipe.send([operation, sent, dict(named)])
        response = self._pipe.receive()
        if "raised" in response:
            _raise(str(response["raised"]), str(response["message"]))
        for place, now in response.get("changed", ()):
            replace_content(given[place], decode(now, self._remote))
        return decode(response["value"], self._remote)

    def _remote(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)


class RemoteObject:
    """An object that only the answer's process has. It is never equal to a plain value."""

    def __init__(self, answer: _AnswerProxy, number: int) -> None:
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
        return isinstance(other, RemoteObject) and bool(self._answer.ask("eq", self, other))

    def __hash__(self) -> int:
        return int(self._answer.ask("hash", self))

    def __instancecheck__(self, thing: object) -> bool:
        return bool(self._answer.ask("isinstance", thing, self))


def _forward(operation: str) -> Callable[..., Any]:
    def method(self: RemoteObject, /, *args: Any, **kwargs: Any) -> Any:
        return self._answer.ask(operation, self, *args, **kwargs)

    return method


def _forward_to_remotes_only(operation: str) -> Callable[[RemoteObject, object], Any]:
    """Plain operands stay here: the answer must neither learn an expected value nor decide how it compares."""

    def method(self: RemoteObject, other: object) -> Any:
        return self._answer.ask(operation, self, other) if isinstance(other, RemoteObject) else NotImplemented

    return method


# Not "contains": without it, Python iterates over the members and compares them here.
for _name in ("call", "setattr", "getitem", "setitem", "delitem", "len", "str", "repr", "bool", "next"):
    setattr(RemoteObject, f"__{_name}__", _forward(_name))
for _name in ("abs", "int", "float", "neg"):
    setattr(RemoteObject, f"__{_name}__", _forward(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _forward_to_remotes_only(_name))


def _number_of(value: Any) -> int:
    if isinstance(value, RemoteObject):
        return int(value.__dict__["_number"])
    raise TypeError(f"a test can hand plain values to an answer, but not a {type(value).__name__}")


def _raise(name: str, message: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            error = kind(message)
        except TypeError:  # UnicodeDecodeError wants five arguments
            error = AnswerError(f"{name}: {message}")
        raise error
    raise AnswerError(f"{name}: {message}")


def _names_in(code: CodeType) -> Iterator[str]:
    """Every name that the code and its functions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
