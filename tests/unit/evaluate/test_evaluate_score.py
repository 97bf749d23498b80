"""Answers counted and compared: repeats, sessions, scores, margins, several candidates."""

import math

import pytest
from gate_samples import new_answer, new_case, new_generation

from graftwork.evaluate.comparison import compare, compare_candidates, compare_with_best
from graftwork.evaluate.report import make_metric, make_report, score
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.means import (
    bounded_difference,
    make_units,
    mean_differs,
    paired_difference,
)
from graftwork.evaluate.statistics.significance import mcnemar
from graftwork.grading.interface import FailedGrade
from graftwork.grading.metrics import FIRST_TOKEN, LATENCY, PERPLEXITY, TRUNCATED
from graftwork.records.errors import UserError
from graftwork.records.report import Report, SubjectReport

SETTINGS = EvaluateSettings(metrics=("json_valid",))
RIGHT = '{"answer": "yes", "citations": [1]}'


def make_case(i, session=None):
    return new_case(f"c{i}", f"Is {i} so?", RIGHT, session=session)


def make_answer(case, text, finish="stop"):
    return new_answer(case.id, text, finish_reason=finish)


def make_generation(subject="adapter", latency=()):
    return new_generation(subject, single_latency_seconds=latency)


def subject_of(name, values, *, metric="similarity", latency=(), sessions=None):
    scores = {f"c{i}": value for i, value in enumerate(values)}
    return SubjectReport(
        subject=name,
        metrics={metric: make_metric(metric, scores=scores, sessions=sessions)},
        generation=make_generation(name, latency),
    )


def sessions_of(count, size):
    return {f"c{i}": f"s{i // size}" for i in range(count)}


def test_repeats_are_averaged_and_never_counted():
    cases = [make_case(i) for i in range(10)]
    answers = [make_answer(case, text) for case in cases for text in (RIGHT, RIGHT, RIGHT)]
    report = score(cases, answers=answers, generation=make_generation(), settings=SETTINGS)
    rate = report.metrics["json_valid"]
    assert (rate.n, rate.successes, rate.kind) == (10, 10, "rate")
    assert (rate.low, rate.high) == clopper_pearson(10, n=10)
    answers[0] = make_answer(cases[0], "no JSON")
    report = score(cases, answers=answers, generation=make_generation(), settings=SETTINGS)
    metric = report.metrics["json_valid"]
    assert metric.scores["c0"] == pytest.approx(2 / 3)
    assert (metric.n, metric.kind, metric.successes) == (10, "score", None)
    assert metric.value == pytest.approx(29 / 30)
    # One imperfect case of ten must not look surer than ten perfect ones.
    assert metric.low < rate.low


def test_a_cut_off_repeat_counts_for_its_share():
    case = make_case(0)
    answers = [make_answer(case, RIGHT), make_answer(case, RIGHT, finish="length")]
    report = score([case], answers=answers, generation=make_generation(), settings=SETTINGS)
    assert report.metrics[TRUNCATED].value == 0.5


def test_a_case_without_an_answer_is_a_mistake():
    cases = [make_case(0), make_case(1)]
    with pytest.raises(UserError, match="1 of 2 cases"):
        score(cases, answers=[make_answer(cases[0], RIGHT)], generation=make_generation(), settings=SETTINGS)


def test_cases_of_one_session_widen_the_interval():
    alone = [make_case(i, session=f"s{i}") for i in range(30)]
    together = [make_case(i, session=f"s{i // 3}") for i in range(30)]
    reports = []
    for cases in (alone, together):
        answers = [make_answer(case, RIGHT if i >= 6 else "x") for i, case in enumerate(cases)]
        found = score(cases, answers=answers, generation=make_generation(), settings=SETTINGS)
        reports.append(found.metrics["json_valid"])
    plain, clustered = reports
    assert (plain.low, plain.high) == clopper_pearson(24, n=30)
    assert plain.clusters == 0
    assert clustered.clusters == 10
    assert clustered.low < plain.low
    assert clustered.successes == 24
    assert clustered.method.endswith("by session")


def test_a_score_gets_an_interval_of_its_own_and_no_successes():
    metric = make_metric("similarity", scores={f"c{i}": 0.3 + 0.02 * i for i in range(30)} | {"x": None})
    assert metric.kind == "score"
    assert metric.successes is None
    assert metric.n == 30
    assert metric.value == pytest.approx(0.59)
    assert metric.low < metric.value < metric.high
    assert metric.high - metric.low < 0.18


def test_numbers_that_are_no_grades_are_numbers():
    metric = make_metric("perplexity", scores={"a": 3.0, "b": 5.0, "c": 9.0})
    assert metric.kind == "number"
    assert 3 <= metric.low <= metric.value <= metric.high <= 9


def test_no_grade_at_all_is_a_rate_of_which_nothing_is_known():
    metric = make_metric("similarity", scores={"a": None})
    assert (metric.n, metric.low, metric.high) == (0, 0.0, 1.0)


