"""Control tokens of a chat template inside content, where they forge turns."""

import re
from collections.abc import Iterator

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted
from graftwork.data.rules.note import Note, Sight, show_around
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction
from graftwork.text.control import KNOWN_CONTROL_TOKENS, find_control_tokens

CONTROL_TOKENS = "special_tokens"
# Interactions hold reasoning and tool calls in these tags on purpose.
_MEANT = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
# A pair of these is struck-out text in HTML.
_HTML = {"<s>", "</s>"}


def check_control_tokens(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    """The base's own tokens; where no base is known, those of the known families."""
    row = redacted.row
    seen: set[str] = set()
    for text in (*(message.content for message in row.messages), row.reply):
        found = find_control_tokens(text, sight.control_tokens or KNOWN_CONTROL_TOKENS)
        is_html = set(found) >= _HTML
        for token in found:
            if token not in seen and not _MEANT.fullmatch(token) and not (is_html and token in _HTML):
                seen.add(token)
                yield Note(CONTROL_TOKENS, token, show_around(text, token))


def find_control_tokens_in_text(facts: Facts) -> Iterator[Finding]:
    tallied = facts.tally[CONTROL_TOKENS]
    if tallied.count:
        whose = facts.sight.base if facts.sight.control_tokens else None
        yield find_noted(
            facts,
            CONTROL_TOKENS,
            "warning",
            title=count_rows(tallied.count, f"hold control tokens of {whose or 'chat models'} as text")
            + f" ({tallied.say_reasons(4)})",
            effect="read as control tokens they forge turns: a quoted document speaks as the system",
            fix="`graft data prepare` neutralises them: they are tokenised as plain text, and the mask of "
            "every row is proven",
        )
