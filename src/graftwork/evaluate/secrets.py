"""What a server said, made fit to be kept and shown: some servers repeat the key that they refuse.

In: text and figures that a server sent, the key that was sent to it. Out: the text without the key, made
short only after that: a key that is cut in the middle would no longer be found; figures that are some. Pure.
"""

from typing import Any

from graftwork.text.messages import hide, redact_message

MOST_TOKENS = 10**9
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
    return redact_message(text, [key] if key else [], longest=longest)


def fits_header(key: str) -> bool:
    """Whether a header can carry it. What cannot would end up in the words of an error instead."""
    return key.isascii() and key.isprintable()


def writable(text: str) -> str:
    """The text as UTF-8 can hold it: JSON may name halves of characters that no file takes."""
    return text.encode("utf-8", "replace").decode()


def count_tokens(usage: Any, name: str) -> int:
    """The tokens that a server says it took, 0 where it says nothing; ValueError where that is no number."""
    count = (usage or {}).get(name) or 0
    if not isinstance(count, int | float) or not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"{name} is no number of tokens")
    return int(count)
