"""Run Python tests in one process against an answer in another.

`serve_answer` loads the answer and performs operations on it; whatever the answer does to its process, it can only
change its own results. `run_tests` runs the tests with proxies of the answer's names. Plain values travel between the
two as JSON, other objects as references. Standard library only, without slow imports: every answer starts both.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import CodeType, MappingProxyType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn


GONE = "the process of the answer ended"
_LONGEST_MESSAGE = 8 * 2**20
# Names that a test can rely on, whatever the answer defines.
_OWN_NAMES = frozenset(dir(builtins)) | sys.stdlib_module_names
_ATOMS = (bool, int, float, str)
_GROUPS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Encoders and decoders of other values. Their modules are imported on demand, to keep the start fast.
_WRITTEN: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "builtins.bytes": (lambda kind, value: kind.hex(value), lambda kind, text: kind.fromhex(text)),
    "builtins.bytearray": (lambda kind, value: kind.hex(value), lambda kind, text: kind.fromhex(text)),
    "builtins.complex": (lambda kind, value: [value.real, value.imag], lambda kind, parts: kind(*parts)),
    "builtins.range": (lambda kind, value: [value.start, value.stop, value.step], lambda kind, parts: kind(*parts)),
    "decimal.Decimal": (lambda kind, value: kind.__str__(value), lambda kind, text: kind(text)),
    "fractions.Fraction": (lambda kind, value: kind.__str__(value), lambda kind, text: kind(text)),
    "datetime.datetime": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.date": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.time": (lambda kind, value: kind.isoformat(value), lambda kind, text: kind.fromisoformat(text)),
    "datetime.timedelta": (
        lambda kind, value: [value.days, value.seconds, value.microseconds],
        lambda kind, parts: kind(*parts),
    ),
}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Encode a value. Subclasses become their base type, so that only values are compared."""
    if value is None:
        return None
    for atom in _ATOMS:
        if isinstance(value, atom):
            return atom(value)
    for name, group in _GROUPS.items():
        if isinstance(value, group):
            return {name: [encode(member, refer) for member in group(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(held, refer)] for key, held in dict(value).items()]}
    if isinstance(value, deque):
        return {"deque": [[encode(member, refer) for member in deque(value)], value.maxlen]}
    return _write(value) or {"reference": refer(value)}


def _write(value: Any) -> dict[str, Any] | None:
    for name, (write, _) in _WRITTEN.items():  # a datetime is a date as well, and comes first
        module, _, kind_name = name.partition(".")
        kind = getattr(
            sys.modules.get(module), kind_name, None
        )  # if the module is not imported, there is no such value
        if isinstance(kind, type) and isinstance(value, kind):
            return {name: write(kind, value)}
    return None


def decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _GROUPS:
        return _GROUPS[name](decode(member, resolve) for member in content)
    if name == "dict":
        return {decode(key, resolve): decode(held, resolve) for key, held in content}
    if name == "deque":
        members, longest = content
        return deque((decode(member, resolve) for member in members), longest)
    if name in _WRITTEN:
        module, _, kind_name = name.partition(".")
        return _WRITTEN[name][1](getattr(import_module(module), kind_name), content)
    return resolve(content)


def replace_content(old: Any, new: Any) -> None:
    """Apply to `old` the change that the other process made to its copy."""
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)


class JsonPipe:
    """Messages to and from another process, one JSON text per line."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._from: BinaryIO = os.fdopen(read_fd, "rb")
        self._write_fd = write_fd
        self.is_closed = False  # by the other process

    def send(self, message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._write_fd, rest) :]
        except BrokenPipeError:
            self.is_closed = True
            raise EOFError(GONE) from None

    def receive(self) -> Any:
        """EOFError if the other process is gone or sends no valid message."""
        line = self._from.readline(_LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            self.is_closed = True
            raise EOFError("a value is too large" if line else GONE)
        return json.loads(line)


# ---- the process of the answer

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    **{function.__name__: function for function in (getattr, setattr, isinstance, iter, next)},
    **{function.__name__: function for function in (len, str, repr, bool, hash, abs, int, float)},
    **{
        name: getattr(operator, name)
        for name in ("getitem", "setitem", "delitem", "neg", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
}


def serve_answer(source: str, pipe: JsonPipe) -> None:
    """Serve operations until the tests are gone. The first one loads the answer and returns the names it defines."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses look their module up
    held: list[Any] = []

    def refer(value: Any) -> int:
        held.append(value)
        return len(held) - 1

    def perform(operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if operation == "load":
            exec(compile(source, "answer", "exec"), module.__dict__)  # noqa: S102  # restricted
            return {"value": encode([name for name in vars(module) if not name.startswith("__")], refer)}
        if operation == "name":
            return {"value": encode(vars(module)[args[0]], refer)}
        given = [decode(value, held.__getitem__) for value in args]
        named = {name: decode(value, held.__getitem__) for name, value in kwargs.items()}
        value = OPERATIONS[operation](*given, **named)
        before = [*enumerate(args), *kwargs.items()]
        after = [encode(thing, refer) for thing in (*given, *named.values())]
        changed = [[place, now] for (place, sent), now in zip(before, after, strict=True) if now != sent]
        return {"value": encode(value, refer), "changed": changed}

    while True:
        try:
            request = pipe.receive()
        except EOFError:
            return
        try:
            response = perform(*request)
        except BaseException as error:  # also SystemExit
            response = {"raised": type(error).__name__, "message": str(error)[:500]}
        pipe.send(response)


# ---- the process of the tests


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
