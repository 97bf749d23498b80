"""The words of a server without our key in them: some servers repeat what they refuse.

In: text that a server sent, the key that was sent to it. Out: the text without the key, made short only after
that: a key that is cut in the middle would no longer be found. Pure.
"""

from graftwork.text.unsaid import hide, leave_unsaid

SHORTEST_IN_ANSWERS = 16
"""A shorter key, such as the word `none` that some servers want, may well be a part of an answer."""


def mask(text: str, key: str | None) -> str:
    """The text without the key, however it was written into it."""
    return hide(text, [key]) if key else text


def mask_answer(text: str, key: str | None) -> str:
    """As `mask`, for what is graded and kept: only what cannot be a word of the answer."""
    return mask(text, key) if key and len(key) >= SHORTEST_IN_ANSWERS else text


def tell(text: str, *, key: str | None, longest: int) -> str:
    """What a server said, on one line: without the key and without a login in an address, then made short."""
    return leave_unsaid(text, [key] if key else [], longest=longest)


def fits_header(key: str) -> bool:
    """Whether a header can carry it. What cannot would end up in the words of an error instead."""
    return key.isascii() and key.isprintable()
