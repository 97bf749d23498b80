"""Looks are judged alike before and after a crash, and only against looks over the same cases."""

import sample_plans
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.run import TrainingEvaluation
from graftwork.train.callbacks import (
    EvaluationHistory,
    count_comparable_cases,
    find_best_step,
    find_evaluation,
    log_evaluation,
    read_evaluations,
)

values = st.lists(st.floats(-10, 10), min_size=1, max_size=20)


def make_look(step, value, cases=8):
    return TrainingEvaluation(step=step, metric="loss", value=value, cases=cases, seconds=1.0)


def make_step(number, loss=1.0, weights="w"):
    return sample_plans.make_step(number, loss=loss, weights=weights)


@given(values, st.booleans())
def test_the_best_is_the_first_of_the_best_values(found, smaller):
    course = EvaluationHistory(smaller_is_better=smaller)
    judged = [course.add(make_look(step, value)) for step, value in enumerate(found, 1)]
    best = min(found) if smaller else max(found)
    assert course.best == best
    assert course.best_step == found.index(best) + 1
    assert course.since == len(found) - course.best_step
    assert find_best_step(tuple(judged)) == course.best_step


@given(values, st.integers(0, 20))
def test_a_course_that_was_interrupted_anywhere_ends_the_same(found, cut):
    whole, first = EvaluationHistory(smaller_is_better=True), EvaluationHistory(smaller_is_better=True)
    looks = [make_look(step, value) for step, value in enumerate(found, 1)]
    judged = [whole.add(look) for look in looks]
    again = [first.add(look) for look in looks[:cut]]
    second = EvaluationHistory(smaller_is_better=True)
    second.restore(first.state())
    again += [second.add(look) for look in looks[cut:]]
    assert again == judged
    assert second.state() == whole.state()


def test_a_look_over_fewer_cases_or_without_a_number_decides_nothing():
    course = EvaluationHistory(smaller_is_better=False)
    course.add(make_look(1, 0.5, cases=8))
    for odd in (make_look(2, 1.0, cases=7), make_look(3, float("nan"))):
        judged = course.add(odd)
        assert not judged.compared
        assert not judged.better
    assert (course.best_step, course.since) == (1, 0)


@given(st.integers(1, 50), st.integers(1, 50), st.none() | st.integers(1, 50))
def test_a_look_counts_at_least_one_case_and_never_more_than_were_finished(finished, more, common):
    counted = count_comparable_cases(finished, requested=finished + more - 1, common=common)
    assert 1 <= counted <= finished
    if common is not None:
        assert counted == min(finished, common)
    elif more > 1:
        assert counted == max(int(0.8 * finished), 1)
    else:
        assert counted == finished


def test_a_look_is_found_again_only_at_the_very_same_step(tmp_path):
    log_evaluation(tmp_path, make_look(4, 0.5), make_step(4))
    assert find_evaluation(tmp_path, make_step(4)) == make_look(4, 0.5)
    assert find_evaluation(tmp_path, make_step(4, loss=1.1)) is None
    assert find_evaluation(tmp_path, make_step(4, weights="other")) is None
    assert find_evaluation(tmp_path, make_step(4, weights="")) is not None, "not every step has a digest"
    assert find_evaluation(tmp_path, make_step(5)) is None
    assert find_evaluation(tmp_path / "elsewhere", make_step(4)) is None


def test_of_two_looks_at_one_step_the_last_holds(tmp_path):
    for value in (0.5, 0.25):
        log_evaluation(tmp_path, make_look(4, value), make_step(4, loss=value))
    log_evaluation(tmp_path, make_look(2, 0.75), make_step(2))
    assert [(look.step, look.value) for look in read_evaluations(tmp_path)] == [(2, 0.75), (4, 0.25)]
