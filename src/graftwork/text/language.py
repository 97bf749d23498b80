"""The language that texts are mostly written in, by script and by the words that every sentence needs.

Input: texts. Output: a code of ISO 639-1, or None where nothing is clear. No model and no library.
"""

import re
from collections import Counter
from collections.abc import Iterable

FUNCTION_WORDS = {
    "en": "the and of to is that for with this are you not was have from what which can",
    "de": "der die das und ist nicht ein eine mit für den dem auf ich wir sie von zu wird",
    "fr": "le la les et est une des pour dans que qui pas vous nous sur avec du au",
    "es": "el los las y es una para con que por del no se como su está más",
    "it": "il gli e è una per con che non di del della sono come più nel questo",
    "pt": "os as e é uma para com que não por do da em você mais como são",
    "nl": "de het een en is niet van voor met dat op ik wij zijn wordt naar",
}
SCRIPTS = {
    "ru": r"[\u0400-\u04ff]",
    "ja": r"[\u3040-\u30ff]",
    "ko": r"[\uac00-\ud7af]",
    "zh": r"[\u4e00-\u9fff]",
    "ar": r"[\u0600-\u06ff]",
    "hi": r"[\u0900-\u097f]",
    "th": r"[\u0e00-\u0e7f]",
}
"""Japanese comes before Chinese: its texts have characters of both."""
MUCH = 0.2
"""Share of the letters in another script."""
FEWEST_WORDS = 20
FEWEST_DIFFERENT = 5
"""Function words that must occur: names in code are words of some language, too."""
CLEAR = 1.5
"""How many times as frequent as those of the next language."""
MOST_CHARACTERS = 4000


def guess_language(texts: Iterable[str]) -> str | None:
    """The language of most of the texts; None if it is not clear."""
    sample = " ".join(text[:MOST_CHARACTERS] for text in texts).lower()
    letters = len(re.findall(r"[^\W\d_]", sample))
    for code, pattern in SCRIPTS.items():
        if letters and len(re.findall(pattern, sample)) > MUCH * letters:
            return code
    words = Counter(re.findall(r"[^\W\d_]+", sample))
    counts = {
        code: sum(words[word] for word in listed.split()) / len(listed.split())
        for code, listed in FUNCTION_WORDS.items()
    }
    first, second = sorted(counts, key=lambda code: -counts[code])[:2]
    frequent = [words[word] for word in FUNCTION_WORDS[first].split() if words[word]]
    enough = sum(frequent) >= FEWEST_WORDS and len(frequent) >= FEWEST_DIFFERENT
    return first if enough and counts[first] >= CLEAR * counts[second] else None
