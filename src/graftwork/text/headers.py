"""Where secrets stand in what goes over HTTP: cookies, and passwords on the command line of curl.

In: a text. Out: the spans of the values, left to right, none over another. Each look is bounded or
goes over its part of the text once, so that the time grows with the text and not faster.
"""

import re
from collections.abc import Iterator

from graftwork.text.confirm import is_no_word_for_password, looks_like_password, looks_random
from graftwork.text.span import Span

_QUOTE = r"""\\{0,7}["'`]"""
_COOKIES = re.compile(
    rf"""cookies?(?:{_QUOTE})?\s{{0,3}}[:=]\s{{0,3}}(?:{_QUOTE})?(?P<pairs>[^\r\n"'`\\()]*+)""",
    re.IGNORECASE | re.ASCII,
)
_PAIR = re.compile(r"""(?<=[;,\s:="'`])(?P<name>[^\s=;,:<>]{1,80})=(?P<value>[^\s;,<>]{8,}+)""")
_ATTRIBUTES = frozenset(("path", "domain", "expires", "max-age", "samesite", "priority", "version"))
_SESSION = re.compile(r"sess|sid|auth|token|csrf|xsrf|jwt", re.IGNORECASE | re.ASCII)

_LOGIN = re.compile(
    rf"""-(?<=[\s"']-)(?:u[ \t]{{0,2}}|-(?:proxy-)?user[ \t=]{{1,2}})(?:{_QUOTE})?"""
    r"""[^\s:"'`<>\\$]{0,80}:(?P<value>[^\s"'`<>\\${}]{3,200})"""
)
# A command goes on behind a line end only where a backslash stands before it.
_COMMAND_END = re.compile(r"(?<![\\\r])\r?\n")
_LONGEST_COMMAND = 600


def find_cookies(text: str) -> Iterator[Span]:
    """The values of `Cookie: a=...; b=...` that open a session; what only sets a language stays."""
    for header in _COOKIES.finditer(text):
        for pair in _PAIR.finditer(text, header.start("pairs"), header.end("pairs")):
            name, value = pair["name"], pair["value"]
            confirm = looks_like_password if _SESSION.search(name) else looks_random
            if name.casefold() not in _ATTRIBUTES and confirm(value):
                yield Span(*pair.span("value"))


def find_curl_passwords(text: str) -> Iterator[Span]:
    """What stands behind the colon of `curl -u name:...` and `curl --user name:...`."""
    for login in _LOGIN.finditer(text):
        if is_no_word_for_password(login["value"]) and _is_of_curl(text, login.start()):
            yield Span(*login.span("value"))


def _is_of_curl(text: str, place: int) -> bool:
    before = text[max(0, place - _LONGEST_COMMAND) : place]
    command = before.casefold().rfind("curl")
    return command >= 0 and not _COMMAND_END.search(before, command)
