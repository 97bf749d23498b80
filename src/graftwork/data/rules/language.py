"""Damaged characters, and rows in another script than the rest.

One row shows damage by itself. Which script is the odd one out only the corpus shows; a row has its
label in a column. Does not tell languages of one script apart.
"""

import re
from collections.abc import Iterator

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_placed, make_finding
from graftwork.data.rules.gather import merge_faults
from graftwork.data.rules.note import Note, Sight, show_around
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction
from graftwork.text.script import find_garble

ENCODING = "language_or_encoding"
# Where damage shows, for the excerpt only.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SHOWS = re.compile("\ufffd|[ÂÃÐÑâïð][^\\s\\w]|[ÂÃÐÑâïð][\u0080-ÿ€-™]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Below this many rows nothing is the rule; below this share no script is.
ENOUGH_ROWS = 20
MAIN_SHARE = 0.9
NO_LETTERS = "none"


def check_encoding(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    row = redacted.row
    seen: set[str] = set()
    for text in (*(message.content for message in row.messages), row.reply):
        # No text has one NUL on purpose: it is what is left of another encoding.
        reason = "NUL characters" if "\0" in text else find_garble(text)
        if reason is not None and reason not in seen:
            seen.add(reason)
            shown = _SHOWS.search(text)
            excerpt = show_around(text, shown.group() if shown else text[:1])
            yield Note(ENCODING, reason, _CONTROL.sub("␀", excerpt))


def find_damaged_text(facts: Facts) -> Iterator[Finding]:
    damaged = merge_faults(facts, "encoding", noted=ENCODING)
    if damaged.count:
        yield make_finding(
            ENCODING,
            "warning",
            count=damaged.count,
            rows=damaged.rows,
            examples=damaged.examples,
            reasons=damaged.reasons,
            title=count_rows(damaged.count, "have damaged characters"),
            effect="the model learns to write the damage; rows that are not UTF-8 are lost altogether",
            fix="read and write the log as UTF-8 where it is made; `graft data prepare` drops by name "
            "the rows that are not UTF-8",
        )
    yield from _find_other_scripts(facts)


def _find_other_scripts(facts: Facts) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels("script")
    lettered = [number for number, name in enumerate(names) if name != NO_LETTERS]
    counts = np.bincount(numbers[np.isin(numbers, lettered)], minlength=len(names))
    labelled = int(counts.sum())
    if labelled < ENOUGH_ROWS or counts.max() < MAIN_SHARE * labelled:
        return
    main = int(counts.argmax())
    others = np.flatnonzero(np.isin(numbers, lettered) & (numbers != main))
    if not len(others):
        return
    named = {
        names[number].capitalize(): int(counts[number])
        for number in np.argsort(-counts, kind="stable")
        if counts[number] and number != main
    }
    yield find_placed(
        facts,
        ENCODING,
        "info",
        others,
        show=lambda row, place: row.question,
        reasons=named,
        title=count_rows(len(others), f"are not written in {names[main].capitalize()} letters like the rest")
        + f" ({', '.join(f'{name} {count:,}' for name, count in named.items())})",
        effect="too few to learn another language from, and enough to answer in it at the wrong time",
        fix="leave them out of the files under data.logs, or log more of them if the model is to know both",
    )
