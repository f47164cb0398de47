"""How far transformers has come with loading a model: it counts the weights for a bar of its own, and we listen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

Tell = Callable[[str, int, int], None]  # ("loading weights", 120, 272)


@contextmanager
def telling_of_weights(tell: Tell) -> Iterator[None]:
    """While it is open, `tell` hears of every weight that is loaded."""

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = str(kwargs.get("desc") or "")
        if what and args and isinstance(args[0], Collection):
            args = (_each(what[0].lower() + what[1:], args[0], tell), *args[1:])
        return factory(*args, **kwargs)

    before = transformers_logging.set_tqdm_hook(counted)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _each(what: str, things: Collection[Any], tell: Tell) -> Iterator[Any]:
    for done, thing in enumerate(things):
        tell(what, done, len(things))
        yield thing
    tell(what, len(things), len(things))
