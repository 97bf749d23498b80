"""Patterns of secrets and personal data: one per kind, with the check that confirms it.

Input: a text. Output: the patterns worth trying on it, and the spans they find. The table is tried in order,
long and certain forms first. Patterns are specific: an entropy search over all words mistakes prose, hashes
and identifiers for secrets.

To add a kind, append a `Pattern` whose expression names the group `value` and begins with a literal, so that
it is searched for and not tried at every character. Put lookbehinds after the literal and allow the n of an
escaped line end before it: logs contain JSON in JSON. Give hints, and a check where the form by itself proves
little. Bound every repetition. A token with a service's prefix needs no pattern: see `detectors`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from graftwork.text.detectors import (
    QUOTE,
    RUNS,
    TextSpan,
    always,
    find_aws_secrets,
    find_cookies,
    find_curl_passwords,
    find_marked_tokens,
    find_minisign_keys,
    find_mysql_passwords,
    find_named_secrets,
    find_options,
    find_signatures,
    find_webhooks,
    has_phone_digits,
    has_token_parts,
    is_no_git_address,
    looks_drawn,
    looks_like_login,
    looks_like_password,
    looks_random,
    may_identify,
    passes_iban,
    passes_luhn,
)

_LOCAL_PART = re.compile(r"[A-Za-z0-9._%+-]{1,65}")
_LONGEST_LOCAL_PART = 64
_HOST = re.compile(r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])")

_TELEGRAM = re.compile(r":(?<=[0-9]{8}:)[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])")
_DISCORD = re.compile(r"\.(?<=[A-Za-z0-9_-]{20}\.)[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}(?![A-Za-z0-9_-])")
_DISCORD_START = re.compile(r"[MNO][A-Za-z0-9_-]{22,27}")
_LONGEST_DISCORD_START = 28
_TOKEN_END = re.compile(r"[A-Za-z0-9_-]{1,29}+\Z")

_LOGIN = re.compile(r"""://(?<=\w://)(?P<user>[^\s/:@"'<>]{0,200})(?::(?P<value>[^\s/@"'<>{}$]{1,200}))?@""")
_SHORTEST_TOKEN = 20

_NAMES = (
    r"pass(?:wor[dt]|wd|phrase)|kennwort|pwd|secret|token|credential|api[_-]?key|access[_-]?key|auth[_-]?key"
    r"|private[_-]?key|encryption[_-]?key|signing[_-]?key"
)
# A quote may be escaped several times: JSON in the arguments of a tool call in JSON.
_VALUE = r"""(?P<value>[^\s"'`,;<>()\[\]{}\\]{8,200})"""
_ASSIGNMENT = re.compile(
    rf"(?i:{_NAMES})[\w-]{{0,40}}(?:{QUOTE})?\s{{0,3}}(?::=|=>|[:=]|\b(?i:is|ist|lautet)\b)\s{{0,3}}(?:{QUOTE})?{_VALUE}"
)
_NAME = re.compile(rf"(?i:{_NAMES})")
# Stricter: `max_tokens` and `key_count` are numbers but no secrets.
_SECRET_NAME = re.compile(
    r"(?i:pass(?:wor[dt]|wd|phrase|code)|kennwort|\bpwd\b|secret|credential|api[_-]?key)"
)
# Headers whose whole value grants access.
_HEADER = re.compile(r"(?:^|[._-])(?:authorization|cookie)$", re.IGNORECASE | re.ASCII)
_WHOLE_VALUE = re.compile(_VALUE)
# Every name contains one of these.
_NAME_STARTS = ("passw", "passp", "kennwort", "pwd", "secret", "token", "credential")
_KEY_OWNERS = ("encryption", "signing", "private", "access", "auth", "api")

