"""Rows that another model than the base produced, and reasoning that the base would not write."""

import re
from collections.abc import Iterator

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted, find_placed
from graftwork.data.rules.note import Note, Sight, show_start
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction

FOREIGN_MODEL = "foreign_model"
REASONING = "reasoning"
_THINK = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)
MOST_NAMED = 5
NO_BASE = "no base is named to compare the models of the rows with"
NO_MODEL = "no row names the model that answered"


def check_reasoning(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    """Only reasoning is noted: the model's name stands in a column of its own."""
    match = _THINK.search(raw.reply)
    if match:
        yield Note(REASONING, f"reasoning in <{match.group(1).lower()}> tags", show_start(redacted.row.reply))


def find_foreign_models(facts: Facts) -> Iterator[Finding]:
    yield from _find_models(facts)
    yield from _find_reasoning(facts)


def is_same_model(model: str, base: str) -> bool:
    """Whether a logged name means the base: `smollm2-135m` and `HuggingFaceTB/SmolLM2-135M-Instruct` do."""
    one, other = _fold(model), _fold(base)
    return bool(one and other) and (one in other or other in one)


def _find_models(facts: Facts) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels("model")
    base = facts.sight.base
    foreign = [number for number, name in enumerate(names) if base is None or not is_same_model(name, base)]
    places = np.flatnonzero(np.isin(numbers, foreign))
    # Without a base no name is foreign; but several models in one log never agree.
    if not len(places) or (base is None and len(names) < 2):
        return
    counts = np.bincount(numbers[places], minlength=len(names))
    order = [int(number) for number in np.argsort(-counts, kind="stable") if counts[number]]
    named = ", ".join(f"{names[number]} {counts[number]:,}" for number in order[:MOST_NAMED])
    more = f" and {len(order) - MOST_NAMED} more" if len(order) > MOST_NAMED else ""
    unseen = "" if base is not None else f"; {NO_BASE}"
    what = "come from several models" if base is None else f"come from another model than {base}"
    yield find_placed(
        facts,
        FOREIGN_MODEL,
        "info",
        places,
        show=lambda row, place: f"{row.model}: {row.reply}",
        reasons={names[number]: int(counts[number]) for number in order[:20]},
        title=f"{count_rows(len(places), what)} ({named}{more}){unseen}",
        effect="the base learns the habits of each of them, what it could not know itself included",
        fix="keep the rows of the model whose answers you want, and look at examples of each",
    )


def _find_reasoning(facts: Facts) -> Iterator[Finding]:
    count, rows = facts.tally[REASONING].count, facts.corpus.rows
    sight = facts.sight
    if not count or (sight.base_reasons is not False and count == rows):
        return
    if sight.base_reasons is False:
        title = count_rows(
            count, f"reason in tags before the answer, and {sight.base or 'the base'} does not"
        )
        effect = "the model learns to think aloud in a format that its template and its users do not expect"
    else:
        title = count_rows(count, f"reason in tags before the answer, and the other {rows - count:,} do not")
        effect = "the model learns to do either by chance, and spends its token limit on thinking"
    if not (facts.labels("model")[0] >= 0).any():
        title += f"; {NO_MODEL}"
    fix = (
        "`graft data prepare` leaves the reasoning out (data.reasoning: drop)"
        if facts.settings.reasoning == "drop"
        else "set data.reasoning to drop to train on the answers alone, or keep rows of one kind only"
    )
    yield find_noted(facts, FOREIGN_MODEL, "warning", noted=REASONING, title=title, effect=effect, fix=fix)


def _fold(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].casefold())
