r"""Plain numbers as people write them, read exactly: 1,234 and -0.5 and 3/4 and \frac{3}{4} and 5\% and 5 \text{kg}.

This is the fast half of checking mathematics: most answers are plain numbers, and comparing those takes microseconds
where a computer algebra system takes milliseconds. It says yes or no only where that system surely says the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LETTERS = 60  # longer ones are no plain numbers
NEARBY = Fraction(1, 100_000)  # closer decimals may be equal after rounding: that is not ours to say

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-−+]?)\s*(?:(?P<whole>{_DIGITS})?(?P<decimals>\.[0-9]+)|(?P<integer>{_DIGITS}))\s*(?P<percent>\\?%)?"
)
_FRACTION = re.compile(
    r"(?P<sign>[-−]?)\s*(?:\\[dtc]?frac\{(?P<minus>-?)(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}|(?P<above>[0-9]+)/(?P<below>[0-9]+))"
)
_UNIT = re.compile(r"(?<=[0-9}])(?:\s|\\ )*\\(?:text|mathrm)\{[A-Za-z ]*\}$")


@dataclass(frozen=True)
class PlainNumber:
    value: Fraction
    is_decimal: bool = False
    is_percent: bool = False


def read_number(text: str) -> PlainNumber | None:
    r"""The number that the whole text is, or None when it is anything else.

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


def compare(gold: PlainNumber, said: PlainNumber) -> bool | None:
    """Equal, different, or None: too close to tell. 5 % is 0.05, and between whole numbers also 5.

    >>> compare(PlainNumber(Fraction(5)), PlainNumber(Fraction(5), is_percent=True))
    True
    """
    has_decimals = gold.is_decimal or said.is_decimal
    pairs = [(_share(gold), _share(said))]
    if not has_decimals:
        pairs.append((gold.value, said.value))
    if any(left == right for left, right in pairs):
        return True
    if has_decimals and any(abs(left - right) < NEARBY for left, right in pairs):
        return None
    return False


def _share(number: PlainNumber) -> Fraction:
    return number.value / 100 if number.is_percent else number.value
