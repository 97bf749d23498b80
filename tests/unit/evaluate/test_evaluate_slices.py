"""The same figures on parts of the cases."""

import pytest
from gate_samples import new_case, new_generation

from graftwork.evaluate.report import MOST_PARTS, REST, cut_cases, make_metric, make_report, slice_report
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.significance import mcnemar
from graftwork.records.report import SubjectReport


def make_case(i, **more):
    given = {"group": "ab"[i % 2], "text": "x" * (10 * (i + 1))} | more
    return new_case(f"c{i}", given.pop("text"), "r", **given)


def make_subject(name, scores):
    generation = new_generation(name, answers=len(scores))
    metric = make_metric("answer_match", scores={f"c{i}": value for i, value in enumerate(scores)})
    return SubjectReport(subject=name, metrics={"answer_match": metric}, generation=generation)


def report_of(cases, before, after):
    return make_report(
        cases,
        baseline=make_subject("base", before),
        candidate=make_subject("adapter", after),
        settings=EvaluateSettings(),
    )


def test_each_part_has_its_own_exact_interval_and_pairs():
    cases = [make_case(i) for i in range(12)]
    before = [0.0] * 12
    after = [1.0 if i % 2 == 0 else 0.0 for i in range(12)]
    figures = slice_report(report_of(cases, before, after), cases, by=("role",)).slices
    better, same = figures
    assert (better.by, better.part, better.n, better.wins, better.losses) == ("group", "a", 6, 6, 0)
    assert (better.after_low, better.after_high) == pytest.approx(clopper_pearson(6, n=6))
    assert better.p_value == pytest.approx(mcnemar(6, losses=0))
    assert better.adjusted_p == pytest.approx(2 * mcnemar(6, losses=0))
    assert (same.part, same.wins, same.losses, same.p_value) == ("b", 0, 0, 1.0)


def test_the_parts_hold_every_case_once():
    cases = [make_case(i, domain=f"d{i % 5}") for i in range(30)]
    report = report_of(cases, [0.0] * 30, [1.0] * 30)
    sliced = slice_report(report, cases, by=("group", "domain", "length", "role"))
    assert list(sliced.cuts) == ["group", "domain", "length"]
    for cut in sliced.cuts:
        assert set(sliced.cuts[cut]) == {case.id for case in cases}
        assert sum(figure.n for figure in sliced.slices if figure.by == cut) == 30


def test_lengths_are_cut_in_thirds_and_listed_from_short_to_long():
    cases = [make_case(i) for i in range(9)]
    report = report_of(cases, [0.0] * 9, [1.0] * 9)
    figures = slice_report(report, cases, by=("length",)).slices
    assert [figure.part for figure in figures] == [
        "under 40 characters",
        "40 to 69 characters",
        "70 characters and more",
    ]
    assert [figure.n for figure in figures] == [3, 3, 3]


@pytest.mark.parametrize("by", ["group", "domain", "length", "session"])
def test_a_field_with_one_value_makes_no_slices(by):
    cases = [make_case(i, group="one", domain=None, text="same") for i in range(8)]
    assert cut_cases(cases, by=(by,)) == {}


def test_many_small_parts_are_put_together():
    cases = [make_case(i, domain=f"d{i // 2 if i < 40 else i}") for i in range(60)]
    parts = cut_cases(cases, by=("domain",))["domain"]
    assert len(set(parts.values())) == MOST_PARTS
    assert REST in parts.values()


def test_cases_of_one_session_get_no_p_of_their_own():
    cases = [make_case(i, session="s") for i in range(8)]
    figures = slice_report(report_of(cases, [0.0] * 8, [1.0] * 8), cases, by=("group",)).slices
    assert [figure.p_value for figure in figures] == [None, None]
    assert [figure.wins for figure in figures] == [4, 4]
