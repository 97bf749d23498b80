"""Label noise: how many labels of a log are wrong, and which rows to review.

In: prompts and replies. Out: an estimate with its interval, and the most suspicious rows. Applies where
replies are labels: few distinct replies, or JSON objects with fields of few distinct values.

Ridge regression over hashed n-grams of the prompt predicts every label from all other rows, in closed form.
Where the prediction is clear the classifier is hardly ever wrong, so the share of disagreeing labels there
estimates the share of wrong ones; the share among all rows bounds it. Labels that prompts do not predict are
not estimated, and the reason is given.
"""

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.data.audit.findings import DUPLICATE, AuditFacts, shorten
from graftwork.records.base import Figure
from graftwork.records.dataset import Example, FieldNoise, Finding, LabelNoise, SuspiciousLabel
from graftwork.records.interaction import Interaction
from graftwork.text.words import words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST_ROWS = 60
MOST_ROWS = 3000
"""More rows are thinned out evenly."""
FEWEST_OF_A_LABEL = 5
MOST_LABELS = 50
ROWS_A_LABEL = 5
"""Values are labels only if there are at least this many rows per label."""
LONGEST_LABEL = 80
JSON_SHARE = 0.9
MOST_FIELDS = 8
PROMPT_CHARACTERS = 4000
WIDTH = 2**13
RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)
LEAST_AGREEMENT = 0.4
"""Cohen's kappa between labels and predictions, below which the prompts do not predict the labels."""
NEARLY_THE_SAME = 0.7
"""Cosine similarity of two prompts; rare words weigh most."""
Z95 = 1.96
_FENCE = re.compile(r"^```[a-z]*\s*(.*?)\s*```$", re.DOTALL)


class Labelled(NamedTuple):
    """One label per row, empty where a row has none. `field` is None for the reply itself."""

    field: str | None
    labels: list[str]


class Suspect(NamedTuple):
    """A row, by its position among the given ones."""

    row: int
    label: str
    suggested: str
    score: float
    near: int | None


class LabelEstimate(NamedTuple):
    rate: Figure
    rows: int
    labels: int
    judged: int
    agreement: float
    near_duplicates: int
    contradictions: int
    suspects: list[Suspect]


def find_labels(replies: Sequence[str]) -> list[Labelled] | str:
    """Return the labels in these replies, or why there are none."""
    if len(replies) < FEWEST_ROWS:
        return f"{len(replies)} usable rows are too few, {FEWEST_ROWS} are needed"
    parsed = [_parse(reply) for reply in replies]
    objects = [value for value in parsed if value is not None]
    if len(objects) >= JSON_SHARE * len(replies):
        names = Counter(name for value in objects for name in value)
        fields = [
            Labelled(name, [_label(value.get(name)) if value else "" for value in parsed])
            for name, count in names.most_common()
            if count >= JSON_SHARE * len(replies)
        ]
        found = [field for field in fields if are_labels(field.labels)]
        return found[:MOST_FIELDS] or "no field of the JSON replies has few distinct values"
    whole = Labelled(None, [" ".join(reply.split()) for reply in replies])
    if are_labels(whole.labels):
        return [whole]
    distinct = len(set(whole.labels))
    if distinct == 1:
        return "all replies are the same"
    return f"replies are free text ({distinct:,} distinct ones in {len(replies):,} rows)"


