"""Process that loads the answer and performs operations on it for the tests, which run in another process.

Whatever the answer does to this process, it can only change its own results.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Sequence

from treadle.envs.sandbox.values import JsonPipe, decode, encode

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
