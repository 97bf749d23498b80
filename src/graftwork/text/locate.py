"""Where values stand that are slow to search for: e-mail addresses, passwords, long numbers.

In: a text. Out: the spans of the values, left to right, none over another. A regular expression
that begins with "some letters" is tried at every letter; these begin at the literal in the middle
(`@`, `://`, `password`) and look back from there, or look only inside runs of digits. Each look is
bounded, so that the time grows with the text and not faster.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from graftwork.text.confirm import (
    has_phone_digits,
    is_no_git_address,
    looks_drawn,
    looks_like_password,
    looks_random,
    passes_luhn,
)
from graftwork.text.span import Span
from graftwork.text.tokens import find_options

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
    r"pass(?:word|wd|phrase)|pwd|secret|token|credential|api[_-]?key|access[_-]?key|auth[_-]?key"
    r"|private[_-]?key|encryption[_-]?key|signing[_-]?key"
)
# A quote may be escaped once or more: JSON in a tool call's arguments in JSON.
_QUOTE = r"""\\{0,7}["'`]"""
_VALUE = r"""(?P<value>[^\s"'`,;<>()\[\]{}\\]{8,200})"""
_ASSIGNMENT = re.compile(
    rf"(?i:{_NAMES})[\w-]{{0,40}}(?:{_QUOTE})?\s{{0,3}}(?::=|=>|[:=]|\b(?i:is)\b)\s{{0,3}}(?:{_QUOTE})?{_VALUE}"
)
_NAME = re.compile(rf"(?i:{_NAMES})")
# Stricter: `max_tokens` and `key_count` hold numbers that are no secrets.
_SECRET_NAME = re.compile(r"(?i:pass(?:word|wd|phrase|code)|\bpwd\b|secret|credential|api[_-]?key)")
# Headers whose whole value gives access, `Basic ...` and all.
_HEADER = re.compile(r"(?:^|[._-])(?:authorization|cookie)$", re.IGNORECASE | re.ASCII)
_WHOLE_VALUE = re.compile(_VALUE)
# Every name holds one of these; a name with a key in it begins at most so far before the key.
_NAME_STARTS = ("passw", "passp", "pwd", "secret", "token", "credential")
_KEY_OWNERS = ("encryption", "signing", "private", "access", "auth", "api")

# Whatever can be a number that somebody writes down: eight digits at least, and what parts them.
_DIGIT_RUNS = re.compile(r"[+(\d][\d ()./+-]{7,}+")
_ASCII_NUMBERS = re.compile(r"[+(0-9][0-9 ()./+-]{7,}+")
_CARD = re.compile(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?![\w-])")
# Areas 000, 666 and from 900 on were never given out, nor were groups and serials of zeros.
_SOCIAL = re.compile(r"(?<![\w.+-])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![\w-])")
_PHONE_ITSELF = (
    r"(?:(?:\+|00)[1-9]\d{0,2}[ .-]?(?:\(0?\d{1,4}\)[ .-]?)?\d{1,5}(?:[ ./-]?\d{2,5}){1,4}"
    # In North America an area and an exchange begin with 2 to 9.
    r"|(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[-. ])[2-9]\d{2}[-. ]\d{4}"
    r"|0\d{2,4}[ /-]\d{3,8}(?:[ -]\d{1,5})?"
    r")(?![\w-])"
)
_PHONE = re.compile(rf"(?<![\w.,+-]){_PHONE_ITSELF}")
_PHONE_NEXT = re.compile(_PHONE_ITSELF)


def find_emails(text: str) -> Iterator[Span]:
    done = 0
    for match in _HOST.finditer(text):
        at = match.start()
        # One more than allowed: a run that is longer is no local part, wherever it is cut.
        before = _LOCAL_PART.match(text[max(done, at - _LONGEST_LOCAL_PART - 1) : at][::-1])
        if before is None or before.end() > _LONGEST_LOCAL_PART:
            continue
        span = Span(at - before.end(), match.end())
        if is_no_git_address(text[span.start : span.end]):
            yield span
            done = span.end


def find_url_passwords(text: str) -> Iterator[Span]:
    """A password, and a token in the place of the user's name as in `https://TOKEN@host`."""
    for match in _LOGIN.finditer(text):
        if len(match["user"]) >= _SHORTEST_TOKEN and looks_random(match["user"]):
            yield Span(*match.span("user"))
        if match["value"] is not None:
            yield Span(*match.span("value"))


def find_telegram_tokens(text: str) -> Iterator[Span]:
    """A number of eight to ten digits, a colon and 35 characters; in addresses `bot` stands before it."""
    for match in _TELEGRAM.finditer(text):
        start = match.start() - 8
        while start and match.start() - start < 11 and text[start - 1] in "0123456789":
            start -= 1
        if match.start() - start < 11 and looks_drawn(match.group()):
            yield Span(start, match.end())


def find_discord_tokens(text: str) -> Iterator[Span]:
    """Three parts; the first is the number of an account in base64, and so begins with M, N or O."""
    done = 0
    for match in _DISCORD.finditer(text):
        before = text[max(done, match.start() - _LONGEST_DISCORD_START - 1) : match.start()]
        run = _TOKEN_END.search(before)
        if run and _DISCORD_START.fullmatch(run.group()) and looks_drawn(match.group()):
            yield Span(match.start() - len(run.group()), match.end())
            done = match.end()


def find_passwords(text: str) -> Iterator[Span]:
    """The values of assignments such as `db_password: ...`, `"api_key\\": \\"...\\"`, `the secret is ...`."""
    named = (
        Span(*match.span("value")) for match in _match_names(text) if looks_like_password(match["value"])
    )
    done = 0
    for span in sorted((*named, *find_options(text))):
        if span.start >= done:
            yield span
            done = span.end


def find_cards(text: str) -> Iterator[Span]:
    for start, end in _find_numbers(text):
        for match in _CARD.finditer(text, start, end):
            if passes_luhn(match.group()):
                yield Span(*match.span())


def find_social_numbers(text: str) -> Iterator[Span]:
    for start, end in _find_numbers(text):
        for match in _SOCIAL.finditer(text, start, end):
            yield Span(*match.span())


def find_phones(text: str) -> Iterator[Span]:
    for start, end in _find_numbers(text):
        found = _PHONE.search(text, start, end)
        while found:
            confirmed = has_phone_digits(found.group())
            if confirmed:
                yield Span(*found.span())
            # One that begins where another ends has a digit before it, but only until that one is gone.
            after = _PHONE_NEXT.match(text, found.end(), end) if confirmed else None
            found = after or _PHONE.search(text, found.end(), end)


def is_password_under(name: str, value: str) -> bool:
    """Whether a value by itself is a password, given the name of the field that it stands in."""
    if _HEADER.search(name):
        return len(value) >= 8 and "<" not in value and any(c.isdigit() or c == "=" for c in value)
    return (
        _NAME.search(name) is not None
        and _WHOLE_VALUE.fullmatch(value) is not None
        and looks_like_password(value)
    )


@lru_cache(maxsize=4096)
def may_name_secret(name: str) -> bool:
    """Whether a field of this name may hold a password; most fields are `role` and `content`."""
    return _HEADER.search(name) is not None or _NAME.search(name) is not None


def is_secret_name(name: str) -> bool:
    """Whether whatever stands in a field of this name is a secret, a number too."""
    return "<REDACTED:" not in name and _SECRET_NAME.search(name) is not None


@lru_cache(maxsize=1)
def _find_numbers(text: str) -> tuple[Span, ...]:
    """Runs of digits and their signs, each with the character that follows it.

    Cards, telephones and others are looked for in the same text one after the other.
    """
    numbers = (_ASCII_NUMBERS if text.isascii() else _DIGIT_RUNS).finditer(text)
    return tuple(Span(number.start(), number.end() + 1) for number in numbers)


def _match_names(text: str) -> Iterator[re.Match[str]]:
    """What `finditer` yields, several times faster: literals are looked up first."""
    folded = text.lower()
    # Letters that an expression takes for i and s, and `lower` does not, or not one for one.
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
    found = set()
    for key in _find_all(folded, "key"):
        end = key - 1 if key and folded[key - 1] in "_-" else key
        for owner in _KEY_OWNERS:
            if folded.endswith(owner, 0, end):
                found.add(end - len(owner))
    return found


def _find_all(folded: str, literal: str) -> Iterator[int]:
    place = folded.find(literal)
    while place >= 0:
        yield place
        place = folded.find(literal, place + 1)
