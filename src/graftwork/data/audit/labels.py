"""Label noise: how many labels of a log are wrong, and which rows to review.

Input: prompts and replies. Output: an estimate with its interval, and the most suspicious rows. Applies where
replies are labels: few distinct replies, or JSON objects with fields of few distinct values.

Ridge regression over hashed n-grams of the prompt predicts every label from all other rows, in closed form.
Where the prediction is clear the classifier is hardly ever wrong, so the share of disagreeing labels there
estimates the share of wrong ones; the share among all rows bounds it. Labels that prompts do not predict are
not estimated, and the reason is given.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from graftwork.data.audit.findings import DUPLICATE, AuditFacts, shorten
from graftwork.records.base import Figure
from graftwork.records.dataset import Example, FieldNoise, Finding, LabelNoise, SuspiciousLabel
from graftwork.text.words import hash_terms, with_pairs, words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST_ROWS = 60
MOST_ROWS = 3000
"""More rows are thinned out evenly."""
MIN_PER_LABEL = 5
MOST_LABELS = 50
ROWS_PER_LABEL = 5
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


Suspect: TypeAlias = tuple[int, str, float, int | None]
"""A row by its position, the label that the others suggest, by how much that leads, and a row with nearly the
same prompt and another label.
"""


def find_labels(replies: Sequence[str]) -> dict[str | None, list[str]] | str:
    """Return the labels in these replies, or why there are none.

    One label per row, empty if a row has none, by the name of the field; None is the reply itself.
    """
    if len(replies) < FEWEST_ROWS:
        return f"{len(replies)} usable rows are too few, {FEWEST_ROWS} are needed"
    parsed = [_parse(reply) for reply in replies]
    objects = [value for value in parsed if value is not None]
    if len(objects) >= JSON_SHARE * len(replies):
        counts = Counter(name for value in objects for name in value)
        frequent = [name for name, count in counts.most_common() if count >= JSON_SHARE * len(replies)]
        fields: dict[str | None, list[str]] = {
            name: [_label((value or {}).get(name)) for value in parsed] for name in frequent
        }
        labeled = [name for name, labels in fields.items() if are_labels(labels)][:MOST_FIELDS]
        if labeled:
            return {name: fields[name] for name in labeled}
        return "no field of the JSON replies has few distinct values"
    whole = [" ".join(reply.split()) for reply in replies]
    if are_labels(whole):
        return {None: whole}
    distinct = len(set(whole))
    if distinct == 1:
        return "all replies are the same"
    return f"replies are free text ({distinct:,} distinct ones in {len(replies):,} rows)"


def are_labels(values: Sequence[str]) -> bool:
    """Whether these are few distinct short values, at least two of them frequent enough to predict."""
    counts = Counter(value for value in values if value)
    if not 2 <= len(counts) <= min(MOST_LABELS, len(values) // ROWS_PER_LABEL):
        return False
    frequent = sum(count >= MIN_PER_LABEL for count in counts.values())
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
        leverage = np.einsum("ij,j,ij->i", self._vectors, shrunk, self._vectors)
        left_out: NDArray[np.float64] = (
            targets - (targets - fitted) / np.maximum(1.0 - leverage, 1e-9)[:, None]
        )
        return left_out


def hash_ngrams(texts: Sequence[str]) -> "NDArray[np.float32]":
    """Hash words, pairs of words and runs of four characters, weighted by rarity, each row of length 1."""
    import numpy as np

    counts = np.zeros((len(texts), WIDTH), dtype=np.float32)
    for row, text in enumerate(texts):
        terms = words(text[-PROMPT_CHARACTERS:])
        line = " ".join(terms)
        runs = [f"#{line[start : start + 4]}" for start in range(max(len(line) - 3, 0))]
        hashed = hash_terms([*with_pairs(terms), *runs], WIDTH)
        counts[row, list(hashed)] = np.log1p(np.array(list(hashed.values()), dtype=np.float32))
    frequency = np.count_nonzero(counts, axis=0)
    # What occurs in every prompt carries no information.
    counts *= np.log((1 + len(texts)) / (1 + frequency)).astype(np.float32)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    normed: NDArray[np.float32] = counts / np.maximum(lengths, 1e-9)
    return normed


def estimate_label_noise(
    prompts: Prompts, field: str | None, labels: Sequence[str]
) -> tuple[FieldNoise, list[Suspect]] | str:
    """Return the estimate and the suspects, the likeliest first, or why there is no estimate."""
    import numpy as np

    counts = Counter(label for label in labels if label)
    names = sorted(label for label, count in counts.items() if count >= MIN_PER_LABEL)
    number = {name: index for index, name in enumerate(names)}
    label_numbers = np.array([number.get(label, -1) for label in labels])
    is_labeled = label_numbers >= 0
    if is_labeled.sum() < FEWEST_ROWS:
        return "too few rows have a label that occurs often enough"
    targets = np.zeros((len(labels), len(names)))
    targets[is_labeled, label_numbers[is_labeled]] = 1.0
    # Frequent labels must not win by being frequent.
    shares = targets[is_labeled].mean(axis=0)
    best: tuple[float, Any] | None = None
    for ridge in RIDGES:
        scores = prompts.predict(targets - shares * is_labeled[:, None], ridge=ridge)[is_labeled] + shares
        agreed = float((scores.argmax(axis=1) == label_numbers[is_labeled]).mean())
        if best is None or agreed > best[0] + 1e-12:
            best = agreed, scores
    assert best is not None
    agreement, scores = best
    if (kappa := _kappa(scores.argmax(axis=1), label_numbers[is_labeled], len(names))) < LEAST_AGREEMENT:
        return (
            f"the prompts do not predict it (agreement beyond chance {kappa:.0%}): the label needs more than "
            "the words of the prompt, or most labels are wrong"
        )
    rate, judged = _estimate(scores, label_numbers[is_labeled])
    rows = np.flatnonzero(is_labeled)
    near = np.triu(prompts.similarity[np.ix_(rows, rows)] >= NEARLY_THE_SAME, k=1)
    pairs = [(int(rows[a]), int(rows[b])) for a, b in zip(*np.nonzero(near), strict=True)]
    contradictions = [(a, b) for a, b in pairs if label_numbers[a] != label_numbers[b]]
    contradicts: dict[int, int] = {}
    for a, b in contradictions:
        contradicts.setdefault(a, b)
        contradicts.setdefault(b, a)
    noise = FieldNoise(
        field=field,
        rows=len(rows),
        labels=len(names),
        rate=rate,
        judged=judged,
        agreement=agreement,
        near_duplicates=len(pairs),
        contradictions=len(contradictions),
    )
    best_label = scores.argmax(axis=1)
    lead = scores[np.arange(len(rows)), best_label] - scores[np.arange(len(rows)), label_numbers[rows]]
    suspects: list[Suspect] = [
        (int(rows[index]), names[best_label[index]], float(lead[index]), contradicts.get(int(rows[index])))
        for index in np.argsort(-lead, kind="stable")
        if lead[index] > 0
    ]
    return noise, suspects


def _kappa(predicted: "NDArray[Any]", stated: "NDArray[Any]", labels: int) -> float:
    import numpy as np

    shares = [np.bincount(side, minlength=labels) / len(side) for side in (predicted, stated)]
    chance = float(shares[0] @ shares[1])
    agreed = float((predicted == stated).mean())
    return (agreed - chance) / (1 - chance) if chance < 1 else 0.0


def _estimate(scores: "NDArray[np.float64]", labels: "NDArray[Any]") -> tuple[Figure, int]:
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
    wrong = predicted != labels
    rank = np.empty(len(labels))
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


FEWEST_LISTED, MOST_LISTED = 10, 60
QUESTION_CHARACTERS = 200
MIN_WARNING_RATE = 0.02
"""A lower share of wrong labels, or one that may be zero, gives no finding."""


def estimate_noise(facts: AuditFacts) -> LabelNoise:
    """Estimate over the rows that passed, each distinct row once."""
    import numpy as np

    positions = np.flatnonzero(facts.passed & (facts.repeats.step != DUPLICATE))
    if len(positions) > MOST_ROWS:
        positions = positions[np.linspace(0, len(positions) - 1, MOST_ROWS).astype(np.int64)]
    rows = list(facts.read(positions).values())
    labeled = find_labels([row.reply for row in rows])
    if isinstance(labeled, str):
        return LabelNoise(why_not=labeled)
    # The system prompt does not differ from row to row.
    prompts = Prompts(
        ["\n".join(turn.content for turn in row.messages if turn.role != "system") for row in rows]
    )
    fields: list[FieldNoise] = []
    suspicious: list[SuspiciousLabel] = []
    skipped: dict[str, str] = {}
    for field, labels in labeled.items():
        judged = estimate_label_noise(prompts, field, labels)
        if isinstance(judged, str):
            skipped[field or "reply"] = judged
            continue
        noise, suspects = judged
        fields.append(noise)
        expected = math.ceil(1.5 * noise.rate.value * noise.rows)
        suspicious += [
            SuspiciousLabel(
                origin=rows[row].origin,
                field=field,
                label=labels[row],
                suggested=suggested,
                score=score,
                question=shorten(rows[row].question, QUESTION_CHARACTERS),
                near=None if near is None else rows[near].origin,
            )
            for row, suggested, score, near in suspects[: min(max(expected, FEWEST_LISTED), MOST_LISTED)]
        ]
    suspicious.sort(key=lambda item: -item.score)
    why = "" if fields else "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
    return LabelNoise(
        fields=tuple(fields), suspicious=tuple(suspicious[:MOST_LISTED]), not_estimated=skipped, why_not=why
    )


def find_wrong_labels(noise: LabelNoise) -> Iterator[Finding]:
    """Yield a warning for each field whose share of wrong labels cannot be chance."""
    for field in noise.fields:
        if field.rate.value < MIN_WARNING_RATE or field.rate.low <= 0:
            continue
        rows = [label for label in noise.suspicious if label.field == field.field]
        subject = f"the field {field.field}" if field.field else "the reply"
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
            title=f"about {field.rate.value:.0%} of the labels in {subject} are wrong "
            f"({field.rate.low:.1%} to {field.rate.high:.1%})",
            effect="the model learns the errors, and even a perfect model cannot score higher than the "
            "share of correct labels",
            fix="review the rows that are listed, the most suspicious first, and correct the log",
        )