# Digits and separators that can be a phone number or the like: at least eight digits.
_DIGIT_RUNS = re.compile(r"[+(\d][\d ()./+-]{7,}+")
_ASCII_NUMBERS = re.compile(r"[+(0-9][0-9 ()./+-]{7,}+")
_CARD = re.compile(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?![\w-])")
# Areas 000, 666 and from 900 on were never issued, nor were groups and serials of zeros.
_SOCIAL = re.compile(r"(?<![\w.+-])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![\w-])")
# A number after a slash is a version, as in `Chrome/120.0.99.1`; after two, the host of a URL.
_ADDRESS = re.compile(r"(?:(?<![\w./+-])|(?<=//))[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w+-]|\.\d)")
_PHONE_ITSELF = (
    r"(?:(?:\+|00)[1-9]\d{0,2}[ .-]?(?:\(0?\d{1,4}\)[ .-]?)?\d{1,5}(?:[ ./-]?\d{2,5}){1,4}"
    # In North America, area and exchange codes begin with 2 to 9.
    r"|(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[-. ])[2-9]\d{2}[-. ]\d{4}"
    r"|0\d{2,4}[ /-]\d{3,8}(?:[ -]\d{1,5})?"
    r")(?![\w-])"
)
_PHONE = re.compile(rf"(?<![\w.,+-]){_PHONE_ITSELF}")
_PHONE_NEXT = re.compile(_PHONE_ITSELF)


def find_emails(text: str) -> Iterator[TextSpan]:
    done = 0
    for match in _HOST.finditer(text):
        at_sign = match.start()
        # One more than allowed: a longer run is not a local part, wherever it is cut.
        before = _LOCAL_PART.match(text[max(done, at_sign - _LONGEST_LOCAL_PART - 1) : at_sign][::-1])
        if before is None or before.end() > _LONGEST_LOCAL_PART:
            continue
        span = TextSpan(at_sign - before.end(), match.end())
        if is_no_git_address(text[span.start : span.end]):
            yield span
            done = span.end


def find_url_passwords(text: str) -> Iterator[TextSpan]:
    """Find passwords in URLs, and tokens in place of the user name as in `https://TOKEN@host`."""
    for match in _LOGIN.finditer(text):
        if len(match["user"]) >= _SHORTEST_TOKEN and looks_random(match["user"]):
            yield TextSpan(*match.span("user"))
        if match["value"] is not None:
            yield TextSpan(*match.span("value"))


def find_telegram_tokens(text: str) -> Iterator[TextSpan]:
    """Find eight to ten digits, a colon and 35 characters; in URLs `bot` precedes them."""
    for match in _TELEGRAM.finditer(text):
        start = match.start() - 8
        while start and match.start() - start < 11 and text[start - 1] in "0123456789":
            start -= 1
        if match.start() - start < 11 and looks_drawn(match.group()):
            yield TextSpan(start, match.end())


def find_discord_tokens(text: str) -> Iterator[TextSpan]:
    """Find three parts, the first an account number in base64, which begins with M, N or O."""
    done = 0
    for match in _DISCORD.finditer(text):
        before = text[max(done, match.start() - _LONGEST_DISCORD_START - 1) : match.start()]
        run = _TOKEN_END.search(before)
        if run and _DISCORD_START.fullmatch(run.group()) and looks_drawn(match.group()):
            yield TextSpan(match.start() - len(run.group()), match.end())
            done = match.end()


def find_passwords(text: str) -> Iterator[TextSpan]:
    r"""Find the values of `db_password: ...`, `"api_key\": \"...\"`, `the secret is ...` and similar."""
    assigned = (
        TextSpan(*match.span("value")) for match in _match_names(text) if looks_like_password(match["value"])
    )
    done = 0
    for span in sorted((*assigned, *find_options(text))):
        if span.start >= done:
            yield span
            done = span.end


def find_cards(text: str) -> Iterator[TextSpan]:
    for start, end in _find_numbers(text):
        for match in _CARD.finditer(text, start, end):
            if passes_luhn(match.group()):
                yield TextSpan(*match.span())


def find_social_security_numbers(text: str) -> Iterator[TextSpan]:
    for start, end in _find_numbers(text):
        for match in _SOCIAL.finditer(text, start, end):
            yield TextSpan(*match.span())


