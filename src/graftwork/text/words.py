"""Words of a text, and forms that are equal for texts that differ only in case, spacing and punctuation.

The result is the same in every process and on every machine. Scripts without spaces are split into
characters.
"""

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

# Kana, CJK ideographs and Hangul are words by themselves; in other scripts a run of letters is.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
# Lowercase letters and digits stay, capitals become lowercase, everything else separates words.
_FOLD = bytes(
    ord(chr(code).lower()) if code < 128 and chr(code).isalnum() else ord(" ") for code in range(256)
)

# Punctuation and quotes at the beginning or end of a word.
_AROUND = re.compile(r"(?<!\S)[\"'“”‘’«»]+|[.,;:!?…\"'“”‘’«»。，！？]+(?!\S)")


@lru_cache(maxsize=4096)
def _is_punctuation(run: str) -> bool:
    """Whether the run is only punctuation and symbols: quotes, dashes, bullets, most emoji.

    A combining mark is not: it has to be normalized together with the letter before it.
    """
    parts = unicodedata.normalize("NFKD", run)
    return not any(map(unicodedata.combining, parts)) and _WORD.search(parts.casefold()) is None


def _separate(match: re.Match[str]) -> str:
    run = match.group()
    return " " if len(run) <= 16 and _is_punctuation(run) else run


def words(text: str) -> list[str]:
    """Return the words of `text`, NFKC-normalized and case-folded, without punctuation."""
    plain = text if text.isascii() else _BEYOND_ASCII.sub(_separate, text)
    if plain.isascii():
        return plain.encode("ascii").translate(_FOLD).decode("ascii").split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalize(text: str) -> str:
    """Return `text` as its words with single spaces."""
    return " ".join(words(text))


def fold(text: str) -> str:
    """Remove differences in case, spacing and punctuation around words.

    Unlike `normalize`, keeps every character that may carry meaning: `C` is not `C++`, `a < b` not `a > b`,
    `2.5` not `25`.
    """
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(_AROUND.sub("", plain.casefold()).split())


def with_pairs(terms: Sequence[str]) -> list[str]:
    """The words and the pairs of adjacent words."""
    return [*terms, *map(" ".join, pairwise(terms))]


def hash_terms(terms: Iterable[str], buckets: int) -> Counter[int]:
    """How often each of `buckets` numbers occurs among the hashes of the terms."""
    return Counter(zlib.crc32(term.encode()) % buckets for term in terms)


def last_lines(text: str) -> list[str]:
    """Return the non-empty lines of `text`, from the last to the first."""
    return [line.strip() for line in reversed(text.splitlines()) if line.strip()]
