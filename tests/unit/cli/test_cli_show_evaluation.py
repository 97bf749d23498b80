"""The table after an evaluation."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from graftwork.cli.show.evaluation import show_report

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from evaluation_sample import make_evaluation


def shown(report, width=140):
    console = Console(width=width, file=StringIO())
    show_report(console, report)
    return "\n".join(line.strip() for line in console.file.getvalue().splitlines())


@pytest.fixture(scope="module")
def report():
    return make_evaluation().report


def test_every_subject_stands_in_the_table_with_interval_pairs_and_both_ps(report):
    text = shown(report)
    head = next(line for line in text.splitlines() if "won/lost" in line)
    assert [word for word in ("base", "adapter", "log", "p, corrected") if word not in head] == []
    row = next(line for line in text.splitlines() if line.startswith("says_six"))
    pair = next(c for c in report.comparisons if c.metric == "says_six" and c.candidate == "adapter")
    assert f"{pair.wins}/{pair.losses}" in row
    assert "91.7 %" in row
    below = text.splitlines()[text.splitlines().index(row) + 1]
    metric = report.candidate.metrics["says_six"]
    assert f"({100 * metric.low:.0f}–{100 * metric.high:.0f})" in below


def test_what_the_cases_can_show_is_said(report):
    assert report.power.sentence[:60] in shown(report, width=300)


def test_the_first_metric_is_shown_part_by_part(report):
    text = shown(report)
    assert "by role" in text
    assert "by domain" in text
    planner = next(line for line in text.splitlines() if line.startswith("planner"))
    assert " 6 " in planner


def test_a_worn_test_set_is_said_to_be_so_and_a_fresh_one_is_not(report):
    assert "looked at" not in shown(report, width=300)
    worn = shown(make_evaluation(looks=14, candidates=14).report, width=300)
    assert "looked at 14 times, with 14 different candidates" in worn
    assert "worn out" in worn


def test_what_a_name_says_to_a_terminal_is_not_obeyed(report):
    text = report.to_json().replace('"planner"', '"\\u001b[31mred[bold]"')
    assert "\x1b" not in shown(type(report).from_json(text))