def test_right_and_wrong_are_compared_by_mcnemars_exact_test():
    base = subject_of("base", [0.0] * 8 + [1.0] * 23)
    better = subject_of("adapter", [1.0] * 8 + [0.0] + [1.0] * 22)
    (found,) = compare(base, candidate=better)
    assert (found.wins, found.losses, found.n) == (8, 1, 31)
    assert (found.low, found.high) == paired_difference(8, losses=1, n=31)
    assert found.p_value == mcnemar(8, losses=1)
    assert (found.test, found.clusters) == ("exact McNemar", 0)


def test_sessions_are_compared_as_wholes():
    before, after = [0.0] * 12 + [1.0] * 12, [1.0] * 24
    sessions = sessions_of(24, 6)
    base, better = subject_of("base", before), subject_of("adapter", after)
    (plain,) = compare(base, candidate=better)
    (found,) = compare(base, candidate=better, sessions=sessions)
    assert plain.p_value < 0.001
    assert found.p_value == pytest.approx(0.5)
    assert found.clusters == 4
    assert found.test == "bounded-mean test by session"
    clusters = [sessions[f"c{i}"] for i in range(24)]
    assert (found.low, found.high) == bounded_difference(before, after, clusters)
    assert (found.wins, found.losses) == (12, 0)


def test_sessions_of_one_case_each_change_nothing():
    base, better = subject_of("base", [0.0, 1.0] * 15), subject_of("adapter", [1.0] * 30)
    assert compare(base, candidate=better, sessions=sessions_of(30, 1)) == compare(base, candidate=better)


def test_scores_are_compared_by_the_mean_of_bounded_values():
    before = [0.3 + 0.01 * (i % 7) for i in range(20)]
    after = [value + 0.4 + 0.003 * (i % 5) for i, value in enumerate(before)]
    (found,) = compare(subject_of("base", before), candidate=subject_of("adapter", after))
    assert found.test == "bounded-mean test"
    assert found.p_value == mean_differs(make_units([b - a for a, b in zip(before, after, strict=True)]))
    assert (found.wins, found.losses) == (20, 0)
    assert 0 < found.low < found.difference < found.high < 0.55


def test_only_cases_that_both_were_graded_on_are_compared():
    base = subject_of("base", [1.0, None, 0.0, 1.0])
    (found,) = compare(base, candidate=subject_of("adapter", [1.0, 1.0, None, 0.0]))
    assert (found.n, found.wins, found.losses) == (2, 0, 1)


def test_latency_is_compared_by_the_median_of_the_differences():
    slow, fast = (1.0, 1.2, 0.9, 1.1, 1.3, 1.0), (0.5, 0.6, 0.5, 0.5, 0.7, 0.6)
    base = subject_of("base", [1.0], latency=slow)
    found = compare(base, candidate=subject_of("adapter", [1.0], latency=fast))[-1]
    assert found.metric == LATENCY
    assert found.low <= found.difference <= found.high < 0
    assert (found.wins, found.p_value, found.test) == (6, mcnemar(6, losses=0), "sign test")


def answers_with_losses(cases, losses):
    return [
        make_answer(case, RIGHT).model_copy(update={"reference_loss": loss})
        for case, loss in zip(cases, losses, strict=True)
    ]


def test_perplexity_is_that_of_the_mean_loss_and_compared_by_losses():
    cases = [make_case(i) for i in range(12)]
    before = [1.0 + 0.1 * i for i in range(12)]
    after = [loss - 0.3 - 0.01 * i for i, loss in enumerate(before)]
    base, better = (
        score(
            cases,
            answers=answers_with_losses(cases, losses),
            generation=make_generation(name),
            settings=SETTINGS,
        )
        for name, losses in (("base", before), ("adapter", after))
    )
    assert base.metrics[PERPLEXITY].value == pytest.approx(math.exp(sum(before) / 12))
    found = next(c for c in compare(base, candidate=better) if c.metric == PERPLEXITY)
    gone = better.metrics[PERPLEXITY].value - base.metrics[PERPLEXITY].value
    assert found.difference == pytest.approx(gone)
    assert found.low < gone < found.high < 0
    assert (found.wins, found.losses) == (12, 0)
    assert found.p_value == 2 / 2**12


def test_a_figure_that_a_subject_does_not_report_is_left_out_and_not_zero():
    case = make_case(0)
    untold = make_generation().model_copy(update={"peak_memory_gib": 0.0, "tokens_per_second": 0.0})
    found = score([case], answers=[make_answer(case, RIGHT)], generation=untold, settings=SETTINGS)
    assert set(found.metrics) == {"json_valid", TRUNCATED, "tokens_per_task"}


def test_the_first_token_is_timed_and_compared_where_it_was_seen():
    seconds = (0.2, 0.3, 0.25)
    case = make_case(0)
    timed = make_generation().model_copy(update={"first_token_seconds": seconds})
    found = score([case], answers=[make_answer(case, RIGHT)], generation=timed, settings=SETTINGS)
    assert found.metrics[FIRST_TOKEN].value == 0.25
    comparison = next(c for c in compare(found, candidate=found) if c.metric == FIRST_TOKEN)
    assert comparison.difference == 0


