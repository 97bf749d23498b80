"""What secrets and personal data look like: one pattern a kind, with the check that confirms it.

In: nothing. Out: the table that `redact` works through, in order: long and certain forms first, so
that a token inside an assignment is named for what it is. Patterns are specific: an entropy search
over all words mistakes prose, hashes and identifiers for secrets.

To add a kind: append a `Pattern` whose regular expression names the group `value`; give literals
(in lower case) of which one must stand in the text, and a check where the form alone proves little.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


def always(_value: str) -> bool:
    return True


@dataclass(frozen=True)
class Pattern:
    kind: str
    regex: re.Pattern[str]
    secret: bool = True
    hints: tuple[str, ...] = ()
    check: Callable[[str], bool] = always


def entropy(value: str) -> float:
    """Bits a character, by the frequencies in the value itself."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def looks_random(value: str) -> bool:
    """A token and not a word: letters and digits mixed, and few repetitions."""
    has_letter = any(c.isalpha() for c in value)
    has_digit = any(c.isdigit() for c in value)
    return has_letter and has_digit and entropy(value) >= 3.0


def looks_like_password(value: str) -> bool:
    """Random enough for `password = ...`, and no expression such as `settings.key_v2` or `get(x)`."""
    if re.fullmatch(r"\$?\{?[A-Za-z_]\w*(?:[.:\-][A-Za-z_]\w*)+\}?|\$\w+|%\w+%", value):
        return False
    if "://" in value:
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


def is_no_git_address(value: str) -> bool:
    return not value.casefold().startswith("git@")


_PEM = (
    r"(?P<value>-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z))"
)
_NAMES = (
    r"pass(?:word|wd|phrase)|pwd|secret|token|credential|api[_-]?key|access[_-]?key|auth[_-]?key"
    r"|private[_-]?key|encryption[_-]?key|signing[_-]?key"
)
_ASSIGNMENT = (
    rf"(?i)(?<![A-Za-z0-9])[\w-]{{0,40}}?(?:{_NAMES})[\w-]{{0,40}}"
    r"""(?:\\?["'])?\s{0,3}(?::=|=>|[:=]|\bis\b)\s{0,3}(?:\\?["'`])?(?P<value>[^\s"'`,;<>()\[\]{}\\]{8,200})"""
)
_DOTTED = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}"

PATTERNS: tuple[Pattern, ...] = (
    Pattern("private_key", re.compile(_PEM, re.DOTALL), hints=("-----begin",)),
    Pattern(
        "jwt",
        re.compile(r"(?P<value>\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"),
        hints=("eyj",),
    ),
    Pattern(
        "openai_key",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>sk-[A-Za-z0-9_-]{16,})"),
        hints=("sk-",),
        check=looks_random,
    ),
    Pattern(
        "aws_access_key",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>(?:AKIA|ASIA)[A-Z0-9]{16})(?![A-Za-z0-9])"),
        hints=("akia", "asia"),
    ),
    Pattern(
        "aws_secret_key",
        re.compile(
            r"""(?i)aws.{0,20}?(?:secret|key).{0,20}?[:=]\s{0,3}(?:\\?["'])?(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"""
        ),
        hints=("aws",),
        check=looks_random,
    ),
    Pattern(
        "github_token",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
        hints=("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    Pattern(
        "gitlab_token",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>glpat-[A-Za-z0-9_-]{20,})"),
        hints=("glpat-",),
    ),
    Pattern(
        "slack_token",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>xox[abeprs]-[A-Za-z0-9-]{10,})"),
        hints=("xox",),
        check=looks_random,
    ),
    Pattern(
        "google_key",
        re.compile(r"(?<![A-Za-z0-9_-])(?P<value>AIza[A-Za-z0-9_-]{35})"),
        hints=("aiza",),
    ),
    Pattern(
        "stripe_key",
        re.compile(r"(?<![A-Za-z0-9])(?P<value>[rs]k_(?:live|test)_[A-Za-z0-9]{16,})"),
        hints=("k_live_", "k_test_"),
    ),
    Pattern(
        "huggingface_token",
        re.compile(r"(?<![A-Za-z0-9_])(?P<value>hf_[A-Za-z0-9]{30,})"),
        hints=("hf_",),
    ),
    Pattern(
        "bearer_token",
        re.compile(r"(?i)\bbearer\s{1,3}(?P<value>[A-Za-z0-9._~+/-]{16,}={0,2})"),
        hints=("bearer",),
        check=looks_random,
    ),
    Pattern(
        "url_password",
        re.compile(r"(?i)\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\"'<>]{0,80}:(?P<value>[^\s/@\"'<>{}$]{1,200})@"),
        hints=("://",),
    ),
    Pattern(
        "password",
        re.compile(_ASSIGNMENT),
        hints=("pass", "pwd", "secret", "token", "credential", "key"),
        check=looks_like_password,
    ),
    Pattern(
        "email",
        re.compile(rf"(?<![A-Za-z0-9._%+-])(?P<value>[A-Za-z0-9._%+-]{{1,64}}@{_DOTTED})(?![A-Za-z0-9])"),
        secret=False,
        hints=("@",),
        check=is_no_git_address,
    ),
    Pattern(
        "iban",
        re.compile(
            r"(?<![A-Za-z0-9])(?P<value>[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?)"
            r"(?![A-Za-z0-9])"
        ),
        secret=False,
        check=passes_iban,
    ),
    Pattern(
        "credit_card",
        re.compile(r"(?<![\w.+-])(?P<value>\d(?:[ -]?\d){12,18})(?![\w-])"),
        secret=False,
        check=passes_luhn,
    ),
    Pattern(
        "phone",
        re.compile(
            r"(?<![\w.,+-])(?P<value>"
            r"(?:\+|00)[1-9]\d{0,2}[ .-]?(?:\(0?\d{1,4}\)[ .-]?)?\d{1,5}(?:[ ./-]?\d{2,5}){1,4}"
            r"|(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}"
            r"|0\d{2,4}[ /-]\d{3,8}(?:[ -]\d{1,5})?"
            r")(?![\w-])"
        ),
        secret=False,
        check=has_phone_digits,
    ),
)
