"""Paired tests against published tables, scipy, and brute force."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from graftwork.evaluate.statistics import significance as flips
from graftwork.evaluate.statistics.significance import mcnemar, paired_permutation

grades = st.sampled_from([0.0, 1.0])
fractions = st.sampled_from([0.0, 1 / 3, 0.5, 2 / 3, 1.0])
any_score = st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 6))


def lists_of_pairs(values, most):
    return st.lists(st.tuples(values, values), min_size=1, max_size=most)


@pytest.mark.parametrize(("wins", "losses", "exact"), [(1, 7, 0.0703), (6, 16, 0.0525)])
def test_mcnemar_gives_the_published_p(wins, losses, exact):
    """Fagerland, Lydersen, Laake, BMC Medical Research Methodology 13:91 (2013): the two examples."""
    assert mcnemar(wins, losses=losses) == pytest.approx(exact, abs=5e-5)


@given(lists_of_pairs(grades, 60))
def test_sign_flips_of_right_and_wrong_are_mcnemars_exact_test(pairs):
    a, b = zip(*pairs, strict=True)
    wins, losses = sum(y > x for x, y in pairs), sum(y < x for x, y in pairs)
    assert paired_permutation(a, b) == pytest.approx(mcnemar(wins, losses=losses), rel=1e-12)


@settings(max_examples=60)
@given(st.one_of(lists_of_pairs(any_score, 9), lists_of_pairs(fractions, 9)), st.data())
def test_sign_flips_are_what_trying_every_flip_gives(pairs, data):
    a, b = zip(*pairs, strict=True)
    clusters = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=len(a), max_size=len(a)))
    which = clusters if clusters is not None else list(range(len(a)))
    sums = {}
    for cluster, old, new in zip(which, a, b, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + new - old
    seen = abs(sum(sums.values()))
    ways = list(itertools.product((1, -1), repeat=len(sums)))
    far = sum(
        abs(sum(s * v for s, v in zip(signs, sums.values(), strict=True))) >= seen - 1e-9 for signs in ways
    )
    assert paired_permutation(a, b, clusters=clusters) == pytest.approx(far / len(ways), rel=1e-9)


def test_sign_flips_agree_with_scipy():
    draw = random.Random(3)
    a = [draw.random() for _ in range(12)]
    b = [x + draw.gauss(0.1, 0.2) for x in a]
    theirs = stats.permutation_test(
        (b, a), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", n_resamples=1 << 13
    ).pvalue
    assert paired_permutation(a, b) == pytest.approx(theirs, rel=1e-9)


def test_random_flips_come_near_the_exact_p_and_repeat(monkeypatch):
    draw = random.Random(4)
    a = [draw.random() for _ in range(30)]
    b = [x + draw.gauss(0.06, 0.2) for x in a]
    exact = paired_permutation(a, b)
    monkeypatch.setattr(flips, "EXACT_FLIPS", 0)
    first = paired_permutation(a, b)
    assert first == pytest.approx(exact, abs=0.01)
    assert first == paired_permutation(a, b)


def test_the_normal_limit_of_very_many_flips_is_near_the_random_ones(monkeypatch):
    draw = random.Random(5)
    a = [draw.random() for _ in range(1500)]
    b = [x + draw.gauss(0.01, 0.3) for x in a]
    limit = paired_permutation(a, b)
    monkeypatch.setattr(flips, "MANY_FLIPS", 10_000)
    assert limit == pytest.approx(paired_permutation(a, b, resamples=4000), abs=0.03)


def test_random_flips_never_give_a_p_of_zero(monkeypatch):
    monkeypatch.setattr(flips, "EXACT_FLIPS", 0)
    a, b = [0.001 * i for i in range(80)], [0.5 + 0.00137 * i for i in range(80)]
    assert paired_permutation(a, b, resamples=99) == 1 / 100


def test_cases_of_one_session_count_as_one():
    """Twelve wins in two sessions are two observations, not twelve."""
    a, b = [0.0] * 12, [1.0] * 12
    assert paired_permutation(a, b) < 0.001
    assert paired_permutation(a, b, clusters=[1] * 6 + [2] * 6) == 0.5


def test_no_difference_at_all_is_no_evidence():
    assert paired_permutation([], []) == 1.0
    assert paired_permutation([0.3, 0.4], [0.3, 0.4]) == 1.0


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired_permutation([1.0], [1.0, 0.0])
