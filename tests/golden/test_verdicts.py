"""What the gate decides about 120 stored reports, alone, two together, and between sessions."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from compare import check

from graftwork.evaluate.gate.decide import GateCandidate, Surroundings, decide, decide_all, next_start
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.records.report import Report

STORED = Path(__file__).parent / "verdicts"


class Stored(NamedTuple):
    report: Report
    settings: GateSettings
    around: Surroundings


@pytest.fixture(scope="module")
def stored():
    lines = (json.loads(line) for line in (STORED / "reports.jsonl").read_text().splitlines())
    return [
        Stored(
            Report.model_validate(line["report"]),
            GateSettings.model_validate(line["settings"]),
            Surroundings(**line["around"]),
        )
        for line in lines
    ]


def test_every_stored_report_gets_the_verdict_it_got(stored, update_golden):
    verdicts = [decide(example.report, example.settings, around=example.around) for example in stored]
    assert len(verdicts) >= 100
    assert set(Counter(verdict.decision for verdict in verdicts)) == {
        "deploy",
        "iterate",
        "abort",
        "not_enough_evidence",
    }
    check(STORED / "alone.json", [verdict.model_dump(mode="json") for verdict in verdicts], update_golden)


def test_adapters_that_are_judged_together_get_the_verdicts_they_got(stored, update_golden):
    verdicts = [
        decide_all(
            {
                name: GateCandidate(example.report, example.settings, around=example.around)
                for name, example in zip("ab", pair, strict=True)
            }
        )
        for pair in zip(stored[:40:2], stored[1:40:2], strict=True)
    ]
    decided = [
        {name: [verdict.decision, verdict.reason] for name, verdict in pair.items()} for pair in verdicts
    ]
    check(STORED / "together.json", decided, update_golden)


def test_the_next_session_starts_where_it_started(stored, update_golden):
    by_cases = {len(example.report.candidate.metrics["json_valid"].scores): example for example in stored}
    starts = [
        next_start(
            by_cases[example.report.cases].report,
            example.report,
            example.settings,
            loss_before=1.0,
            loss_after=0.9,
        )
        for example in stored[:60]
    ]
    check(STORED / "next_start.json", [start.model_dump(mode="json") for start in starts], update_golden)
