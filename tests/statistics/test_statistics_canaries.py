"""Canaries promote no release that fails, and leave an equal one alone: few runs of those in `canaries`.

`make test-statistics` simulates hundreds.
"""

import pytest
from canaries import EQUAL, FAILS_CHECKS, LEFT_TO_A_FALLBACK, LIKED_WHERE_NOT_ESCALATED, RULES, simulate


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", [FAILS_CHECKS, LIKED_WHERE_NOT_ESCALATED, LEFT_TO_A_FALLBACK])
def test_a_release_that_fails_40_percent_is_never_promoted(rule, setting):
    assert not any(setting.wrong_in(rule, range(4)))


@pytest.mark.parametrize("rule", RULES)
def test_an_equal_release_with_one_percent_of_failures_is_not_rolled_back(rule):
    assert not any(EQUAL.wrong_in(rule, range(6)))


def test_the_nightly_canary_promotes_an_equal_release_when_its_time_is_over():
    decided = simulate("nightly", 1, champion=EQUAL.champion, challenger=EQUAL.challenger)
    assert decided == "promoted"