def are_labels(values: Sequence[str]) -> bool:
    """Whether these are few distinct short values, at least two of them frequent enough to predict."""
    counts = Counter(value for value in values if value)
    if not 2 <= len(counts) <= min(MOST_LABELS, len(values) // ROWS_A_LABEL):
        return False
    frequent = sum(count >= FEWEST_OF_A_LABEL for count in counts.values())
    return frequent >= 2 and max(map(len, counts)) <= LONGEST_LABEL


def _parse(reply: str) -> dict[str, Any] | None:
    bare = reply.strip()
    fenced = _FENCE.match(bare)
    try:
        value = json.loads(fenced[1] if fenced else bare)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _label(value: Any) -> str:
    """Return a scalar as text; nothing for lists and objects."""
    if isinstance(value, (str, bool, int)):
        return " ".join(value.split()) if isinstance(value, str) else json.dumps(value)
    return ""


class Prompts:
    """The similarity matrix of the prompts, decomposed once for all labels and ridges."""

    def __init__(self, texts: Sequence[str]) -> None:
        import numpy as np

        features = hash_ngrams(texts)
        self.similarity = (features @ features.T).astype(np.float64)
        self._values, self._vectors = np.linalg.eigh(self.similarity)

    def predict(self, targets: "NDArray[np.float64]", *, ridge: float) -> "NDArray[np.float64]":
        """Return the targets of each row as predicted from all other rows."""
        import numpy as np

        shrunk = np.maximum(self._values, 0.0)
        shrunk = shrunk / (shrunk + ridge)
        fitted = self._vectors @ (shrunk[:, None] * (self._vectors.T @ targets))
        own = np.einsum("ij,j,ij->i", self._vectors, shrunk, self._vectors)
        left_out: NDArray[np.float64] = targets - (targets - fitted) / np.maximum(1.0 - own, 1e-9)[:, None]
        return left_out


def hash_ngrams(texts: Sequence[str]) -> "NDArray[np.float32]":
    """Hash words, pairs of words and runs of four characters, weighted by rarity, each row of length 1."""
    import numpy as np

    counts = np.zeros((len(texts), WIDTH), dtype=np.float32)
    for row, text in enumerate(texts):
        found = Counter(_ngrams(text))
        places = [zlib.crc32(gram.encode()) % WIDTH for gram in found]
        np.add.at(counts[row], places, np.log1p(np.array(list(found.values()), dtype=np.float32)))
    frequency = np.count_nonzero(counts, axis=0)
    # What occurs in every prompt carries no information.
    counts *= np.log((1 + len(texts)) / (1 + frequency)).astype(np.float32)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    normed: NDArray[np.float32] = counts / np.maximum(lengths, 1e-9)
    return normed


def _ngrams(text: str) -> list[str]:
    known = words(text[-PROMPT_CHARACTERS:])
    line = " ".join(known)
    pairs = [f"{a} {b}" for a, b in pairwise(known)]
    runs = [f"#{line[at : at + 4]}" for at in range(max(len(line) - 3, 0))]
    return [*known, *pairs, *runs]


def estimate_label_noise(prompts: Prompts, labels: Sequence[str]) -> LabelEstimate | str:
    """Return the estimate and the suspects, or why there is no estimate."""
    import numpy as np

    counts = Counter(label for label in labels if label)
    names = sorted(label for label, count in counts.items() if count >= FEWEST_OF_A_LABEL)
    number = {name: at for at, name in enumerate(names)}
    given = np.array([number.get(label, -1) for label in labels])
    known = given >= 0
    if known.sum() < FEWEST_ROWS:
        return "too few rows have a label that occurs often enough"
    targets = np.zeros((len(labels), len(names)))
    targets[known, given[known]] = 1.0
    # Frequent labels must not win by being frequent.
    shares = targets[known].mean(axis=0)
    best: tuple[float, Any] | None = None
    for ridge in RIDGES:
        scores = prompts.predict(targets - shares * known[:, None], ridge=ridge)[known] + shares
        agreed = float((scores.argmax(axis=1) == given[known]).mean())
        if best is None or agreed > best[0] + 1e-12:
            best = agreed, scores
    assert best is not None
    agreement, scores = best
    if (kappa := _kappa(scores.argmax(axis=1), given[known], len(names))) < LEAST_AGREEMENT:
        return (
            f"the prompts do not predict it (agreement beyond chance {kappa:.0%}): the label needs more than "
            "the words of the prompt, or most labels are wrong"
        )
    rows = np.flatnonzero(known)
    found = _estimate(scores, given[known])
    pairs = _near_pairs(prompts.similarity, rows)
    differ = [(a, b) for a, b in pairs if given[a] != given[b]]
    return LabelEstimate(
        rate=found[0],
        rows=len(rows),
        labels=len(names),
        judged=found[1],
        agreement=agreement,
        near_duplicates=len(pairs),
        contradictions=len(differ),
        suspects=_suspects(scores, given, rows, names, differ),
    )


def _kappa(predicted: "NDArray[Any]", given: "NDArray[Any]", labels: int) -> float:
    import numpy as np

    shares = [np.bincount(side, minlength=labels) / len(side) for side in (predicted, given)]
    chance = float(shares[0] @ shares[1])
    agreed = float((predicted == given).mean())
    return (agreed - chance) / (1 - chance) if chance < 1 else 0.0


def _estimate(scores: "NDArray[np.float64]", given: "NDArray[Any]") -> tuple[Figure, int]:
    """The disagreement among the most clearly predicted rows of each label, with its interval.

    How clearly a row is predicted does not depend on its own label. Half of the rows count; a quarter if
    the classifier's own errors show in the second quarter. Each label gives its own half: where one label was
    often written for another, no row of it is among the clearest of all. What the other rows hold is not
    known, so the upper end is that of the disagreement among all.
    """
    import numpy as np

    ordered = np.sort(scores, axis=1)
    margin = ordered[:, -1] - ordered[:, -2]
    predicted = scores.argmax(axis=1)
    wrong = predicted != given
    rank = np.empty(len(given))
    """How far down a row is among those of the same predicted label, from 0 to 1."""
    for label in np.unique(predicted):
        rows = np.flatnonzero(predicted == label)
        clearest = rows[np.argsort(-margin[rows], kind="stable")]
        rank[clearest] = (np.arange(len(rows)) + 0.5) / len(rows)
    half, quarter = rank < 0.5, rank < 0.25
    first = int(wrong[quarter].sum())
    second = int(wrong[half].sum()) - first
    judged = quarter if second - first > 1.64 * math.sqrt(first + second + 1) else half
    clear, rows_judged = wilson(int(wrong[judged].sum()), int(judged.sum())), int(judged.sum())
    high = max(clear.high, wilson(int(wrong.sum()), len(wrong)).high)
    return clear.model_copy(update={"high": high}), rows_judged


def wilson(count: int, of: int) -> Figure:
    """A share with its 95 % interval."""
    share, z = count / of, Z95
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    reach = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    low, high = max(0.0, middle - reach) if count else 0.0, min(1.0, middle + reach)
    return Figure(value=share, low=min(low, share), high=max(high, share))


def _near_pairs(similarity: "NDArray[np.float64]", rows: "NDArray[Any]") -> list[tuple[int, int]]:
    import numpy as np

    near = np.triu(similarity[np.ix_(rows, rows)] >= NEARLY_THE_SAME, k=1)
    return [(int(rows[a]), int(rows[b])) for a, b in zip(*np.nonzero(near), strict=True)]


def _suspects(
    scores: "NDArray[np.float64]",
    given: "NDArray[Any]",
    rows: "NDArray[Any]",
    names: Sequence[str],
    differ: Sequence[tuple[int, int]],
) -> list[Suspect]:
    import numpy as np

    other: dict[int, int] = {}
    for a, b in differ:
        other.setdefault(a, b)
        other.setdefault(b, a)
    best = scores.argmax(axis=1)
    ahead = scores[np.arange(len(rows)), best] - scores[np.arange(len(rows)), given[rows]]
    places = [at for at in np.argsort(-ahead, kind="stable") if ahead[at] > 0]
    return [
        Suspect(
            row=int(rows[at]),
            label=names[given[rows[at]]],
            suggested=names[best[at]],
            score=float(ahead[at]),
            near=other.get(int(rows[at])),
        )
        for at in places
    ]


FEWEST_LISTED, MOST_LISTED = 10, 60
QUESTION_CHARACTERS = 200
WORTH_A_WARNING = 0.02
"""A lower share of wrong labels, or one that may be zero, gives no finding."""


class _LabelledRows(NamedTuple):
    places: list[int]
    rows: list[Interaction]


def estimate_noise(facts: AuditFacts) -> LabelNoise:
    """Estimate over the rows that passed, each distinct row once."""
    chosen = _choose(facts)
    found = find_labels([row.reply for row in chosen.rows])
    if isinstance(found, str):
        return LabelNoise(why_not=found)
    prompts = Prompts([_prompt(row) for row in chosen.rows])
    fields: list[FieldNoise] = []
    suspicious: list[SuspiciousLabel] = []
    skipped: dict[str, str] = {}
    for labelled in found:
        judged = estimate_label_noise(prompts, labelled.labels)
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
    suspicious.sort(key=lambda item: -item.score)
    why = "" if fields else "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    return LabelNoise(
        fields=tuple(fields), suspicious=tuple(suspicious[:MOST_LISTED]), not_estimated=skipped, why_not=why
    )


