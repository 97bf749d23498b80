"""The example's log has faults in known lines: every one must be found, and little else."""

import json
from pathlib import Path

import pytest

from graftwork.data.audit import audit

LOGS = Path(__file__).parents[3] / "examples" / "cited_answers" / "logs"


@pytest.fixture(scope="module")
def found():
    report = audit(["interactions.jsonl"], root=LOGS)
    return {finding.code: {origin.line for origin in finding.rows} for finding in report.findings}


@pytest.fixture(scope="module")
def planted():
    return json.loads((LOGS / "PLANTED.json").read_text())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("conflicting", "conflicting_answers"),
        ("failed", "failed_status"),
        ("personal", "personal_data"),
        ("placeholder", "placeholder"),
        ("secret", "secret"),
        ("truncated", "truncated"),
    ],
)
def test_planted_faults_are_found_and_nothing_else(found, planted, kind, code):
    assert found[code] == set(planted["faults"][kind])


def test_planted_duplicates_are_found(found, planted):
    copies = set(planted["faults"]["exact_duplicate"])
    assert copies <= found["duplicate"]
    # Questions that were reworded in case and punctuation only are copies too.
    assert found["duplicate"] - copies <= set(planted["faults"]["reworded"])


def test_small_changes_of_wording_are_seen_as_the_same_question(found, planted):
    assert set(planted["details"]["reworded"]["small change of wording"]) <= found["split_leak"]
