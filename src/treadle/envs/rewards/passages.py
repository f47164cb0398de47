"""The passages of a completion that rewards look at: the answer behind the thinking, and the last box in it."""

from __future__ import annotations

_BOX = "\\boxed{"


def answer_text(text: str) -> str:
    """What follows the last `</think>`; everything, when there is none.

    >>> answer_text("<think>7 or 8?</think> It is 8.")
    ' It is 8.'
    """
    return text.rpartition("</think>")[2]


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close; None when there is none.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    limit = len(text)
    while (start := text.rfind(_BOX, 0, limit)) >= 0:
        begin = start + len(_BOX)
        # A box that did not close before cannot close behind the next one's start: every text is read once.
        end = _closing_brace(text, begin, limit)
        if end is not None:
            return text[begin:end]
        limit = start
    return None


def tagged(text: str, tag: str) -> str | None:
    """The content of the first `<tag>...</tag>`; None when there is none.

    >>> tagged("<answer>42</answer>", "answer")
    '42'
    """
    _, opening, rest = text.partition(f"<{tag}>")
    content, closing, _ = rest.partition(f"</{tag}>")
    return content if opening and closing else None


def _closing_brace(text: str, begin: int, end: int) -> int | None:
    depth = 1
    place = begin
    while place < end:
        letter = text[place]
        if letter == "\\":
            place += 2  # \{ and \} are signs, not braces
            continue
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place
        place += 1
    return None