def test_checks_of_the_settings_are_graded_and_a_failing_grader_is_reported():
    settings = EvaluateSettings(metrics=("token_f1",), checks=({"name": "says_yes", "contains": "yes"},))
    cases = [make_case(i) for i in range(3)]
    answers = [make_answer(case, RIGHT) for case in cases]
    found = score(cases, answers=answers, generation=make_generation(), settings=settings).metrics
    assert found["says_yes"].successes == 3
    assert found["token_f1"].kind == "score"
    broken = [case.model_copy(update={"checks": ({"nonsense": 1},)}) for case in cases[:1]] + cases[1:]
    settings = EvaluateSettings(metrics=("task_success",))
    metric = score(broken, answers=answers, generation=make_generation(), settings=settings).metrics[
        "task_success"
    ]
    assert (metric.n, metric.failed) == (0, 1)
    assert "checks.0" in metric.why_failed


def test_a_case_of_which_one_repeat_could_not_be_graded_has_no_grade(monkeypatch):
    def grade(name, case, text, *, context):
        if text == "crashes":
            context.failed.append(FailedGrade(name, case.id, "it crashed"))
            return None
        return 1.0

    monkeypatch.setattr("graftwork.evaluate.report.grade", grade)
    cases = [make_case(0), make_case(1)]
    sampled = EvaluateSettings(metrics=("json_valid",), repeats=2, sampling={"temperature": 1.0})
    texts = [(cases[0], RIGHT), (cases[0], "crashes"), (cases[1], RIGHT), (cases[1], RIGHT)]
    answers = [
        make_answer(case, text).model_copy(update={"repeat": at % 2}) for at, (case, text) in enumerate(texts)
    ]
    metric = score(cases, answers=answers, generation=make_generation(), settings=sampled).metrics[
        "json_valid"
    ]
    assert (metric.n, metric.failed) == (1, 1)


@pytest.mark.parametrize(("count", "reported"), [(4, "range of 4: holds the median in 88%"), (6, "exact")])
def test_few_requests_do_not_claim_to_bound_their_median(count, reported):
    timed = make_generation(latency=tuple(1.0 + at for at in range(count)))
    found = score(
        [make_case(0)], answers=[make_answer(make_case(0), RIGHT)], generation=timed, settings=SETTINGS
    )
    assert found.metrics[LATENCY].method.startswith(reported)


def test_several_candidates_are_corrected_for():
    base = subject_of("base", [0.0] * 8 + [1.0] * 12)
    good, luck = subject_of("good", [1.0] * 20), subject_of("luck", [1.0] * 6 + [0.0] * 2 + [1.0] * 12)
    found = compare_candidates(base, candidates=(good, luck))
    by_name = {c.candidate: c for c in found}
    assert by_name["good"].adjusted_p == 2 * by_name["good"].p_value
    assert by_name["luck"].adjusted_p == by_name["luck"].p_value == mcnemar(6, losses=0)


def test_what_is_compared_with_the_best_is_corrected_for_all_pairs():
    worst, best = subject_of("worst", [0.0] * 16 + [1.0] * 4), subject_of("best", [1.0] * 20)
    near = subject_of("near", [0.0] * 2 + [1.0] * 18)
    found, to_best = compare_with_best((worst, best, near), metric="similarity")
    assert found == "best"
    assert list(to_best) == ["near", "worst"]
    assert to_best["worst"].difference == -0.8
    assert to_best["worst"].adjusted_p == 3 * mcnemar(0, losses=16)
    assert to_best["near"].adjusted_p == mcnemar(0, losses=2)
    (plain,) = compare(best, candidate=worst)
    assert to_best["worst"].low < plain.low
    assert to_best["worst"].high > plain.high


def test_of_equals_the_first_is_called_the_best():
    subjects = [subject_of(name, [0.0, 1.0]) for name in ("first", "second")]
    found, to_best = compare_with_best(subjects, metric="similarity")
    assert found == "first"
    assert to_best["second"].adjusted_p == 1.0


def test_a_report_puts_the_candidate_first_and_holds_the_others():
    cases = [make_case(i, session=f"s{i // 2}") for i in range(20)]
    subjects = [
        subject_of(name, values, metric="json_valid")
        for name, values in [
            ("base", [0.0] * 10 + [1.0] * 10),
            ("adapter", [1.0] * 20),
            ("champion", [0.0] * 4 + [1.0] * 16),
            ("other", [0.0] * 12 + [1.0] * 8),
        ]
    ]
    base, candidate, champion, other = subjects
    report = make_report(
        cases, baseline=base, candidate=candidate, champion=champion, others=(other,), settings=SETTINGS
    )
    sides = [(c.baseline, c.candidate) for c in report.comparisons]
    assert sides == [("base", "adapter"), ("champion", "adapter"), ("base", "other")]
    assert [s.subject for s in report.others] == ["champion", "other"]
    assert report.champion == "champion"
    assert report.comparisons[0].adjusted_p is not None
    assert report.comparisons[1].adjusted_p is None
    assert report.sessions["c3"] == "s1"
    assert report.power is not None
    assert "20 cases, worth" in report.power.sentence
    assert Report.from_json(report.to_json()) == report
