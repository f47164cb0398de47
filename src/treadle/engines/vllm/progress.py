"""How far vLLM has come with its start: read off the bars that it draws in its log."""

from __future__ import annotations

import re
from collections.abc import Callable

Tell = Callable[[str, int, int], None]  # ("loading safetensors checkpoint shards", 3, 4)

_BAR = re.compile(r"(?P<what>(?:Loading|Capturing) [^:|]+):\s+\d+%.*\|\s*(?P<done>\d+)/(?P<total>\d+)")


def read_bar(line: str) -> tuple[str, int, int] | None:
    """What is counted, how many are done, of how many; None: the line is no bar.

    >>> read_bar("(EngineCore pid=8235) Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:07<00:07]")
    ('loading safetensors checkpoint shards', 2, 4)
    >>> read_bar("Capturing CUDA graphs (FULL):  27%|██▋       | 3/11 [00:00<00:01,  6.11it/s]")
    ('capturing CUDA graphs (FULL)', 3, 11)
    """
    found = _BAR.search(line)
    if found is None:
        return None
    what = found["what"]
    return what[0].lower() + what[1:], int(found["done"]), int(found["total"])


def tell_nobody(_what: str, _done: int, _total: int) -> None:
    """For a start that nobody follows: a restart has a wait of its own."""
