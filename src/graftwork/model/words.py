"""Text to tokens word by word, for tokenizers that never merge across words.

In: text. Out: its token ids as 32-bit integers in bytes, or None where the tokenizer itself must be
asked. Knows nothing of templates.

A byte-level BPE tokenizer cuts text into words by a pattern and encodes each word for itself. For
the known patterns the same cut is made here by `re`, and each word is encoded by the real tokenizer
once and remembered. A word is remembered only if its tokens decode to the word; so the tokens of a
text decode to the text by construction.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from graftwork.model.alphabet import ASCII, Alphabet, uncertain, wide

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The patterns in the tokenizers' own spelling, with a letter in angle brackets for each set of
# characters: L(etters), U(pper), l(ower), N(umbers), S(paces).
_CONTRACTED = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = "[<S>]+(?![^<S>])|[<S>]+"
GPT2 = f"{_CONTRACTED}| ?[<L>]+| ?[<N>]+| ?[^<S><L><N>]+|{_SPACES}"
# Digits are cut out first, so that for the rest the text ends where a digit stands.
_ONE_DIGIT = f"[<N>]|{_CONTRACTED}| ?[<L>]+| ?[^<S><L><N>]+|[<S>]+(?![^<S><N>])|[<S>]+"
_DIGITS = _ONE_DIGIT.replace("[<N>]|", "[<N>]+|", 1)
_QWEN = rf"(?i:{_CONTRACTED})|[^\r\n<L><N>]?[<L>]+|[<N>]| ?[^<S><L><N>]+[\r\n]*|[<S>]*[\r\n]+|{_SPACES}"
_LLAMA = _QWEN.replace("[<N>]|", "[<N>]{1,3}|", 1)
_O200K = (
    rf"[^\r\n<L><N>]?[<U>]*[<l>]+(?i:{_CONTRACTED})?|[^\r\n<L><N>]?[<U>]+[<l>]*(?i:{_CONTRACTED})?"
    rf"|[<N>]{{1,3}}| ?[^<S><L><N>]+[\r\n/]*|[<S>]*[\r\n]+|{_SPACES}"
)
SPLITS = {
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA,
    # Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": _QWEN,
    # gpt-oss, Phi 4
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": _O200K,
}
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
_NORMAL_FORMS: dict[str, NormalForm] = {"NFC": "NFC", "NFD": "NFD", "NFKC": "NFKC", "NFKD": "NFKD"}
"""Each leaves alone what is in that form already; ASCII is in all of them."""

PROBE_TEXTS = (
    "It's  he'LL we've'd  x\t\ty \n z  \n\n  tail   1 22 333 4444,55555 a1b22c  -- ((x)) \"q\"=='p'\r\n\r\n",
    "\tIf(x){\n    return 'don''t';\n}  //!!?\n <<|>> <|x|> end_of_line CamelCaseHTTPServer2x 7's I'M \r",
    "\x1c \x0b\x0c a\x00b \x7f\x1f  \x0b x\x1e1 ",
)
"""Every way in which the known patterns differ from each other, and then some."""
WIDE_PROBE_TEXTS = (
    "“Größe” – déjà\u00a0vu…  ½ ² Ⅷ ٣ x́y 植物12 と ǅ ʰ — it’s l'été\u2003\u2003 z\u3000 ok✓\u200d!\u2028 ",
    "🚀🚀 a🚀 1️⃣\u2028",
)
"""The same beyond ASCII."""


class WordPattern(NamedTuple):
    """How a tokenizer cuts text into words, and the normal forms that it first brings text into."""

    pattern: str
    forms: tuple[NormalForm, ...] = ()

    def compile(self, alphabet: Alphabet) -> Callable[[str], list[str]]:
        pattern = self.pattern
        for name, characters in zip("LUlNS", alphabet, strict=True):
            pattern = pattern.replace(f"<{name}>", characters)
        return re.compile(pattern).findall


def find_word_pattern(definition: dict[str, Any]) -> WordPattern | None:
    """The cut of a tokenizer (its JSON); None if it is of no known form."""
    model = definition["model"]
    plain_bpe = model.get("type") == "BPE" and not any(
        model.get(k) for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    decoder = definition.get("decoder") or {}
    forms = _find_forms(definition.get("normalizer"))
    if not plain_bpe or decoder.get("type") != "ByteLevel" or forms is None:
        return None
    pre = definition.get("pre_tokenizer") or {}
    steps = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    pattern = _find_pattern(steps[:-1], by_regex=steps[-1].get("use_regex", True))
    return WordPattern(pattern, forms) if pattern else None


def _find_pattern(steps: list[dict[str, Any]], *, by_regex: bool) -> str | None:
    match steps:
        case [] if by_regex:
            return GPT2
        case [{"type": "Digits", "individual_digits": bool(single)}] if by_regex:
            return _ONE_DIGIT if single else _DIGITS
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}
        ] if not by_regex:
            return SPLITS.get(regex)
    return None


def _find_forms(normalizer: dict[str, Any] | None) -> tuple[NormalForm, ...] | None:
    if normalizer is None:
        return ()
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    forms = [_NORMAL_FORMS.get(step.get("type", "")) for step in steps]
    return tuple(form for form in forms if form) if None not in forms else None


class WordTokenizer:
    """Remembers the tokens of words. The memory is bounded, and what is remembered is proven."""

    LIMIT = 1 << 17
    LONGEST = 48

    def __init__(self, tokenizer: "Tokenizer", *, cut: WordPattern) -> None:
        self._tokenizer = tokenizer
        self._rule = cut
        self._cut_ascii = cut.compile(ASCII)
        self._known: dict[str, bytes] = {}
        self._lost: set[str] = set()

    def encode(self, texts: Sequence[str]) -> list[bytes | None]:
        """Tokens of each text that is cut with certainty and survives the tokenizer; None for the others."""
        cuts = [self._cut(text) for text in texts]
        unknown: set[str] = set()
        for cut in cuts:
            unknown.update(cut or ())
        unknown.difference_update(self._known)
        self._learn(unknown - self._lost)
        results = [self._join(text, cut) for text, cut in zip(texts, cuts, strict=True)]
        self._forget(unknown)
        return results

    def _cut(self, text: str) -> list[str] | None:
        if text.isascii():
            return self._cut_ascii(text)
        if uncertain().search(text):
            return None
        if not all(unicodedata.is_normalized(form, text) for form in self._rule.forms):
            return None
        return self._cut_wide(text)

    @cached_property
    def _cut_wide(self) -> Callable[[str], list[str]]:
        return self._rule.compile(wide())

    def _join(self, text: str, cut: list[str] | None) -> bytes | None:
        if cut is None or "".join(cut) != text:
            return None
        try:
            return b"".join(map(self._known.__getitem__, cut))
        except KeyError:  # a word whose tokens do not decode to it
            return None

    def _learn(self, unknown: set[str]) -> None:
        # A word must be one word for the tokenizer too when it stands alone.
        words = [word for word in unknown if self._cut(word) == [word]]
        encoded = [e.ids for e in self._tokenizer.encode_batch_fast(words, add_special_tokens=False)]
        decoded = self._tokenizer.decode_batch(encoded, skip_special_tokens=False)
        for word, ids, back in zip(words, encoded, decoded, strict=True):
            if back == word:
                self._known[word] = array("i", ids).tobytes()
        self._lost.update(word for word in unknown if word not in self._known)

    def _forget(self, learned: set[str]) -> None:
        """Long words hardly come back, and a full memory is begun anew."""
        for word in learned:
            if len(word) > self.LONGEST:
                self._known.pop(word, None)
        if len(self._known) > self.LIMIT:
            self._known.clear()
        if len(self._lost) > self.LIMIT:
            self._lost.clear()
