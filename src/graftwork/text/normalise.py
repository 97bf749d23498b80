"""Text folded for comparing, never for showing.

In: any text. Out: the same text without what a reader would not call a difference: case, spacing,
width of characters, punctuation. Does not know languages; scripts that write without spaces are
taken character by character.
"""

import re
import unicodedata
from functools import lru_cache

# Kana, CJK ideographs and Hangul stand for words by themselves; in other scripts a run does.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
# Small letters and digits stay, capitals become small, everything else parts words.
_FOLD = bytes(
    ord(chr(code).lower()) if code < 128 and chr(code).isalnum() else ord(" ") for code in range(256)
)

# Full stops, commas, question marks and quotes where a word begins or ends.
_AROUND = re.compile(r"(?<!\S)[\"'“”‘’«»]+|[.,;:!?…\"'“”‘’«»。，！？]+(?!\S)")


def words(text: str) -> list[str]:
    """The words of `text`, compatibility-normalised and case-folded, without punctuation."""
    plain = text if text.isascii() else _BEYOND_ASCII.sub(_part_words, text)
    if plain.isascii():
        return plain.encode("ascii").translate(_FOLD).decode("ascii").split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalise(text: str) -> str:
    """`text` as its words with single spaces between them."""
    return " ".join(words(text))


def fold(text: str) -> str:
    """`text` without what no reader calls another text: case, spacing, and the signs around words.

    Unlike `normalise` it keeps every sign that may carry the meaning: `C` is not `C++`, `a < b` not
    `a > b`, `2.5` not `25`.
    """
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(_AROUND.sub("", plain.casefold()).split())


def last_lines(text: str) -> list[str]:
    """The lines of `text` that hold something, from the last to the first."""
    return [line.strip() for line in reversed(text.splitlines()) if line.strip()]


def _part_words(match: re.Match[str]) -> str:
    run = match.group()
    return " " if len(run) <= 16 and _only_parts_words(run) else run


@lru_cache(maxsize=4096)
def _only_parts_words(run: str) -> bool:
    """Whether the run is nothing but punctuation and signs: quotes, dashes, bullets, most emoji.

    A mark that combines with the letter before it is not: the two have to be normalised together.
    """
    parts = unicodedata.normalize("NFKD", run)
    return not any(map(unicodedata.combining, parts)) and _WORD.search(parts.casefold()) is None
