import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.words import last_lines, normalize, words

UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def words_in_full(text):
    """What `words` promises, in one line and without its short ways."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+", folded)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World_wide 2x", ["hello", "world", "wide", "2x"]),
        ("don’t — “stop”…", ["don", "t", "stop"]),
        ("Ｆｕｌｌ ｗｉｄｔｈ", ["full", "width"]),
        ("STRASSE Straße", ["strasse", "strasse"]),
        ("cafe\u0301 café", ["café", "café"]),
        ("Brand™ ½ ①", ["brandtm", "1", "2", "1"]),
        ("done ✅ now\u00a0and", ["done", "now", "and"]),
        ("東京 tower", ["東", "京", "tower"]),
        ("", []),
        ("\x00\x1f-_-", []),
    ],
)
def test_words_are_folded_and_parted(text, expected):
    assert words(text) == expected
    assert normalize(text) == " ".join(expected)


ODD = st.sampled_from("aZ0_ -.’“–…✅™½①é\u0301\u0338\u00a0\ufe0f´ßſıİKﬁ東カﾊ한٣<=\ud800\u200d\u20dd")


@given(st.text(max_size=80) | st.lists(ODD, max_size=20).map("".join))
def test_the_short_ways_find_the_same_words(text):
    assert words(text) == words_in_full(text)


@given(st.text(max_size=80))
def test_normalising_twice_changes_nothing_in_ascii(text):
    plain = text.encode("ascii", "ignore").decode()
    assert normalize(normalize(plain)) == normalize(plain)


def test_last_lines_come_from_the_end_without_blank_ones():
    assert last_lines("one\n\n  two  \n \n") == ["two", "one"]
