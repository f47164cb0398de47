r"""Extract the parts of a completion that rewards compare: the answer, boxes, tags and plain numbers. Pure.

Plain numbers are read exactly: 1,234 and -0.5 and 3/4 and \frac{3}{4} and 5\% and 5 \text{kg}. Most answers are plain
numbers, and comparing those takes microseconds where a computer algebra system takes milliseconds. `compare_numbers`
decides only where that system is certain to agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

_BOX = "\\boxed{"
MAX_LETTERS = 60  # longer texts are not plain numbers
NEARBY = Fraction(1, 100_000)  # closer decimals may be equal after rounding: left to math-verify
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-−+]?)\s*(?:(?P<whole>{_DIGITS})?(?P<decimals>\.[0-9]+)|(?P<integer>{_DIGITS}))\s*(?P<percent>\\?%)?"
)
_FRACTION = re.compile(
    r"(?P<sign>[-−]?)\s*(?:\\[dtc]?frac\{(?P<minus>-?)(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}|(?P<above>[0-9]+)/(?P<below>[0-9]+))"
)
_UNIT = re.compile(r"(?<=[0-9}])(?:\s|\\ )*\\(?:text|mathrm)\{[A-Za-z ]*\}$")


def answer_text(text: str) -> str:
    """The text after the last `</think>`, or all of it.

    >>> answer_text("<think>7 or 8?</think> It is 8.")
    ' It is 8.'
    """
    return text.rpartition("</think>")[2]


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} with balanced braces, or None.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    limit = len(text)
    while (start := text.rfind(_BOX, 0, limit)) >= 0:
        begin = start + len(_BOX)
        # A box that does not close before `limit` does not close behind it either: linear time.
        end = _closing_brace(text, begin, limit)
        if end is not None:
            return text[begin:end]
        limit = start
    return None


def tagged(text: str, tag: str) -> str | None:
    """The content of the first `<tag>...</tag>`, or None.

    >>> tagged("<answer>42</answer>", "answer")
    '42'
    """
    _, opening, rest = text.partition(f"<{tag}>")
    content, closing, _ = rest.partition(f"</{tag}>")
    return content if opening and closing else None


def refuse_constant(constant: str) -> NoReturn:
    """`parse_constant` for a JSON decoder that does not accept NaN and Infinity, which are not JSON."""
    raise ValueError(f"{constant} is not JSON")


def _closing_brace(text: str, begin: int, end: int) -> int | None:
    depth = 1
    place = begin
    while place < end:
        letter = text[place]
        if letter == "\\":
            place += 2  # \{ and \} are not braces
            continue
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place
        place += 1
    return None


@dataclass(frozen=True)
class PlainNumber:
    value: Fraction
    is_decimal: bool = False
    is_percent: bool = False


def read_number(text: str) -> PlainNumber | None:
    r"""The text as a number, or None if it is anything else.

    >>> read_number(r"\$1,234.50").value
    Fraction(2469, 2)
    """
    if len(text) > MAX_LETTERS:
        return None
    bare = text.strip().replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\\!", "").strip()
    bare = _UNIT.sub("", bare)
    if found := _NUMBER.fullmatch(bare):
        part = found.groupdict(default="")
        digits = (part["whole"] + part["decimals"] or part["integer"]).replace(",", "")
        value = Fraction(digits) * (-1 if part["sign"] in ("-", "−") else 1)
        return PlainNumber(value, is_decimal=bool(part["decimals"]), is_percent=bool(part["percent"]))
    if found := _FRACTION.fullmatch(bare):
        part = found.groupdict(default="")
        bottom = int(part["bottom"] or part["below"])
        if bottom == 0:
            return None
        sign = (-1 if part["sign"] else 1) * (-1 if part["minus"] else 1)
        return PlainNumber(sign * Fraction(int(part["top"] or part["above"]), bottom))
    return None


def compare_numbers(gold: PlainNumber, predicted: PlainNumber) -> bool | None:
    """True: equal; False: different; None: too close to decide. 5 % is 0.05, and between whole numbers also 5.

    >>> compare_numbers(PlainNumber(Fraction(5)), PlainNumber(Fraction(5), is_percent=True))
    True
    """
    has_decimals = gold.is_decimal or predicted.is_decimal
    pairs = [(_share(gold), _share(predicted))]
    if not has_decimals:
        pairs.append((gold.value, predicted.value))
    if any(left == right for left, right in pairs):
        return True
    if has_decimals and any(abs(left - right) < NEARBY for left, right in pairs):
        return None
    return False


def _share(number: PlainNumber) -> Fraction:
    return number.value / 100 if number.is_percent else number.value
