"""What is written for another tool: one subject, its cases, its answers, its grades."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftwork.records.report import Answer, Case, Metric, SubjectReport


class Export(NamedTuple):
    """`when` is the time that goes into the file, in ISO 8601 with its zone."""

    task: str
    cases: Sequence[Case]
    subject: SubjectReport
    answers: Sequence[Answer]
    cases_hash: str
    when: str
    version: str


def graded_metrics(subject: SubjectReport) -> dict[str, Metric]:
    """Those that grade each answer: the others have no place in these formats."""
    return {
        name: metric
        for name, metric in subject.metrics.items()
        if metric.scores and any(value is not None for value in metric.scores.values())
    }


def standard_error(values: Sequence[float]) -> float:
    """Of the mean, as both tools write it."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def own_facts(case: Case) -> dict[str, Any]:
    """What the other formats have no place for, so that a way back loses nothing."""
    facts = {"group": case.group, "domain": case.domain, "session": case.session}
    told: dict[str, Any] = {key: value for key, value in facts.items() if value is not None}
    return {**told, "file": case.origin.file, "line": case.origin.line}


def write_json(document: Any, *, indent: int | None = None) -> str:
    """Half characters, which a model may write and no reader takes, become the sign for a broken one."""
    return re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(document, ensure_ascii=False, indent=indent))