def find_addresses(text: str) -> Iterator[TextSpan]:
    """Find IP addresses (version 4) outside of private and reserved networks."""
    for start, end in _find_numbers(text):
        for match in _ADDRESS.finditer(text, start, end):
            before = text[max(0, match.start() - 9) : match.start()].casefold().rstrip()
            if may_identify(match.group()) and not before.endswith(("version", "release")):
                yield TextSpan(*match.span())


def find_phones(text: str) -> Iterator[TextSpan]:
    for start, end in _find_numbers(text):
        match = _PHONE.search(text, start, end)
        while match:
            confirmed = has_phone_digits(match.group())
            if confirmed:
                yield TextSpan(*match.span())
            # A number directly after another has a digit before it until that one is removed.
            after = _PHONE_NEXT.match(text, match.end(), end) if confirmed else None
            match = after or _PHONE.search(text, match.end(), end)


def is_password_under(name: str, value: str) -> bool:
    """Whether a value is a password, given the name of its field."""
    if _HEADER.search(name):
        return len(value) >= 8 and "<" not in value and any(c.isdigit() or c == "=" for c in value)
    return (
        _NAME.search(name) is not None
        and _WHOLE_VALUE.fullmatch(value) is not None
        and looks_like_password(value)
    )


@lru_cache(maxsize=4096)
def may_name_secret(name: str) -> bool:
    """Whether a field of this name may contain a password."""
    return _HEADER.search(name) is not None or _NAME.search(name) is not None


def is_secret_name(name: str) -> bool:
    """Whether any value of a field of this name is a secret, numbers included."""
    return "<REDACTED:" not in name and _SECRET_NAME.search(name) is not None


@lru_cache(maxsize=1)
def _find_numbers(text: str) -> tuple[TextSpan, ...]:
    """Find runs of digits and separators, each with the next character. Cached: several patterns use them."""
    numbers = (_ASCII_NUMBERS if text.isascii() else _DIGIT_RUNS).finditer(text)
    return tuple(TextSpan(number.start(), number.end() + 1) for number in numbers)


def _match_names(text: str) -> Iterator[re.Match[str]]:
    """Yield what `finditer` would, several times faster: literals are searched for first."""
    folded = text.lower()
    # Letters that an expression matches as i and s, and `lower` does not.
    if not text.isascii() and any(letter in text for letter in "İıſ"):
        yield from _ASSIGNMENT.finditer(text)
        return
    starts = sorted(
        {start for name in _NAME_STARTS for start in _find_all(folded, name)} | _find_keys(folded)
    )
    done = 0
    for start in starts:
        if start < done:
            continue
        match = _ASSIGNMENT.match(text, start)
        if match:
            done = match.end()
            yield match


def _find_keys(folded: str) -> set[int]:
    starts = set()
    for key in _find_all(folded, "key"):
        end = key - 1 if key and folded[key - 1] in "_-" else key
        for owner in _KEY_OWNERS:
            if folded.endswith(owner, 0, end):
                starts.add(end - len(owner))
    return starts


def _find_all(folded: str, literal: str) -> Iterator[int]:
    position = folded.find(literal)
    while position >= 0:
        yield position
        position = folded.find(literal, position + 1)


LONG = 15
VERY_LONG = 24
"""Characters. Prose has no run of LONG; identifiers seldom have one of VERY_LONG."""


@dataclass(frozen=True)
class Pattern:
    """`hints`: one of them occurs in every text with such a value.

    They are searched for as they are, or in lowercase if `any_case`. `run` is the least length of a run of
    letters, digits, hyphens and underscores in such a text: 0, LONG or VERY_LONG; without hints the pattern
    is tried on every text with that run. `digits` is a run of digits and capitals that must occur instead
    of a hint. `locate` finds the values where an expression would be slow.
    """

    kind: str
    regex: re.Pattern[str] | None = None
    secret: bool = True
    hints: tuple[bytes, ...] = ()
    any_case: bool = False
    run: int = 0
    digits: bytes = b""
    check: Callable[[str], bool] = always
    locate: Callable[[str], Iterable[TextSpan]] | None = None

    def find(self, text: str) -> Iterator[TextSpan]:
        """Yield the spans of confirmed values, from left to right."""
        if self.locate is not None:
            yield from self.locate(text)
        elif self.regex is not None:
            for match in self.regex.finditer(text):
                if self.check(match["value"]):
                    yield TextSpan(*match.span("value"))


