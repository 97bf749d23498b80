"""The prompted base: worked examples from the training split, chosen once and the same every time.

In: training rows and a budget of tokens. Out: a PromptVariant. No held-out row is ever shown.
"""

from collections.abc import Sequence

from graftwork.grading.answers import AnswerFields, read_answer
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message
from graftwork.records.release import PromptVariant

REFUSAL_FROM = 4
"""With so many examples the last may be a refusal, if the training rows have some."""


def choose_examples(
    rows: Sequence[Row], *, most: int, max_tokens: int, fields: AnswerFields
) -> PromptVariant:
    """Up to `most` rows that fit into `max_tokens` together: each role in turn, rows of usual length first.

    The first examples answer: a base that sees refusals first refuses.
    """
    answering = [row for row in rows if not _refuses(row, fields)]
    refusing = [row for row in rows if _refuses(row, fields)] if most >= REFUSAL_FROM else []
    ranked = _in_turn(answering or rows)
    chosen: list[Row] = []
    spent = 0
    for limit, some in ((most - 1 if refusing else most, ranked), (most, _in_turn(refusing)[:1])):
        for row in some:
            if len(chosen) < limit and spent + len(row.tokens) <= max_tokens:
                chosen.append(row)
                spent += len(row.tokens)
    examples: list[Message] = []
    for row in chosen:
        examples += [turn for turn in row.messages if turn.role != "system"]
        examples.append(Message(role="assistant", content=row.reply))
    return PromptVariant(examples=tuple(examples), rows=tuple(row.id for row in chosen))


def _refuses(row: Row, fields: AnswerFields) -> bool:
    answer = read_answer(row.reply, fields=fields)
    return answer is not None and bool(answer.refused)


def _in_turn(rows: Sequence[Row]) -> list[Row]:
    """One row of each role, then the second ones; within a role those nearest to its median length first."""
    by_role: dict[str, list[Row]] = {}
    for row in rows:
        by_role.setdefault(row.group or "", []).append(row)
    ranked: list[tuple[int, str, Row]] = []
    for role, own in by_role.items():
        lengths = sorted(len(row.tokens) for row in own)
        middle = lengths[(len(lengths) - 1) // 2]
        near = sorted(own, key=lambda row: (abs(len(row.tokens) - middle), row.id))
        ranked += [(turn, role, row) for turn, row in enumerate(near)]
    largest = {role: -len(own) for role, own in by_role.items()}
    ordered = sorted(ranked, key=lambda place: (place[0], largest[place[1]], place[1]))
    return [row for _, _, row in ordered]
