"""Whether an answer is the JSON that it should be.

In: a case, an answer, the names of the fields. Out: grades. Does not know what a right answer is.
"""

from typing import Any

from graftwork.grading.context import CannotGrade, Grade
from graftwork.grading.fields import AnswerFields, parse_json, read_document
from graftwork.grading.json_schema import fits
from graftwork.grading.patterns import PatternTooSlow
from graftwork.records.report import Case


def grade_json_valid(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The whole answer is one JSON object with the required keys."""
    document = read_document(text, fields=fields)
    return float(document is not None and document.complete)


def grade_schema_valid(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where `evaluate.fields.json_schema` is set: the whole answer is JSON that fits it."""
    return None if fields.json_schema is None else grade_by_schema(text, fields.json_schema)


def grade_by_schema(text: str, schema: dict[str, Any]) -> float:
    """The whole text is JSON, of any kind, that fits the schema."""
    parsed = parse_json(text)
    if not parsed:
        return 0.0
    try:
        return float(fits(parsed[0], schema))
    except PatternTooSlow as error:
        raise CannotGrade(str(error)) from error
