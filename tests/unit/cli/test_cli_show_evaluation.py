"""The table after an evaluation."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from graftwork.records.report import SliceFigure
from graftwork.views.terminal import show

sys.path.insert(0, str(Path(__file__).parents[1] / "views"))
from evaluation_sample import make_evaluation


def shown(report, width=140):
    console = Console(width=width, file=StringIO())
    show(console, report)
    return "\n".join(line.strip() for line in console.file.getvalue().splitlines())


@pytest.fixture(scope="module")
def report():
    return make_evaluation().report


def test_every_subject_is_in_the_table_with_interval_pairs_and_both_ps(report):
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


def figure(part, before, after, *, n=20, metric="json_valid", by="group"):
    return SliceFigure(
        by=by,
        part=part,
        metric=metric,
        n=n,
        before=before,
        before_low=max(0, before - 0.2),
        before_high=min(1, before + 0.2),
        after=after,
        after_low=max(0, after - 0.2),
        after_high=min(1, after + 0.2),
        wins=max(0, round(n * (after - before))),
        losses=max(0, round(n * (before - after))),
        adjusted_p=0.04,
    )


MANY = (
    *(figure(f"part-{i}", 0.5, 0.55 + i / 100) for i in range(20)),
    figure("hurt", 0.6, 0.55),
    figure("tiny", 0.0, 1.0, n=4),
    figure("same", 0.5, 0.5),
    figure("cut", 0.1, 0.3, metric="truncated", by="length"),
)


@pytest.mark.parametrize("width", [80, 120])
def test_evaluation_shows_the_slices_that_differ_most_and_counts_the_rest(report, width):
    text = shown(report.model_copy(update={"slices": MANY}), width=width)
    lines = text.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("slice"))
    body = "\n".join(lines[head + 2 : lines.index("", head + 2)])
    rows = [line for line in body.splitlines() if "/" in line]
    assert len(rows) == 8
    # What got worse comes first: a larger share of answers that were cut off is worse, too.
    places = [body.index(part) for part in ("cut", "hurt", "part-19", "part-18")]
    assert places == sorted(places)
    assert "tiny" not in body
    assert "same" not in body
    assert "16 more figures of slices are on the page and in --json" in text.replace("\n", " ")
    assert all(len(line) <= width for line in lines)
    assert ("(30–70)" in body) == (width == 120)


def with_subjects(report, *names):
    """The report with more subjects, all compared with the candidate."""
    more = tuple(report.others[0].model_copy(update={"subject": name}) for name in names)
    pairs = [
        comparison
        for comparison in report.comparisons
        if comparison.candidate == "adapter" and comparison.baseline == "base"
    ]
    against = [
        pair.model_copy(update={"baseline": name, "p_value": 0.0039})
        for name in ("log", *names)
        for pair in pairs
    ]
    return report.model_copy(
        update={"others": (*report.others, *more), "comparisons": (*report.comparisons, *against)}
    )


MANY_NAMES = ("champion", "run:9f787ed2d1f5", "https://models.example.org/v1#some-large-model")


@pytest.mark.parametrize("width", [80, 100])
def test_no_name_and_no_p_is_cut_however_many_subjects_there_are(report, width):
    text = shown(with_subjects(report, *MANY_NAMES), width=width)
    lines = text.splitlines()
    rows = lines[: next(at for at, line in enumerate(lines) if line.startswith("won/lost:"))]
    assert "…" not in text
    assert sum("< 0.001" in line for line in rows) >= 2
    assert not any(line.split()[-1:] == ["<"] or "<  " in line for line in rows)
    assert all(len(line) <= width for line in lines)
    for name in ("base", "adapter", "log", *MANY_NAMES[:2]):
        assert sum(name in line.split() for line in rows) >= 2, name
    assert sum("0.0039" in line.split() for line in rows) >= 8
    metric = report.candidate.metrics["says_six"]
    line = next(
        line for line in rows[rows.index(next(r for r in rows if "says_six" in r)) :] if "adapter" in line
    )
    assert f"91.7 % ({100 * metric.low:.0f}–{100 * metric.high:.0f})" in line


@pytest.mark.parametrize("width", [80, 200])
def test_evaluation_names_metrics_without_a_figure_below_the_table(report, width):
    def without(subject):
        gone = {"n": 0, "successes": 0, "kind": "rate"}
        metrics = {**subject.metrics, "polite": subject.metrics["polite"].model_copy(update=gone)}
        return subject.model_copy(update={"metrics": metrics})

    pairs = tuple(
        comparison.model_copy(update={"n": 0, "wins": 0, "losses": 0, "p_value": 1.0})
        if comparison.metric == "polite"
        else comparison
        for comparison in report.comparisons
    )
    text = shown(
        report.model_copy(
            update={
                "baseline": without(report.baseline),
                "candidate": without(report.candidate),
                "others": tuple(map(without, report.others)),
                "comparisons": pairs,
                "slices": (),
            }
        ),
        width=width,
    )
    assert [line for line in text.splitlines() if "polite" in line] == [
        "no figure, because no case could be graded: polite"
    ]


def test_control_characters_in_a_name_are_not_obeyed(report):
    text = report.to_json().replace('"planner"', '"\\u001b[31mred[bold]"')
    assert "\x1b" not in shown(type(report).from_json(text))
