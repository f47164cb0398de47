"""The process that holds an answer: it runs the answer's code, and does what the tests in the other process ask of it.

Whatever the answer does to this process, it can only change what it answers, which is its good right.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Sequence

from treadle.envs.sandbox.values import Line, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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


def serve_answer(source: str, line: Line) -> None:
    """Load the answer, tell which names it defines (or what it raised), then serve until the tests are gone."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses look their module up
    held: list[Any] = []

    def refer(value: Any) -> int:
        held.append(value)
        return len(held) - 1

    def perform(operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if operation == "load":
            exec(compile(source, "answer", "exec"), module.__dict__)  # noqa: S102  # this is what the fence is for
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
            request = line.receive()
        except EOFError:
            return
        try:
            response = perform(*request)
        except BaseException as error:  # sys.exit() as well: the answer has not done what it was asked
            response = {"raised": type(error).__name__, "message": str(error)[:500]}
        line.send(response)
