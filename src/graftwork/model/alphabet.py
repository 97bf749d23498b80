"""Which characters are letters, digits and spaces to a tokenizer's pattern, as sets for `re`.

Out: the sets for ASCII, and the wide ones for all characters on which every version of Unicode
agrees: what has been of one kind since version 3.2, and emoji, which no version has ever counted as
letters or digits. Text with any other character (`uncertain`) must be left to the tokenizer itself.
"""

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple


class Alphabet(NamedTuple):
    """Sets, as they are written between the brackets of a pattern."""

    letters: str
    upper: str
    lower: str
    digits: str
    spaces: str


ASCII = Alphabet(letters="A-Za-z", upper="A-Z", lower="a-z", digits="0-9", spaces=r"\t-\r ")
_EMOJI = range(0x1F300, 0x1FB00)
_SPACES = {0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
_FOLDED_TO_ASCII = {0x17F, 0x212A}
"""The long s and the Kelvin sign: the same as s and k where case is ignored, but not everywhere."""


@cache
def wide() -> Alphabet:
    """The sets for all certain characters."""
    kinds: dict[str, list[int]] = {}
    for code in _certain():
        kinds.setdefault(unicodedata.category(chr(code)), []).append(code)

    def of(*names: str) -> str:
        return _as_set(code for name in names for code in kinds.get(name, ()))

    marks = ("Mn", "Mc", "Me")
    return Alphabet(
        letters=of("Lu", "Ll", "Lt", "Lm", "Lo"),
        upper=of("Lu", "Lt", "Lm", "Lo", *marks),
        lower=of("Ll", "Lm", "Lo", *marks),
        digits=of("Nd", "Nl", "No"),
        spaces=ASCII.spaces + _as_set(_SPACES),
    )


@cache
def uncertain() -> re.Pattern[str]:
    """Finds a character on whose kind tokenizers may not agree with this Python."""
    return re.compile("[^" + _as_set((*_certain(), *_EMOJI)) + "]")


@cache
def _certain() -> tuple[int, ...]:
    then = unicodedata.ucd_3_2_0
    return tuple(
        code
        for code in range(0x10000)
        if code not in _FOLDED_TO_ASCII
        and (kind := unicodedata.category(chr(code))) == then.category(chr(code))
        and kind not in ("Cn", "Co", "Cs")
        # A space by its kind and a space to a pattern are the same but for these.
        and (kind in ("Zs", "Zl", "Zp")) <= (code in _SPACES or code == 0x20)
    )


def _as_set(codes: Iterable[int]) -> str:
    """Neighbours as ranges."""
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
