"""Plain text to tokens, in batches, with proof of what survives.

In: texts, as they stand between control tokens. Out: their tokens as 32-bit integers in bytes, and
which of them do not decode to themselves. Knows nothing of templates.

Each of three ways falls back on the next: a text that was encoded lately, words that are known
(`Words`), the tokenizer itself. The second way is checked against the third: on a nasty text at the
start, on the first texts, and on one of a thousand after that; where they ever differ it is left
for good.
"""

import re
from array import array
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.model.words import PROBE_TEXTS, WIDE_PROBE_TEXTS, WordTokenizer, find_word_pattern

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class EncodedTexts(NamedTuple):
    """Tokens by text; `lost` are those texts, of the ones to prove, that do not survive."""

    tokens: dict[str, bytes]
    lost: set[str]


class TextEncoder:
    """The tokenizer, as it sees text in which nothing is a control token."""

    CHECKED_FIRST = 64
    CHECKED_EVERY = 1000
    RECENT_CHARACTERS = 1 << 22

    def __init__(self, tokenizer: "Tokenizer", definition: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        cut = find_word_pattern(definition)
        self._words = WordTokenizer(tokenizer, cut=cut) if cut else None
        self._named = _find_named(definition)
        self._seen = 0
        self._recent: dict[str, bytes] = {}
        self._recent_before: dict[str, bytes] = {}
        self._recent_size = 0
        # Some decoders take one space off the beginning of whatever they decode.
        self._drops_space = self._decode([self._encode([" a"])[0]]) == ["a"]
        if self._words:
            self._checked(list(PROBE_TEXTS), self._by_words(list(PROBE_TEXTS)))
        self._is_wide = False

    @property
    def goes_by_words(self) -> bool:
        return self._words is not None

    def encode(self, texts: Iterable[str], *, prove: Collection[str] = ()) -> EncodedTexts:
        """Encode all; for the texts in `prove`, also find the ones that do not survive."""
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
            if self._words:
                self._checked(list(WIDE_PROBE_TEXTS), self._by_words(list(WIDE_PROBE_TEXTS)))
        by_words = self._checked(fresh, self._by_words(fresh)) if self._words else [None] * len(fresh)
        proven = {text for text, ids in zip(fresh, by_words, strict=True) if ids is not None}
        rest = [text for text in fresh if text not in proven]
        tokens.update((text, ids) for text, ids in zip(fresh, by_words, strict=True) if ids is not None)
        tokens.update(zip(rest, self._encode(rest), strict=True))
        for text in fresh:
            self._remember(text, tokens[text])
        return EncodedTexts(tokens, self._find_lost([text for text in prove if text not in proven], tokens))

    def encode_for_real(self, texts: Iterable[str], *, prove: Collection[str] = ()) -> EncodedTexts:
        """The same by the tokenizer alone: what every quicker way is measured by."""
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
        assert self._words is not None
        if not self._named.ids:
            return self._words.encode(texts)
        # A named token is a hard boundary inside plain text, as control tokens are around it.
        cuts = [self._named.pattern.split(text) for text in texts]
        coded = iter(self._words.encode([piece for cut in cuts for piece in cut[::2]]))
        results: list[bytes | None] = []
        for cut in cuts:
            pieces = [self._named.ids[piece] if place % 2 else next(coded) for place, piece in enumerate(cut)]
            known = [piece for piece in pieces if piece is not None]
            results.append(b"".join(known) if len(known) == len(pieces) else None)
        return results

    def _checked(self, texts: list[str], by_words: list[bytes | None]) -> list[bytes | None]:
        """The same, or nothing at all if the tokenizer says otherwise for one of a sample."""
        sample = []
        for place in range(len(texts)):
            number = self._seen + place
            if number < self.CHECKED_FIRST or number % self.CHECKED_EVERY == 0:
                sample.append(place)
        self._seen += len(texts)
        if not sample:
            return by_words
        truth = self._encode([texts[place] for place in sample])
        if all(by_words[place] in (None, ids) for place, ids in zip(sample, truth, strict=True)):
            return by_words
        self._words = None
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
        """Two generations: what was not asked for while the younger one filled up is forgotten."""
        self._recent[text] = ids
        self._recent_size += len(text)
        if self._recent_size > self.RECENT_CHARACTERS:
            self._recent_before, self._recent = self._recent, {}
            self._recent_size = 0


class _Named(NamedTuple):
    """Tokens that have a name but are no control tokens (`<tool_call>`): the tokenizer finds them in text."""

    ids: dict[str, bytes | None]
    pattern: re.Pattern[str]


def _find_named(definition: dict[str, Any]) -> _Named:
    """Those that take the space beside them along, or only match whole words, are left to the tokenizer."""
    ids: dict[str, bytes | None] = {}
    for token in definition["added_tokens"]:
        if token["content"] and not token["special"]:
            greedy = token["lstrip"] or token["rstrip"] or token["single_word"]
            ids[token["content"]] = None if greedy else array("i", [token["id"]]).tobytes()
    longest_first = sorted(ids, key=len, reverse=True)
    return _Named(ids, re.compile("(" + "|".join(map(re.escape, longest_first)) + ")"))