def find_wrong_labels(noise: LabelNoise) -> Iterator[Finding]:
    """Yield a warning for each field whose share of wrong labels cannot be chance."""
    for field in noise.fields:
        if field.rate.value < WORTH_A_WARNING or field.rate.low <= 0:
            continue
        rows = [label for label in noise.suspicious if label.field == field.field]
        named = f"the field {field.field}" if field.field else "the reply"
        yield Finding(
            code="label_noise",
            severity="warning",
            count=round(field.rate.value * field.rows),
            rows=tuple(suspect.origin for suspect in rows),
            examples=tuple(
                Example(
                    origin=suspect.origin,
                    excerpt=f"{suspect.label}, probably {suspect.suggested}: {suspect.question}",
                )
                for suspect in rows
            ),
            title=f"about {field.rate.value:.0%} of the labels in {named} are wrong "
            f"({field.rate.low:.1%} to {field.rate.high:.1%})",
            effect="the model learns the errors, and even a perfect one cannot score above what is right",
            fix="review the rows that are listed, the most suspicious first, and correct the log",
        )


def _choose(facts: AuditFacts) -> _LabelledRows:
    import numpy as np

    places = np.flatnonzero(facts.passed & (facts.repeats.step != DUPLICATE))
    if len(places) > MOST_ROWS:
        places = places[np.linspace(0, len(places) - 1, MOST_ROWS).astype(np.int64)]
    rows = facts.read(places)
    return _LabelledRows(list(rows), list(rows.values()))


def _prompt(row: Interaction) -> str:
    """The text that differs from row to row: without the system prompt."""
    return "\n".join(message.content for message in row.messages if message.role != "system")


def _show(facts: AuditFacts, chosen: _LabelledRows, suspect: Suspect, field: str | None) -> SuspiciousLabel:
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
