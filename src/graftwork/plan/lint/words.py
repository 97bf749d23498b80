"""Small words that the rules share. Pure."""

SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"
"""Letters whose name begins with a vowel: an RTX, an A100, a T4."""


def a(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name[:1].upper() in SPOKEN_WITH_A_VOWEL else 'a'} {name}"
