"""In which letters a text is written, and whether its letters were spoiled on the way.

In: a text. Out: the label of its main script, or the sign by which spoiled characters are known.
Does not know languages: French and Vietnamese are both `latin`. Text in plain ASCII is answered
without being looked at letter by letter.
"""

import re
from bisect import bisect_right
from collections import Counter

# The first character of each range that is told apart, in order; the rest is "other".
_RANGES: tuple[tuple[int, str], ...] = (
    *((0x0000, "latin"), (0x0250, "other"), (0x0370, "greek"), (0x0400, "cyrillic"), (0x0530, "other")),
    *((0x0590, "hebrew"), (0x0600, "arabic"), (0x0700, "other"), (0x0750, "arabic"), (0x0780, "other")),
    *((0x0870, "arabic"), (0x0900, "devanagari"), (0x0980, "other"), (0x0E00, "thai"), (0x0E80, "other")),
    *((0x1100, "hangul"), (0x1200, "other"), (0x1C80, "cyrillic"), (0x1C90, "other")),
    *((0x1E00, "latin"), (0x1F00, "greek"), (0x2000, "other"), (0x2C60, "latin"), (0x2C80, "other")),
    *((0x2DE0, "cyrillic"), (0x2E00, "other"), (0x2E80, "han"), (0x2FE0, "other"), (0x3005, "han")),
    *((0x3008, "other"), (0x3040, "kana"), (0x3100, "other"), (0x3130, "hangul"), (0x3190, "other")),
    *((0x31F0, "kana"), (0x3200, "other"), (0x3400, "han"), (0x4DC0, "other"), (0x4E00, "han")),
    *((0xA000, "other"), (0xA640, "cyrillic"), (0xA6A0, "other"), (0xA720, "latin"), (0xA800, "other")),
    *((0xA8E0, "devanagari"), (0xA900, "other"), (0xA960, "hangul"), (0xA980, "other")),
    *((0xAB30, "latin"), (0xAB70, "other"), (0xAC00, "hangul"), (0xD800, "other"), (0xF900, "han")),
    *((0xFB00, "latin"), (0xFB13, "other"), (0xFB1D, "hebrew"), (0xFB50, "arabic"), (0xFE00, "other")),
    *((0xFE70, "arabic"), (0xFF00, "other"), (0xFF21, "latin"), (0xFF5B, "other"), (0xFF66, "kana")),
    *((0xFFA0, "hangul"), (0xFFE0, "other"), (0x1B000, "kana"), (0x1B170, "other"), (0x20000, "han")),
    (0x32000, "other"),
)
_STARTS = [start for start, _ in _RANGES]
_LETTER = re.compile(r"[A-Za-z]")
SAMPLE = 400

# UTF-8 that was read as Latin-1 or CP1252: the first byte of a sequence, then what the others became.
# Some became punctuation that may follow a letter in honest text: `MAÇÃ…`, `café…»`. So a capital
# before it, or a sequence that stands alone, is no proof.
_SIGNS = "\u0080-\u00bf€‚ƒ„†‡ˆ‰Š‹ŒŽ‘•˜™š›œžŸ"
_CONTINUED = _SIGNS + "…’“”–—"
_MOJIBAKE = re.compile(
    rf"[\u00c2-\u00f0](?:(?<=[ÂÃ])[{_SIGNS}]|(?<=(?<![A-ZÀ-Þ])Ã)[…’“”–—]"
    rf"|(?<=[\u00c4-\u00df])[{_CONTINUED}][\u00c4-\u00df][{_CONTINUED}]"
    rf"|(?<=â)[{_SIGNS}”–][{_CONTINUED}]"
    rf"|(?<=[à-ï])[{_CONTINUED}]{{2}}[à-ï][{_CONTINUED}]{{2}}"
    rf"|(?<=ð)[{_SIGNS}][{_CONTINUED}]{{2}})"
)
# Tabulators, line ends, form feeds and the escapes of terminals are honest.
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\x0c\x1b"))
MANY_CONTROLS = 4


def main_script(text: str) -> str:
    """The script of most letters, by a sample spread over the text; `none` if it holds no letters.

    Japanese is written in kana and ideographs: kana beyond a fifth decide.
    """
    if text.isascii():
        return "latin" if _LETTER.search(text) else "none"
    sample = text if len(text) <= SAMPLE else text[:: -(-len(text) // SAMPLE)]
    counts = Counter(_name_script(letter) for letter in sample if letter.isalpha())
    if not counts:
        # The sample may have stepped over the few letters that there are.
        letter = next((sign for sign in text if sign.isalpha()), None)
        return "none" if letter is None else _name_script(letter)
    eastern = counts["kana"] + counts["han"]
    if 0 < eastern <= counts["kana"] * 5 and 2 * eastern >= counts.total():
        return "kana"
    return counts.most_common(1)[0][0]


def find_garble(text: str) -> str | None:
    """The first sign that characters were lost or misread, in words; None if there is none."""
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) - len(raw.translate(None, _CONTROLS)) >= MANY_CONTROLS:
        return "many control characters"
    if text.isascii():
        return None
    if "\ufffd" in text:
        return "characters that could not be decoded (U+FFFD)"
    if "ï»¿" in text:
        return "a byte-order mark read as letters"
    if _MOJIBAKE.search(text):
        return "UTF-8 that was read as Latin-1"
    return None


def _name_script(letter: str) -> str:
    return _RANGES[bisect_right(_STARTS, ord(letter)) - 1][1]
