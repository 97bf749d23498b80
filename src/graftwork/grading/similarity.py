"""How near an answer is to the reference, without a model: words, letters, runs of letters.

In: a case, an answer, the names of the fields. Out: scores from 0 to 1. They apply where the reference
holds an answer in words. Nearness is not rightness: "six" and "seven" share most of a sentence.
"""

import re
from collections import Counter

from graftwork.grading.citations import answerable
from graftwork.grading.context import Grade
from graftwork.grading.fields import MISSING, AnswerFields, look_up, parse_object, read_answer
from graftwork.grading.words import shared_words, words_of
from graftwork.records.report import Case

SAME_WORDS_F1 = 0.6
"""Answers that share this much of their words count as the same answer."""
CHRF_LONGEST = 6
CHRF_BETA = 2.0
"""chrF as its authors advise: runs of one to six letters, recall twice as weighty as precision."""


def grade_answer_match(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference answers: the answer holds its words, or shares most of them."""
    reference = answerable(case, fields)
    if reference is None or not (expected := words_of(reference.answer)):
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused:
        return 0.0
    given = words_of(answer.answer)
    return float(_holds(given, expected) or shared_words(given, expected) >= SAME_WORDS_F1)


def grade_token_f1(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The F1 of the words that answer and reference share."""
    expected = expected_text(case, fields)
    if expected is None or not (wanted := words_of(expected)):
        return None
    return shared_words(words_of(given_text(case, text, fields)), wanted)


def grade_edit_similarity(case: Case, text: str, fields: AnswerFields) -> Grade:
    """1 less the edits from one text to the other, over the length of the longer one."""
    expected = expected_text(case, fields)
    return None if expected is None else edit_similarity(given_text(case, text, fields), expected)


def grade_chrf(case: Case, text: str, fields: AnswerFields) -> Grade:
    """chrF: runs of one to six letters in common; kind to inflected and compound words."""
    expected = expected_text(case, fields)
    return None if expected is None else chrf(given_text(case, text, fields), expected)


def expected_text(case: Case, fields: AnswerFields) -> str | None:
    """The words of the reference; the whole of it where it is no structured answer."""
    reference = None if _is_bare(case, fields) else read_answer(case.reference, fields=fields)
    if reference is None:
        return case.reference if case.reference.strip() else None
    return reference.answer if not reference.refused and reference.answer.strip() else None


def given_text(case: Case, text: str, fields: AnswerFields) -> str:
    """The words of the answer, read as the reference was; nothing where it refuses or cannot be read."""
    if _is_bare(case, fields) or read_answer(case.reference, fields=fields) is None:
        return text
    answer = read_answer(text, fields=fields)
    return "" if answer is None or answer.refused else answer.answer


def _is_bare(case: Case, fields: AnswerFields) -> bool:
    """Whether the reference is JSON without an answer in words, such as a label: then all of it counts."""
    document = parse_object(case.reference) if fields.form == "json" else None
    if document is None or look_up(document, fields.refused) is True:
        return False
    return look_up(document, fields.answer) is MISSING


def edit_similarity(given: str, expected: str) -> float:
    longest = max(len(given), len(expected))
    return 1 - edit_distance(given, expected) / longest if longest else 1.0


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's distance, a column at a time in the bits of one integer (Myers 1999, Hyyrö 2001)."""
    if not a:
        return len(b)
    positions: dict[str, int] = {}
    for index, char in enumerate(a):
        positions[char] = positions.get(char, 0) | 1 << index
    full, last = (1 << len(a)) - 1, 1 << len(a) - 1
    up, down, distance = full, 0, len(a)
    for char in b:
        here = positions.get(char, 0)
        vertical = here | down
        diagonal = (((here & up) + up) ^ up) | here
        right = down | (~(diagonal | up) & full)
        left = up & diagonal
        if right & last:
            distance += 1
        elif left & last:
            distance -= 1
        right = (right << 1 | 1) & full
        left = (left << 1) & full
        up = left | (~(vertical | right) & full)
        down = right & vertical
    return distance


def chrf(given: str, expected: str) -> float:
    """The F of mean precision and mean recall over the orders that both texts are long enough for."""
    one, two = re.sub(r"\s+", "", given), re.sub(r"\s+", "", expected)
    precisions, recalls = [], []
    for length in range(1, CHRF_LONGEST + 1):
        ours, theirs = _runs(one, length), _runs(two, length)
        if not ours or not theirs:
            break
        shared = sum((ours & theirs).values())
        precisions.append(shared / ours.total())
        recalls.append(shared / theirs.total())
    precision, recall = sum(precisions), sum(recalls)
    if not precision or not recall:
        return 0.0
    orders, weight = len(precisions), CHRF_BETA**2
    precision, recall = precision / orders, recall / orders
    return min(1.0, (1 + weight) * precision * recall / (weight * precision + recall))


def _runs(text: str, length: int) -> Counter[str]:
    return Counter(text[i : i + length] for i in range(len(text) - length + 1))


def _holds(given: list[str], expected: list[str]) -> bool:
    width = len(expected)
    return any(given[i : i + width] == expected for i in range(len(given) - width + 1))
