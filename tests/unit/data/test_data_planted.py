"""The example's log has faults in known lines: every one must be found, and little else."""

import json
from pathlib import Path

import pytest

from graftwork.data.prepare import audit_files
from graftwork.text.words import normalize

LOGS = Path(__file__).parents[3] / "examples" / "cited_answers" / "logs"


@pytest.fixture(scope="module")
def found():
    report = audit_files(["interactions.jsonl"], root=LOGS)
    return {finding.code: {origin.line for origin in finding.rows} for finding in report.findings}


@pytest.fixture(scope="module")
def planted():
    return json.loads((LOGS / "PLANTED.json").read_text())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("failed", "failed_status"),
        ("personal", "personal_data"),
        ("placeholder", "placeholder"),
        ("secret", "secret"),
        ("truncated", "truncated"),
    ],
)
def test_planted_faults_are_found_and_nothing_else(found, planted, kind, code):
    assert found[code] == set(planted["faults"][kind])


def test_planted_conflicts_are_found_and_only_true_ones_next_to_them(found, planted):
    """A rewording that changes only case or punctuation asks the same; another answer is a conflict."""
    lines = [json.loads(line) for line in (LOGS / "interactions.jsonl").read_text().splitlines()]

    def reply_of(line):
        question, reply = (turn["content"] for turn in lines[line - 1]["messages"][-2:])
        return normalize(question), reply

    same_question: dict[str, set[int]] = {}
    for line in {line for group in planted["groups"]["reworded"] for line in group}:
        same_question.setdefault(reply_of(line)[0], set()).add(line)
    true_ones = {
        line
        for group in same_question.values()
        if len({reply_of(line)[1] for line in group}) > 1
        for line in group
    }
    assert found["conflicting_answers"] == set(planted["faults"]["conflicting"]) | true_ones


def test_planted_duplicates_are_found(found, planted):
    copies = set(planted["faults"]["exact_duplicate"])
    assert copies <= found["duplicate"]
    # Questions that were reworded in case and punctuation only are copies too.
    assert found["duplicate"] - copies <= set(planted["faults"]["reworded"])


def test_small_changes_of_wording_are_seen_as_the_same_question(found, planted):
    assert set(planted["details"]["reworded"]["small change of wording"]) <= found["split_leak"]


def test_questions_in_other_words_on_the_same_rare_sources_are_seen_as_the_same(found, planted):
    assert set(planted["details"]["reworded"]["asked in other words"]) <= found["split_leak"]
