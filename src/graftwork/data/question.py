"""What a row asks, apart from what every row of its log repeats.

In: rows. Out: for each row its last user turn and the one line of it that asks. Instructions that
stand in many rows ("Answer in JSON.") ask nothing; which lines those are is learned from the rows,
not written here. The system prompt takes no part.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.records.interaction import Interaction
from graftwork.text.compare import Pair, alike_pairs, content_key, shingles
from graftwork.text.normalise import last_lines, normalise

# A line is an instruction when it stands in this share of the distinct turns, and in this many;
# a line that ends as a question may be a popular one and needs a larger share.
INSTRUCTION_SHARE = 0.05
INSTRUCTION_COUNT = 6
ASKING_SHARE = 0.3
# "Please look up X" holds "X": a line whose words stand in another to this degree asks the same.
CONTAINED = 0.9


class Question(NamedTuple):
    """The whole turn, and the line that asks."""

    turn: str
    line: str


def find_questions(rows: Sequence[Interaction]) -> list[Question]:
    turns = [row.question for row in rows]
    instructions = _find_instructions(turns)
    return [Question(turn, _find_line(turn, instructions)) for turn in turns]


def alike_questions(questions: Sequence[Question], *, threshold: float) -> list[Pair]:
    """Pairs that ask the same or nearly the same: by the asking line, or by the turn as a whole."""
    lines = [shingles(question.line, sizes=(1, 2)) for question in questions]
    words = [shingles(question.line, sizes=(1,)) for question in questions]
    pairs = alike_pairs(lines, threshold=threshold)
    held = alike_pairs(words, threshold=1, contained=max(CONTAINED, threshold))
    # A turn of one line is its own asking line: comparing it again would only be coarser.
    turns = [
        shingles(question.turn) if normalise(question.turn) != normalise(question.line) else frozenset[str]()
        for question in questions
    ]
    return sorted({*pairs, *held, *alike_pairs(turns, threshold=threshold)})


def _find_instructions(turns: Sequence[str]) -> frozenset[str]:
    distinct = {content_key(turn): turn for turn in turns}
    seen = Counter(
        line for turn in distinct.values() for line in {normalise(part) for part in last_lines(turn)}
    )
    asking = {
        normalise(part)
        for turn in distinct.values()
        for part in last_lines(turn)
        if part.endswith(("?", "？"))
    }
    return frozenset(
        line
        for line, count in seen.items()
        if count >= INSTRUCTION_COUNT
        and count >= len(distinct) * (ASKING_SHARE if line in asking else INSTRUCTION_SHARE)
    )


def _find_line(turn: str, instructions: frozenset[str]) -> str:
    lines = last_lines(turn)
    return next((line for line in lines if normalise(line) not in instructions), lines[0] if lines else "")
