"""Text folded for comparing, never for showing.

In: any text. Out: the same text without what a reader would not call a difference: case, spacing,
width of characters, punctuation. Does not know languages; scripts that write without spaces are
taken character by character.
"""

import re
import unicodedata

# Kana, CJK ideographs and Hangul stand for words by themselves; in other scripts a run does.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of `text`, compatibility-normalised and case-folded, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalise(text: str) -> str:
    """`text` as its words with single spaces between them."""
    return " ".join(words(text))


def last_lines(text: str) -> list[str]:
    """The lines of `text` that hold something, from the last to the first."""
    return [line.strip() for line in reversed(text.splitlines()) if line.strip()]
