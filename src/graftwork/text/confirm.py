"""Whether a value that has the form of a secret is one: checksums, randomness, digits.

In: the value alone. Out: yes or no. Does not know where the value stood.
"""

import base64
import binascii
import math
import re
from collections import Counter

_EXPRESSION = re.compile(r"\$?\{?[A-Za-z_]\w*(?:[.:\-][A-Za-z_]\w*)+\}?|\$\w+|%\w+%")

_WORDS_FOR_PASSWORD = frozenset(
    ("password", "passwd", "pass", "pwd", "secret", "token", "api_key", "apikey", "api-key", "your_password")
)


def always(_value: str) -> bool:
    return True


def entropy(value: str) -> float:
    """Bits a character, by the frequencies in the value itself."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def looks_random(value: str) -> bool:
    """A token and not a word: letters and digits mixed, and few repetitions."""
    has_letter = any(c.isalpha() for c in value)
    has_digit = any(c.isdigit() for c in value)
    return has_letter and has_digit and entropy(value) >= 3.0


def looks_drawn(value: str) -> bool:
    """Few repetitions and capitals or digits: enough where the form is certain, since one may lack digits."""
    return entropy(value) >= 3.0 and not value.islower()


def looks_like_login(value: str) -> bool:
    """What stands behind `Authorization: Basic`: a name and a password in base64."""
    if looks_random(value):
        return True
    plain = value.rstrip("=")
    try:
        return b":" in base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_")
    except binascii.Error:
        return False


def is_no_word_for_password(value: str) -> bool:
    """Whether somebody's password stands there, and not the word for it, a variable or stars."""
    return bool(value.strip("*.xX%")) and value.casefold() not in _WORDS_FOR_PASSWORD


def looks_like_password(value: str) -> bool:
    """Random enough for `password = ...`, and no expression such as `settings.key_v2` or `get(x)`."""
    if _EXPRESSION.fullmatch(value) or "://" in value:
        return False
    kinds = sum(
        (
            any(c.islower() for c in value),
            any(c.isupper() for c in value),
            any(c.isdigit() for c in value),
            any(not c.isalnum() for c in value),
        )
    )
    return (
        kinds >= 2 and any(c.isalpha() for c in value) and _has_digit_or_sign(value) and entropy(value) >= 2.5
    )


def _has_digit_or_sign(value: str) -> bool:
    # Snake case and hyphens make identifiers, not passwords.
    return any(c.isdigit() for c in value) or any(c in "!@#$%^&*+/=?~" for c in value)


def passes_luhn(value: str) -> bool:
    digits = [int(c) for c in value if c.isdigit()]
    # 2 to 6 begin the card networks; a clock in milliseconds begins with 1, an ISBN with 9.
    if not 13 <= len(digits) <= 19 or digits[0] not in (2, 3, 4, 5, 6) or len(set(digits)) < 2:
        return False
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def passes_iban(value: str) -> bool:
    compact = value.replace(" ", "").upper()
    if not 15 <= len(compact) <= 34:
        return False
    turned = compact[4:] + compact[:4]
    return int("".join(str(int(c, 36)) for c in turned)) % 97 == 1


def has_phone_digits(value: str) -> bool:
    digits = [c for c in value if c.isdigit()]
    return 8 <= len(digits) <= 15 and len(set(digits)) > 2


def has_token_parts(value: str) -> bool:
    """A JSON web token has three parts; the first holds `eyJ` and at least eight characters more."""
    return value.find(".") >= 11


def is_no_git_address(value: str) -> bool:
    return not value.casefold().startswith("git@")
