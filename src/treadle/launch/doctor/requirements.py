"""Versions, and the ranges that they are asked for in. Pure, and no more than our own and vLLM's requirements need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)\s*(\[[^]]*\])?\s*\(?(?P<wanted>[^;)]*)\)?\s*(;(?P<marker>.*))?$")
_CLAUSE = re.compile(r"(>=|<=|==|!=|~=|<|>)\s*([\w.+*]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
_Release = tuple[int, ...]


@dataclass(frozen=True)
class Requirement:
    """ "torch>=2.11,<2.14; extra == 'train'" -> Requirement("torch", ">=2.11,<2.14", "train")."""

    name: str
    wanted: str
    extra: str = ""

    def is_met_by(self, version: str) -> bool:
        """
        >>> wanted = Requirement("torch", ">=2.11,<2.14")
        >>> [wanted.is_met_by(version) for version in ("2.10.1", "2.13.0+cpu", "2.14")]
        [False, True, False]
        """
        return all(_is_met(version, operator, bound) for operator, bound in _CLAUSE.findall(self.wanted))


def parse_requirement(line: str) -> Requirement | None:
    found = _REQUIREMENT.match(line.strip())
    if found is None:
        return None
    extra = _EXTRA.search(found["marker"] or "")
    return Requirement(plain_name(found["name"]), found["wanted"].replace(" ", ""), extra[1] if extra else "")


def requirements_for(lines: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """Those that always hold, and those of these extras."""
    wanted = {"", *extras}
    return [found for line in lines if (found := parse_requirement(line)) is not None and found.extra in wanted]


def plain_name(name: str) -> str:
    """As package indexes compare names: "huggingface_hub" is "huggingface-hub"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def release_of(version: str) -> _Release:
    """
    >>> release_of("2.13.0+cpu"), release_of("0.32.0rc1")
    ((2, 13, 0), (0, 32, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _is_met(version: str, operator: str, bound: str) -> bool:
    have, asked = release_of(version), release_of(bound)
    if operator in ("==", "!=") and bound.endswith(".*"):
        is_same = have[: len(asked)] == asked
        return is_same if operator == "==" else not is_same
    width = max(len(have), len(asked))
    left, right = _padded(have, width), _padded(asked, width)
    if operator == "~=":
        return left >= right and have[: len(asked) - 1] == asked[:-1]
    return _COMPARE[operator](left, right)


def _padded(release: _Release, width: int) -> _Release:
    return release + (0,) * (width - len(release))


_COMPARE: dict[str, Callable[[_Release, _Release], bool]] = {
    ">=": lambda left, right: left >= right,
    "<=": lambda left, right: left <= right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
}
