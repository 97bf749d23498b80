"""`--place auto` takes the cheapest place that finishes in time and within the budget, and says why."""

import pytest

from graftwork.fleet.jobs import RunQuote, choose_place
from graftwork.fleet.plans import setup_minutes
from graftwork.records.errors import NegativeResult

HOUR = 3600.0
LOCAL = RunQuote(place="local", planned_hours=20.0, seconds=81.0 * HOUR)
KAGGLE = RunQuote(place="kaggle", gpu="Tesla T4", planned_hours=9.0, seconds=11.75 * HOUR)
RUNPOD = RunQuote(
    place="runpod",
    gpu="RTX 4090",
    planned_hours=1.9,
    setup_hours=0.1,
    planned_usd=0.8,
    largest_usd=4.9,
    seconds=10 * HOUR,
)
LARGE = RunQuote(
    place="runpod", gpu="H200", planned_hours=0.5, planned_usd=1.9, largest_usd=4.9, seconds=1.0 * HOUR
)


def chosen(*quotes, budget=None, deadline=None):
    best, _, refused = choose_place(quotes, budget=budget, deadline=deadline)
    return best.place, best.gpu, dict(line.split(": ", 1) for line in refused)


def test_a_free_place_is_taken_where_it_finishes_before_the_deadline():
    assert chosen(LOCAL, KAGGLE, RUNPOD, deadline=24 * HOUR)[0] == "kaggle"
    assert chosen(LOCAL, RUNPOD, deadline=24 * HOUR)[0] == "local"


def test_a_paid_place_is_taken_where_the_free_ones_are_too_slow():
    place, gpu, others = chosen(LOCAL, KAGGLE, RUNPOD, LARGE, budget=5, deadline=5 * HOUR)
    assert (place, gpu) == ("runpod", "RTX 4090")
    assert "later than the deadline" in others["local"]
    assert "runpod, H200" not in others


def test_the_largest_possible_cost_counts_against_the_budget_not_the_planned_one():
    with pytest.raises(NegativeResult, match="no place finishes") as caught:
        chosen(KAGGLE, RUNPOD, budget=2, deadline=5 * HOUR)
    assert "runpod, RTX 4090: may cost $4.90, more than the budget" in caught.value.why
    assert "--budget" in caught.value.fix


def test_a_session_that_is_too_short_for_the_run_is_not_taken():
    short = KAGGLE.model_copy(update={"seconds": 9.5 * HOUR})
    place, _, others = chosen(short, RUNPOD)
    assert place == "runpod"
    assert "ends after 9.5 h" in others["kaggle, Tesla T4"]


def test_the_reason_names_the_next_best_place():
    _, why, _ = choose_place([LOCAL, RUNPOD], budget=None, deadline=None)
    assert why == "free, 20.0 h at most; the next best, runpod, RTX 4090, is $0.80 and takes 2.0 h"


def test_places_of_the_catalog_have_its_setup_time_and_this_machine_none():
    assert setup_minutes("local") == 0
    assert setup_minutes("ssh:gpu1") > 0
    assert setup_minutes("sagemaker") == 10
