"""Texts to tokens, many times as fast as the tokenizer alone: words are cut here, their tokens remembered.

Input: texts without control tokens. Output: their tokens, proven on samples to be the tokenizer's. A pattern
cuts text into words by sets of letters, digits and spaces: for ASCII, and wide ones for all characters on
which every version of Unicode agrees (what has been of one kind since version 3.2, and emoji, which no
version has ever counted as letters or digits). Text with any other character (`uncertain`) is left to the
tokenizer.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Alphabet(NamedTuple):
    """Character sets, as written between the brackets of a pattern."""

    letters: str
    upper: str
    lower: str
    digits: str
    spaces: str


ASCII = Alphabet(letters="A-Za-z", upper="A-Z", lower="a-z", digits="0-9", spaces=r"\t-\r ")
_EMOJI = range(0x1F300, 0x1FB00)
_SPACE_CODES = {0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
_FOLDED_TO_ASCII = {0x17F, 0x212A}
"""The long s and the Kelvin sign: equal to s and k if case is ignored, but not everywhere."""


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
        spaces=ASCII.spaces + _as_set(_SPACE_CODES),
    )


@cache
def uncertain() -> re.Pattern[str]:
    """Matches a character on whose kind tokenizers may not agree with this Python."""
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
        and (kind in ("Zs", "Zl", "Zp")) <= (code in _SPACE_CODES or code == 0x20)
    )


def _as_set(codes: Iterable[int]) -> str:
    """Write neighbors as ranges."""
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


# The patterns in the tokenizers' own spelling, with a letter in angle brackets for each set of
# characters: L(etters), U(pper), l(ower), N(umbers), S(paces).
_CONTRACTED = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = "[<S>]+(?![^<S>])|[<S>]+"
GPT2 = f"{_CONTRACTED}| ?[<L>]+| ?[<N>]+| ?[^<S><L><N>]+|{_SPACES}"
# Digits are cut out first, so that the rest of the text ends at each digit.
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
"""Normal forms, each of which leaves text in that form unchanged; ASCII is in all of them."""

PROBE_TEXTS = (
    "It's  he'LL we've'd  x\t\ty \n z  \n\n  tail   1 22 333 4444,55555 a1b22c  -- ((x)) \"q\"=='p'\r\n\r\n",
    "\tIf(x){\n    return 'don''t';\n}  //!!?\n <<|>> <|x|> end_of_line CamelCaseHTTPServer2x 7's I'M \r",
    "\x1c \x0b\x0c a\x00b \x7f\x1f  \x0b x\x1e1 ",
)
"""Texts that distinguish all known patterns, with some margin."""
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
    """Return the word pattern of a tokenizer (its JSON); None if its form is unknown."""
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
    """Caches the tokens of words. The memory is bounded, and what is cached is verified."""

    LIMIT = 1 << 17
    LONGEST = 48

    def __init__(self, tokenizer: "Tokenizer", *, cut: WordPattern) -> None:
        self._tokenizer = tokenizer
        self._rule = cut
        self._cut_ascii = cut.compile(ASCII)
        self._tokens: dict[str, bytes] = {}
        self._lost: set[str] = set()

    def encode(self, texts: Sequence[str]) -> list[bytes | None]:
        """Return the tokens of each text whose split is certain and which survives the tokenizer; None for
        the others.
        """
        cuts = [self._cut(text) for text in texts]
        unknown: set[str] = set()
        for cut in cuts:
            unknown.update(cut or ())
        unknown.difference_update(self._tokens)
        # A word on its own must be one word for the tokenizer too.
        provable = [word for word in unknown - self._lost if self._cut(word) == [word]]
        encoded = [e.ids for e in self._tokenizer.encode_batch_fast(provable, add_special_tokens=False)]
        decoded = self._tokenizer.decode_batch(encoded, skip_special_tokens=False)
        for word, ids, back in zip(provable, encoded, decoded, strict=True):
            if back == word:
                self._tokens[word] = array("i", ids).tobytes()
        self._lost.update(word for word in unknown if word not in self._tokens)
        results = [self._join(text, cut) for text, cut in zip(texts, cuts, strict=True)]
        # Long words rarely repeat, and a full cache is cleared.
        for word in unknown:
            if len(word) > self.LONGEST:
                self._tokens.pop(word, None)
        if len(self._tokens) > self.LIMIT:
            self._tokens.clear()
        if len(self._lost) > self.LIMIT:
            self._lost.clear()
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
            return b"".join(map(self._tokens.__getitem__, cut))
        except KeyError:  # a word whose tokens do not decode to it
            return None


class EncodedTexts(NamedTuple):
    """Tokens by text; `lost` are those texts, of the ones to check, that do not survive."""

    tokens: dict[str, bytes]
    lost: set[str]


class TextEncoder:
    """The tokenizer for text in which nothing is a control token."""

    CHECKED_FIRST = 64
    CHECKED_EVERY = 1000
    RECENT_CHARACTERS = 1 << 22

    def __init__(self, tokenizer: "Tokenizer", definition: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        cut = find_word_pattern(definition)
        self._word_tokenizer = WordTokenizer(tokenizer, cut=cut) if cut else None
        # Tokens with a name that are not control tokens (`<tool_call>`): the tokenizer finds them in text.
        # Those that strip adjacent spaces or match only whole words are left to it.
        self._named_tokens: dict[str, bytes | None] = {}
        for token in definition["added_tokens"]:
            if token["content"] and not token["special"]:
                greedy = token["lstrip"] or token["rstrip"] or token["single_word"]
                ids = None if greedy else array("i", [token["id"]]).tobytes()
                self._named_tokens[token["content"]] = ids
        longest_first = sorted(self._named_tokens, key=len, reverse=True)
        self._cut_named = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split
        self._encoded_count = 0
        self._recent: dict[str, bytes] = {}
        self._recent_before: dict[str, bytes] = {}
        self._recent_size = 0
        # Some decoders take one space off the beginning of whatever they decode.
        self._drops_space = self._decode([self._encode([" a"])[0]]) == ["a"]
        if self._word_tokenizer:
            self._checked(list(PROBE_TEXTS), self._by_words(list(PROBE_TEXTS)))
        self._is_wide = False

    @property
    def goes_by_words(self) -> bool:
        return self._word_tokenizer is not None

    def encode(self, texts: Iterable[str], *, prove: Collection[str] = ()) -> EncodedTexts:
        """Encode all; for the texts in `prove`, also find those that do not survive."""
        tokens: dict[str, bytes] = {}
        new: dict[str, None] = {}
        for text in texts:
            if text in self._recent:
                tokens[text] = self._recent[text]
            elif text in self._recent_before:
                tokens[text] = self._recent_before[text]
                self._remember(text, tokens[text])
            else:
                new[text] = None
        fresh = list(new)
        if not self._is_wide and not all(map(str.isascii, fresh)):
            self._is_wide = True
            if self._word_tokenizer:
                self._checked(list(WIDE_PROBE_TEXTS), self._by_words(list(WIDE_PROBE_TEXTS)))
        by_words = (
            self._checked(fresh, self._by_words(fresh)) if self._word_tokenizer else [None] * len(fresh)
        )
        proven = {text for text, ids in zip(fresh, by_words, strict=True) if ids is not None}
        unproven = [text for text in fresh if text not in proven]
        tokens.update((text, ids) for text, ids in zip(fresh, by_words, strict=True) if ids is not None)
        tokens.update(zip(unproven, self._encode(unproven), strict=True))
        for text in fresh:
            self._remember(text, tokens[text])
        return EncodedTexts(tokens, self._find_lost([text for text in prove if text not in proven], tokens))

    def encode_for_real(self, texts: Iterable[str], *, prove: Collection[str] = ()) -> EncodedTexts:
        """The same by the tokenizer alone: the reference for every faster way."""
        unique = list(dict.fromkeys(texts))
        tokens = dict(zip(unique, self._encode(unique), strict=True))
        return EncodedTexts(tokens, self._find_lost(prove, tokens))

    def _find_lost(self, texts: Collection[str], tokens: dict[str, bytes]) -> set[str]:
        decoded = self._decode([tokens[text] for text in texts])
        pairs = zip(texts, decoded, strict=True)
        return {
            text for text, back in pairs if back != text and not (self._drops_space and " " + back == text)
        }

    def _by_words(self, texts: list[str]) -> list[bytes | None]:
        assert self._word_tokenizer is not None
        if not self._named_tokens:
            return self._word_tokenizer.encode(texts)
        # A named token is a hard boundary inside plain text, as control tokens are around it.
        cuts = [self._cut_named(text) for text in texts]
        coded = iter(self._word_tokenizer.encode([piece for cut in cuts for piece in cut[::2]]))
        results: list[bytes | None] = []
        for cut in cuts:
            pieces = [
                self._named_tokens[piece] if index % 2 else next(coded) for index, piece in enumerate(cut)
            ]
            encoded = [piece for piece in pieces if piece is not None]
            results.append(b"".join(encoded) if len(encoded) == len(pieces) else None)
        return results

    def _checked(self, texts: list[str], by_words: list[bytes | None]) -> list[bytes | None]:
        """Return the same, or nothing if the tokenizer disagrees for one of a sample."""
        sample = []
        for index in range(len(texts)):
            number = self._encoded_count + index
            if number < self.CHECKED_FIRST or number % self.CHECKED_EVERY == 0:
                sample.append(index)
        self._encoded_count += len(texts)
        if not sample:
            return by_words
        truth = self._encode([texts[index] for index in sample])
        if all(by_words[index] in (None, ids) for index, ids in zip(sample, truth, strict=True)):
            return by_words
        self._word_tokenizer = None
        self._recent.clear()
        self._recent_before.clear()
        return [None] * len(texts)

    def _encode(self, texts: list[str]) -> list[bytes]:
        if not texts:
            return []
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _decode(self, tokens: list[bytes]) -> list[str]:
        if not tokens:
            return []
        ids = [list(memoryview(piece).cast("i")) for piece in tokens]
        decoded: list[str] = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        return decoded

    def _remember(self, text: str, ids: bytes) -> None:
        """Two generations: entries not used while the younger one filled up are evicted."""
        self._recent[text] = ids
        self._recent_size += len(text)
        if self._recent_size > self.RECENT_CHARACTERS:
            self._recent_before, self._recent = self._recent, {}
            self._recent_size = 0
