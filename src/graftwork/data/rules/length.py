"""Rows longer than the training length, with what a cut would take from them.

Tokens are estimated from characters unless somebody can count them; the preparation counts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted
from graftwork.data.rules.note import Note, Sight, show_end
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOO_LONG = "too_long"
CHARACTERS_PER_TOKEN = 3.6
_DONE = {
    "drop": "drops these",
    "split_by_turn": "makes a row of each turn, and drops what is still too long",
    "truncate": "leaves out the oldest turns until the row fits",
}
ALL_OF_IT = "cut at that length, the whole reply is lost"
THE_END = "cut at that length, the end of the reply is lost"
BUT_FOR_LENGTH = "of the rows that are usable after cleaning"


def check_length(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    prompt, reply = (
        _measure([message.content for message in raw.messages], sight),
        _measure([raw.reply], sight),
    )
    most = sight.settings.max_tokens
    total = round(prompt + reply)
    if total > most:
        what = "the whole reply" if prompt >= most else "the end of the reply"
        reason = f"would lose {total - most:,} of {total:,} tokens, {what} included"
        yield Note(TOO_LONG, reason, show_end(redacted.row.reply))


def find_overlong(facts: Facts) -> Iterator[Finding]:
    count = facts.tally[TOO_LONG].count
    if not count:
        return
    settings = facts.settings
    counted = "" if facts.sight.count_tokens else ", estimated from their characters"
    longest, lost, cuts = _sum_up(facts)
    yield find_noted(
        facts,
        TOO_LONG,
        "warning",
        reasons=cuts,
        title=count_rows(count, f"are longer than {settings.max_tokens:,} tokens")
        + f" (the longest has about {longest:,}{counted})",
        effect=f"a trainer that cuts at that length takes about {lost:,} tokens off their ends, and teaches "
        "the model not to finish",
        fix=f"`graft data prepare` {_DONE[settings.overlong]} (data.overlong: {settings.overlong}); or raise "
        "data.max_tokens",
    )


def _measure(texts: list[str], sight: Sight) -> float:
    if sight.count_tokens is not None:
        return sum(map(sight.count_tokens, texts))
    return sum(map(len, texts)) / CHARACTERS_PER_TOKEN


def _sum_up(facts: Facts) -> tuple[int, int, dict[str, int]]:
    """The longest row, the tokens beyond the limit, and what the cut would take of how many rows."""
    import numpy as np

    most = facts.settings.max_tokens
    prompt = facts.corpus.column("prompt_chars") / CHARACTERS_PER_TOKEN
    total = prompt + facts.corpus.column("reply_chars") / CHARACTERS_PER_TOKEN
    beyond = np.maximum(np.rint(total) - most, 0)
    whole = int(np.count_nonzero((beyond > 0) & (prompt >= most)))
    cuts = {
        ALL_OF_IT: whole,
        THE_END: int(np.count_nonzero(beyond)) - whole,
        BUT_FOR_LENGTH: _count_usable(facts, beyond > 0),
    }
    return round(float(total.max(initial=0))), int(beyond.sum()), {why: n for why, n in cuts.items() if n}


def _count_usable(facts: Facts, beyond: "NDArray[np.bool_]") -> int:
    """Of the rows that were noted where all of them are known, else by what the columns estimate."""
    tallied = facts.tally[TOO_LONG]
    if len(tallied.places) == tallied.count:
        return int(facts.usable[tallied.places].sum())
    return min(int((beyond & facts.usable).sum()), tallied.count)
