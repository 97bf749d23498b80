"""Non-inferiority and Holm's correction against published figures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.statistics.means import make_units, mean_above, paired_difference
from graftwork.evaluate.statistics.significance import holm


@pytest.mark.parametrize(
    ("wins", "losses", "points"), [(0, 0, -9.2), (2, 1, -10.1), (1, 1, -12.3), (0, 1, -14.4)]
)
def test_31_pairs_allow_the_known_losses(wins, losses, points):
    low = paired_difference(wins, losses=losses, n=31, sided="lower").low
    assert 100 * low == pytest.approx(points, abs=0.06)


@given(
    st.integers(1, 300).flatmap(
        lambda n: st.integers(0, n).flatmap(
            lambda wins: st.tuples(st.just(wins), st.integers(0, n - wins), st.just(n))
        )
    ),
    st.integers(1, 60).map(lambda points: points / 100),
)
@settings(max_examples=50, deadline=None)
def test_the_bound_and_the_p_agree(pair, margin):
    wins, losses, n = pair
    low = paired_difference(wins, losses=losses, n=n, sided="lower").low
    units = make_units([1.0] * wins + [-1.0] * losses + [0.0] * (n - wins - losses))
    p_value = mean_above(units, -margin)
    if abs(p_value - 0.05) > 1e-6:
        assert (low > -margin) == (p_value < 0.05)


def test_no_pairs_prove_nothing():
    assert paired_difference(0, losses=0, n=0, sided="lower").low == -1.0


def test_holm_gives_the_textbook_p():
    """R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm"), from the rule in Holm (1979)."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert list(adjusted.values()) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_rule_rejects(p_values, alpha):
    adjusted = holm(p_values)
    left = sorted(p_values.values())
    rejected = 0
    while rejected < len(left) and left[rejected] * (len(left) - rejected) <= alpha:
        rejected += 1
    assert sum(p <= alpha for p in adjusted.values()) == rejected
    assert all(p_values[name] <= p <= 1 for name, p in adjusted.items())


def test_one_candidate_needs_no_correction():
    assert holm({"only": 0.03}) == {"only": 0.03}
    assert holm({}) == {}