_PEM = (
    r"(?P<value>-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z))"
)
# The first part alone matches too, and the check refuses it: otherwise every `eyJ` inside a long run would be
# read to its end again.
_JWT = (
    r"(?P<value>eyJ(?:(?<=\beyJ)|(?<=\\[nrt]eyJ))[A-Za-z0-9_-]*+"
    r"(?:\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+)?)"
)
_BASIC = (
    r"""authorization(?:\\{0,7}["'`])?\s{0,3}[:=]\s{0,3}(?:\\{0,7}["'`])?basic\s{1,3}"""
    r"""(?P<value>[a-z0-9+/_-]{6,}+={0,2})"""
)
_AZURE = r"""accountkey\s{0,3}[:=]\s{0,3}(?:\\{0,7}["'`])?(?P<value>[a-z0-9+/]{40,}+={0,2})"""

PATTERNS: tuple[Pattern, ...] = (
    Pattern("private_key", re.compile(_PEM, re.DOTALL), hints=(b"-----BEGIN",)),
    Pattern("jwt", re.compile(_JWT), hints=(b".eyJ",), check=has_token_parts),
    Pattern(
        "anthropic_key",
        re.compile(r"(?P<value>sk-ant-(?:(?<![A-Za-z0-9]sk-ant-)|(?<=\\[nrt]sk-ant-))[A-Za-z0-9_-]{16,})"),
        # A hint that patterns share is searched for once.
        hints=(b"sk-",),
        run=LONG,
        check=looks_random,
    ),
    Pattern(
        "openai_key",
        re.compile(r"(?P<value>sk-(?:(?<![A-Za-z0-9]sk-)|(?<=\\[nrt]sk-))[A-Za-z0-9_-]{16,})"),
        hints=(b"sk-",),
        run=LONG,
        check=looks_random,
    ),
    # Before the id, by which it is found.
    Pattern("aws_secret_key", hints=(b"AKIA", b"ASIA"), run=LONG, locate=find_aws_secrets),
    Pattern(
        "aws_access_key",
        re.compile(r"(?P<value>A(?:(?<![A-Za-z0-9]A)|(?<=\\[nrt]A))(?:KIA|SIA)[A-Z0-9]{16})(?![A-Za-z0-9])"),
        hints=(b"AKIA", b"ASIA"),
        run=LONG,
    ),
    Pattern(
        "aws_secret_key",
        re.compile(
            r"""(?i)aws.{0,20}?(?:secret|key).{0,20}?[:=]\s{0,3}(?:\\{0,7}["'])?(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"""
        ),
        hints=(b"aws",),
        any_case=True,
        check=looks_random,
    ),
    Pattern(
        "github_token",
        re.compile(
            r"(?P<value>g(?:(?<![A-Za-z0-9]g)|(?<=\\[nrt]g))(?:h[pousr]_[A-Za-z0-9]{20,}|ithub_pat_[A-Za-z0-9_]{20,}))"
        ),
        hints=(b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        run=VERY_LONG,
    ),
    Pattern(
        "gitlab_token",
        re.compile(r"(?P<value>glpat-(?:(?<![A-Za-z0-9]glpat-)|(?<=\\[nrt]glpat-))[A-Za-z0-9_-]{20,})"),
        hints=(b"glpat-",),
        run=VERY_LONG,
    ),
    Pattern(
        "slack_token",
        re.compile(r"(?P<value>xox(?:(?<![A-Za-z0-9]xox)|(?<=\\[nrt]xox))[abeprs]-[A-Za-z0-9-]{10,})"),
        hints=(b"xox",),
        run=LONG,
        check=looks_random,
    ),
    Pattern(
        "google_key",
        re.compile(r"(?P<value>AIza(?:(?<![A-Za-z0-9_-]AIza)|(?<=\\[nrt]AIza))[A-Za-z0-9_-]{35,})"),
        hints=(b"AIza",),
        run=VERY_LONG,
    ),
    Pattern(
        "stripe_key",
        re.compile(
            r"(?P<value>[rs](?:(?<![A-Za-z0-9][rs])|(?<=\\[nrt][rs]))k_(?:live|test)_[A-Za-z0-9]{16,})"
        ),
        hints=(b"k_live_", b"k_test_"),
        run=VERY_LONG,
    ),
    Pattern(
        "huggingface_token",
        re.compile(r"(?P<value>hf_(?:(?<![A-Za-z0-9_]hf_)|(?<=\\[nrt]hf_))[A-Za-z0-9]{30,})"),
        hints=(b"hf_",),
        run=VERY_LONG,
    ),
    Pattern(
        "npm_token",
        re.compile(
            r"(?P<value>npm_(?:(?<![A-Za-z0-9_]npm_)|(?<=\\[nrt]npm_))[A-Za-z0-9]{36})(?![A-Za-z0-9])"
        ),
        hints=(b"npm_",),
        run=VERY_LONG,
        check=looks_drawn,
    ),
    Pattern(
        "pypi_token",
        re.compile(
            r"(?P<value>pypi-AgE(?:(?<![A-Za-z0-9]pypi-AgE)|(?<=\\[nrt]pypi-AgE))[A-Za-z0-9_-]{32,}+)"
        ),
        hints=(b"pypi-AgE",),
        run=VERY_LONG,
    ),
    Pattern(
        "sendgrid_key",
        re.compile(
            r"(?P<value>SG\.(?:(?<![A-Za-z0-9_]SG\.)|(?<=\\[nrt]SG\.))[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64})(?![A-Za-z0-9_-])"
        ),
        hints=(b"SG.",),
        run=LONG,
        check=looks_random,
    ),
    Pattern(
        "twilio_key",
        re.compile(
            r"(?P<value>[AS](?:(?<![A-Za-z0-9][AS])|(?<=\\[nrt][AS]))[CK](?:(?<=AC)|(?<=SK))[0-9a-f]{32})(?![A-Za-z0-9])"
        ),
        hints=(b"AC", b"SK"),
        run=VERY_LONG,
        check=looks_random,
    ),
    Pattern("service_token", run=VERY_LONG, locate=find_marked_tokens),
    Pattern("signing_key", hints=(b"RWRTY0Iy", b"RWQAAEIy"), run=VERY_LONG, locate=find_minisign_keys),
    Pattern("telegram_token", hints=(b":",), run=VERY_LONG, locate=find_telegram_tokens),
    Pattern("discord_token", hints=(b".",), run=VERY_LONG, locate=find_discord_tokens),
    Pattern(
        "slack_webhook",
        re.compile(
            r"hooks\.slack\.com/(?:services|workflows|triggers)/"
            r"(?P<value>[TE][A-Za-z0-9]{3,20}/[A-Za-z0-9]{3,24}/[A-Za-z0-9]{16,}+)"
        ),
        hints=(b"hook",),
        run=LONG,
    ),
    Pattern("webhook", hints=(b"hook",), run=VERY_LONG, locate=find_webhooks),
    Pattern(
        "url_signature",
        hints=(b"sig=", b"ignature="),
        any_case=True,
        run=LONG,
        locate=find_signatures,
    ),
    Pattern(
        "azure_key",
        re.compile(_AZURE, re.IGNORECASE | re.ASCII),
        hints=(b"accountkey",),
        any_case=True,
        check=looks_random,
    ),
    Pattern(
        "basic_auth",
        re.compile(_BASIC, re.IGNORECASE | re.ASCII),
        hints=(b"authorization",),
        any_case=True,
        check=looks_like_login,
    ),
    Pattern(
        "bearer_token",
        re.compile(r"(?i)\bbearer\s{1,3}(?P<value>[A-Za-z0-9._~+/-]{16,}={0,2})"),
        hints=(b"bearer",),
        any_case=True,
        check=looks_random,
    ),
    Pattern("url_password", hints=(b"://",), locate=find_url_passwords),
    Pattern("curl_password", hints=(b"curl",), any_case=True, locate=find_curl_passwords),
    Pattern("cookie", hints=(b"cookie",), any_case=True, locate=find_cookies),
    Pattern("password", hints=(b"mysql",), locate=find_mysql_passwords),
    Pattern(
        "password",
        hints=(b"pass", b"kennwort", b"pwd", b"secret", b"token", b"credential", b"key"),
        any_case=True,
        locate=find_passwords,
    ),
    Pattern(
        "secret",
        hints=(b"pass", b"kennwort", b"pwd", b"secret", b"token", b"credential", b"key"),
        any_case=True,
        run=LONG,
        locate=find_named_secrets,
    ),
    Pattern("email", secret=False, hints=(b"@",), locate=find_emails),
    Pattern(
        "iban",
        re.compile(
            r"(?P<value>[A-Z](?<![A-Za-z0-9][A-Z])[A-Z]\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?)"
            r"(?![A-Za-z0-9])"
        ),
        secret=False,
        digits=b"AA00",
        check=passes_iban,
    ),
    Pattern("credit_card", secret=False, digits=b"00000000", locate=find_cards),
    Pattern("social_security_number", secret=False, digits=b"000000000", locate=find_social_security_numbers),
    Pattern("ip_address", secret=False, digits=b"00000", locate=find_addresses),
    Pattern("phone", secret=False, digits=b"00000000", locate=find_phones),
)


def _hints(*, any_case: bool, run: int) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
    """Return each hint with the indexes of its patterns, of those that need no longer run than this."""
    by_hint: dict[bytes, tuple[int, ...]] = {}
    for index, pattern in enumerate(PATTERNS):
        if pattern.any_case == any_case and pattern.run <= run:
            for hint in pattern.hints:
                by_hint[hint] = (*by_hint.get(hint, ()), index)
    return tuple(by_hint.items())


# Flat tables: a text is searched for some dozen hints.
_AS_IS = {run: _hints(any_case=False, run=run) for run in (0, LONG, VERY_LONG)}
_FOLDED = {run: _hints(any_case=True, run=run) for run in (0, LONG, VERY_LONG)}
_BY_RUN = tuple(
    place for place, pattern in enumerate(PATTERNS) if pattern.run == VERY_LONG and not pattern.hints
)
_NUMBERS = tuple((pattern.digits, place) for place, pattern in enumerate(PATTERNS) if pattern.digits)
_SEPARATORS = b" ()./-"
# A byte beyond ASCII counts as a digit, and the expressions decide.
_DIGITS_AND_CAPITALS = bytes(
    ord("A") if 65 <= code <= 90 else ord("0") if 48 <= code <= 57 or code >= 128 else ord("x")
    for code in range(256)
)


_LONG_RUN, _VERY_LONG_RUN = b"A" * LONG, b"A" * VERY_LONG


def find_likely(text: str) -> list[Pattern]:
    """Return the patterns that may match `text`.

    Most texts contain none of the hints, and searching for those takes a hundredth of the time.
    """
    is_ascii = text.isascii()
    raw = text.encode() if is_ascii else text.encode("utf-8", "surrogatepass")
    folded = raw.lower()
    if not is_ascii:
        # Two characters that an expression matches as ASCII letters: the long s and the kelvin sign.
        folded = folded.replace(b"\xc5\xbf", b"s").replace(b"\xe2\x84\xaa", b"k")
    runs = raw.translate(RUNS)
    run = 0 if _LONG_RUN not in runs else VERY_LONG if _VERY_LONG_RUN in runs else LONG
    likely: list[int] = []
    for hint, indices in _AS_IS[run]:
        if hint in raw:
            likely += indices
    for hint, indices in _FOLDED[run]:
        if hint in folded:
            likely += indices
    if run == VERY_LONG:
        likely += _BY_RUN
    digits = raw.translate(_DIGITS_AND_CAPITALS, _SEPARATORS)
    for form, index in _NUMBERS:
        if form in digits:
            likely.append(index)
    return [PATTERNS[index] for index in sorted(set(likely))] if likely else []
