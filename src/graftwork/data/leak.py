"""The proof that the held-out questions were not trained on.

In: the rows of each split, as they will be written. Out: nothing, or an error that names the pair
of rows. Looks again at what was written and does not trust how it was grouped.
"""

from collections.abc import Mapping, Sequence

from graftwork.data.question import alike_questions, find_questions
from graftwork.records.dataset import Row, Split
from graftwork.records.errors import AnswerIsNo
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.compare import content_key


def require_no_leak(splits: Mapping[Split, Sequence[Row]], *, threshold: float) -> None:
    """Refuse a dataset with the same or nearly the same question on both sides of a split."""
    rows = [(split, row) for split, members in splits.items() for row in members]
    questions = find_questions([_as_interaction(row) for _, row in rows])
    first: dict[str, int] = {}
    pairs = [
        (first.setdefault(content_key(question.turn), place), place)
        for place, question in enumerate(questions)
    ]
    alike = alike_questions(questions, threshold=threshold)
    pairs += [(pair.first, pair.second) for pair in alike]
    for one, other in pairs:
        if rows[one][0] != rows[other][0]:
            _refuse(rows[one][0], rows[one][1].origin, rows[other][0], rows[other][1].origin)


def _as_interaction(row: Row) -> Interaction:
    return Interaction(id=row.id, origin=row.origin, messages=row.messages, reply=row.reply)


def _refuse(split: Split, origin: Origin, other_split: Split, other: Origin) -> None:
    raise AnswerIsNo(
        f"a question stands in {split} and in {other_split}",
        why=f"{origin} and {other} ask the same: an evaluation on it would measure memory, not skill",
        fix="lower data.question_similarity, so that such questions are grouped",
        where=str(other),
    )
