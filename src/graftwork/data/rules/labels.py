"""Labels that are probably wrong: how many, and which rows to review."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from graftwork.data.label_noise import MOST_ROWS, Prompts, Suspect, find_labels, judge_labels
from graftwork.data.rules.facts import DUPLICATE, Facts
from graftwork.data.rules.finding import make_finding
from graftwork.data.rules.summary import shorten
from graftwork.records.audit import Example, FieldNoise, Finding, LabelNoise, SuspiciousLabel
from graftwork.records.interaction import Interaction

FEWEST_LISTED, MOST_LISTED = 10, 60
QUESTION_CHARACTERS = 200
WORTH_A_WARNING = 0.02
"""Share of wrong labels; below it, or where none at all is possible, nothing is found."""


class _Rows(NamedTuple):
    places: list[int]
    rows: list[Interaction]


def estimate_noise(facts: Facts) -> LabelNoise:
    """Of the rows that passed the filter, each distinct one once."""
    chosen = _choose(facts)
    found = find_labels([row.reply for row in chosen.rows])
    if isinstance(found, str):
        return LabelNoise(why_not=found)
    prompts = Prompts([_prompt(row) for row in chosen.rows])
    fields: list[FieldNoise] = []
    suspicious: list[SuspiciousLabel] = []
    skipped: dict[str, str] = {}
    for labelled in found:
        judged = judge_labels(prompts, labelled.labels)
        if isinstance(judged, str):
            skipped[labelled.field or "reply"] = judged
            continue
        fields.append(
            FieldNoise(
                field=labelled.field,
                rows=judged.rows,
                labels=judged.labels,
                rate=judged.rate,
                judged=judged.judged,
                agreement=judged.agreement,
                near_duplicates=judged.near_duplicates,
                contradictions=judged.contradictions,
            )
        )
        expected = math.ceil(1.5 * judged.rate.value * judged.rows)
        listed = judged.suspects[: min(max(expected, FEWEST_LISTED), MOST_LISTED)]
        suspicious += [_show(facts, chosen, suspect, labelled.field) for suspect in listed]
    suspicious.sort(key=lambda one: -one.score)
    why = "" if fields else "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    return LabelNoise(
        fields=tuple(fields), suspicious=tuple(suspicious[:MOST_LISTED]), not_estimated=skipped, why_not=why
    )


def find_wrong_labels(noise: LabelNoise) -> Iterator[Finding]:
    """A warning for each field with a share of wrong labels that cannot be chance."""
    for field in noise.fields:
        if field.rate.value < WORTH_A_WARNING or field.rate.low <= 0:
            continue
        rows = [one for one in noise.suspicious if one.field == field.field]
        named = f"the field {field.field}" if field.field else "the reply"
        yield make_finding(
            "label_noise",
            "warning",
            count=round(field.rate.value * field.rows),
            rows=[one.origin for one in rows],
            examples=[
                Example(origin=one.origin, excerpt=f"{one.label}, probably {one.suggested}: {one.question}")
                for one in rows
            ],
            title=f"about {field.rate.value:.0%} of the labels in {named} are wrong "
            f"({field.rate.low:.1%} to {field.rate.high:.1%})",
            effect="the model learns the errors, and even a perfect one cannot score above what is right",
            fix="review the rows that are listed, the most suspicious first, and correct the log",
        )


def _choose(facts: Facts) -> _Rows:
    import numpy as np

    places = np.flatnonzero(facts.passed & (facts.repeats.step != DUPLICATE))
    if len(places) > MOST_ROWS:
        places = places[np.linspace(0, len(places) - 1, MOST_ROWS).astype(np.int64)]
    rows = facts.read(places)
    return _Rows(list(rows), list(rows.values()))


def _prompt(row: Interaction) -> str:
    """What differs from row to row: not the system prompt."""
    return "\n".join(message.content for message in row.messages if message.role != "system")


def _show(facts: Facts, chosen: _Rows, suspect: Suspect, field: str | None) -> SuspiciousLabel:
    row = chosen.rows[suspect.row]
    near = None if suspect.near is None else facts.corpus.origin(chosen.places[suspect.near])
    return SuspiciousLabel(
        origin=row.origin,
        field=field,
        label=suspect.label,
        suggested=suspect.suggested,
        score=suspect.score,
        question=shorten(row.question, QUESTION_CHARACTERS),
        near=near,
    )
