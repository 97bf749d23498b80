"""Words, sentences and how much of one text stands in another. Pure; does not know what is right."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"')\]]*\s+|\n+")
_ONLY_CITATIONS = re.compile(r"(?:\s*\[\d{1,6}\])+\s*[.;,]?\s*")
_CITATION = re.compile(r"\[\d{1,6}\]")

# Words that nearly every English text holds: sharing them supports nothing.
_COMMON = """
a an the is are was were be been being am do does did has have had of to in on at by for with from as and or
but not no nor so if then than that this these those it its he she they we you i his her their our your there
here which who whom what when where how can could will would shall should may might must also very just about
into over under out up down
"""
_EMPTY_WORDS = frozenset(_COMMON.split())


def words_of(text: str) -> list[str]:
    """The words without case, accents, punctuation and articles."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return [word for word in re.findall(r"\w+", plain) if word not in ("a", "an", "the")]


def shared_words(given: list[str], expected: list[str]) -> float:
    """The F1 of two bags of words."""
    shared = sum((Counter(given) & Counter(expected)).values())
    return 2 * shared / (len(given) + len(expected)) if shared else 0.0


def split_claims(text: str) -> list[str]:
    """The sentences, each with the citations that stand behind its full stop.

    Headings and list marks without a word of substance are no claims.
    """
    claims: list[str] = []
    for piece in _SENTENCE_END.split(text):
        leading = _ONLY_CITATIONS.match(piece) if claims else None
        if leading:
            claims[-1] += " " + leading[0].strip()
        rest = piece[leading.end() :] if leading else piece
        if _tells(rest):
            claims.append(rest.strip())
    return claims


def telling_words(text: str) -> set[str]:
    """The words that carry meaning: numbers and all but the commonest; citations left out."""
    return {word for word in words_of(_CITATION.sub(" ", text)) if word not in _EMPTY_WORDS}


def support(claim: str, sources: Iterable[str]) -> float:
    """The share of the claim's telling words that stand in the sources. Without any such word: 1.

    A number of the claim that no source holds refutes it: 0, however many words agree.
    """
    told = telling_words(claim)
    if not told:
        return 1.0
    known: set[str] = set()
    for source in sources:
        known |= telling_words(source)
    if any(word.isdigit() and word not in known for word in told):
        return 0.0
    return len(told & known) / len(told)


def _tells(piece: str) -> bool:
    return bool(telling_words(piece)) and not piece.strip().endswith(":")
