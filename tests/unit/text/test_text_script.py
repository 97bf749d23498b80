import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.shape import find_garble, main_script

HONEST = [
    "Plain words.\nA second line\twith a tabulator.\r\n", "Café, naïve, Ångström, Ærø, “quoted” – and so on…",
    "Она сказала: «Привет»", "O CORAÇÃO E A MAÇÃ… NÃO", "«Voilà…» dit-elle au café…»", "日本語のテキスト",
    "MAÇÃ” – ÎLE", "\x1b[31mred\x1b[0m in a terminal", "Größe: 5 µm, 20 °C, ß»", "✅ done 🎉",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("", "none"),
        ("12:30 — 15%", "none"),
        ("hello", "latin"),
        ("Xin chào, tôi tên là Đặng", "latin"),
        ("Привет, мир", "cyrillic"),
        ("你好，世界", "han"),
        ("مرحبا بالعالم", "arabic"),
        ("नमस्ते दुनिया", "devanagari"),
        ("これは日本語の文章です", "kana"),
        ("안녕하세요 세계", "hangul"),
        ("Καλημέρα κόσμε", "greek"),
        ("שלום עולם", "hebrew"),
        ("สวัสดีชาวโลก", "thai"),
        ("გამარჯობა", "other"),
        ("An English text that names 北京 once.", "latin"),
        (" " * 5000 + "я" + " " * 5000, "cyrillic"),
    ],
)
def test_the_main_script_is_named(text, script):
    assert main_script(text) == script


@pytest.mark.parametrize("text", HONEST)
def test_honest_text_is_not_called_garbled(text):
    assert find_garble(text) is None


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text", ["José è più", "don’t", "“so”", "Über Öl", "Привет мир", "20 °C", "x → y", "🎉"]
)
def test_text_read_in_the_wrong_encoding_is_found(text, encoding):
    raw = text.encode()
    if encoding == "cp1252":
        spoiled = "".join(bytes([b]).decode("cp1252", errors="ignore") or chr(b) for b in raw)
    else:
        spoiled = raw.decode(encoding)
    assert find_garble(f"It says: {spoiled}.")


@pytest.mark.parametrize(
    "text", ["lost \ufffd here", "ï»¿{}", "\x00\x01\x02\x03 binary", "é\x00\x00\x00\x00"]
)
def test_lost_characters_marks_and_binary_are_found(text):
    assert find_garble(text)


@given(st.text(max_size=200))
def test_any_text_can_be_checked(text):
    assert main_script(text)
    find_garble(text)


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_ascii_is_never_garbled(text):
    assert find_garble(text) is None
