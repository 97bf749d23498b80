"""The table: who wins, what is said of the others, and what would change it."""

from datetime import date

import pytest
from cost_examples import DISK, ROWS, make_candidate, make_offer, make_place, make_run, make_terms

from graftwork.plan.cost import Tweak
from graftwork.plan.cost_comparison import (
    ComparisonInputs,
    best_of_each_place,
    compare,
    find_changes,
    list_candidates,
    ways,
    winner,
)


def table_of(*candidates, **terms):
    return compare(candidates, terms=make_terms(**terms), disk=DISK, rows=ROWS, run={"model": "m"})


SLOW_FREE = {
    "billing": "free", "usd": 0.0, "run": make_run(30.0, gpu="T4"),
    "place": {"kind": "notebook", "session_hours": 9.0, "free_hours_per_week": 30.0, "driven_by": "by hand"},
}  # fmt: skip


def three_places():
    return (
        make_candidate("cheap", usd=1.0, run=make_run(4.0, gpu="L4")),
        make_candidate("quick", usd=4.0, run=make_run(1.5, gpu="H100 SXM")),
        make_candidate("kaggle", **SLOW_FREE),
    )


def test_the_cheapest_that_meets_deadline_and_budget_wins():
    assert table_of(*three_places()).best == "Kaggle free (T4)"
    assert table_of(*three_places(), deadline_hours=24.0).best == "Cheap (L4)"
    assert table_of(*three_places(), deadline_hours=2.0).best == "Quick (H100 SXM)"
    assert table_of(*three_places(), goal="time").best == "Quick (H100 SXM)"
    assert table_of(*three_places(), deadline_hours=2.0, budget_usd=1.0).best is None


def test_no_place_says_what_would_have_been_possible():
    found = table_of(*three_places(), deadline_hours=0.5)
    assert found.verdict == "No place will do."
    assert "the soonest is Quick (H100 SXM)" in found.reason


def test_options_that_do_not_fit_come_last_with_the_reason():
    small = make_candidate("small", usd=0.01, run=make_run(9.0, gpu="T4", fits=False))
    last = table_of(*three_places(), small).rows[-1]
    assert last.place == "small"
    assert last.verdict == "does not fit: takes 20.0 of 15.6 GiB"
    assert last.runs_in_budget is None


def test_waiting_that_costs_money_moves_the_winner_at_the_stated_worth():
    found = table_of(*three_places())
    change = next(item for item in found.sensitivity if item.what == "worth of an hour of waiting")
    assert change.then is not None
    above = table_of(*three_places(), waiting_usd_per_hour=change.then.value * 1.01)
    below = table_of(*three_places(), waiting_usd_per_hour=change.then.value * 0.99)
    assert above.best == change.winner
    assert below.best == found.best


@pytest.mark.parametrize("deadline", [24.0, None])
def test_each_named_change_really_changes_the_winner_and_a_smaller_one_does_not(deadline):
    candidates = (
        make_candidate("one", usd=1.0, run=make_run(4.0, gpu="L4")),
        make_candidate("two", usd=1.5, run=make_run(3.0, gpu="A10G")),
        make_candidate(
            "three", usd=0.7, billing="spot", run=make_run(7.0, gpu="T4"), place={"setup_minutes": 30.0}
        ),
    )
    held = ComparisonInputs(candidates, make_terms(deadline_hours=deadline), DISK, ROWS)
    best = winner(held)
    assert best is not None
    changes = {change.what: change for change in find_changes(held)}
    factor = changes["price of the winner"].then.value

    def dearer(by):
        return winner(
            held, tweak_of=lambda item: Tweak(price=by) if item.place.name == best.place.name else Tweak()
        )

    assert dearer(factor * 1.002).place.name != best.place.name
    assert dearer(factor * 0.998).place.name == best.place.name
    rival = changes["price of a rival"]
    cut = rival.then.value

    def cheaper(by):
        return winner(
            held, tweak_of=lambda item: Tweak(price=by) if item.place.title in rival.winner else Tweak()
        )

    assert cheaper(cut * 0.998).place.title in rival.winner
    assert cheaper(cut * 1.002).place.name == best.place.name
    late = changes["deadline"].then.value
    assert winner(held, terms=make_terms(deadline_hours=late * 0.999)) != best
    assert winner(held, terms=make_terms(deadline_hours=late * 1.001)) == best


def test_a_spot_machine_that_wins_loses_at_the_stated_rate_of_interruptions():
    candidates = (
        make_candidate("calm", usd=1.0, run=make_run(10.0)),
        make_candidate("wild", usd=0.8, billing="spot", run=make_run(10.0), place={"setup_minutes": 20.0}),
    )
    held = ComparisonInputs(candidates, make_terms(preemptions_per_hour=0.05), DISK, ROWS)
    assert winner(held).place.name == "wild"
    change = next(change for change in find_changes(held) if change.what == "interruptions of spot machines")
    assert change.then.value > 1
    rate = 0.05 * change.then.value
    after = ComparisonInputs(candidates, make_terms(preemptions_per_hour=rate * 1.01), DISK, ROWS)
    assert winner(after).place.name == "calm"


def test_an_old_price_is_flagged_and_a_fresh_one_is_not():
    found = table_of(
        make_candidate("old", usd=1.0, offer={"dated": "2026-06-22"}),
        make_candidate("new", usd=2.0, offer={"dated": "2026-06-23"}),
    )
    assert {row.place: row.stale for row in found.rows} == {"old": True, "new": False}
    assert "61 days old" in found.reason
    later = compare(
        [make_candidate("new", usd=2.0)], terms=make_terms().model_copy(update={"today": date(2027, 1, 1)}),
        disk=DISK, rows=ROWS, run={},
    )  # fmt: skip
    assert later.rows[0].stale


def test_runs_in_the_budget_are_whole_and_follow_from_the_cost():
    row = table_of(make_candidate(usd=1.39), budget_usd=500.0).rows[0]
    assert row.runs_in_budget is not None
    assert row.runs_in_budget.value == int(500.0 / row.cost_usd.value)


def test_a_range_of_hours_is_a_range_of_dollars():
    row = table_of(make_candidate(usd=1.0, run=make_run(2.0, spread=1.3))).rows[0]
    assert row.cost_usd.low < row.cost_usd.value < row.cost_usd.high
    exact = table_of(make_candidate(usd=1.0, run=make_run(2.0))).rows[0]
    assert exact.cost_usd.low == exact.cost_usd.high


def test_the_return_is_worth_less_cost_and_counts_failures():
    row = table_of(make_candidate(usd=1.0), value_usd=100.0, success_share=0.8).rows[0]
    assert row.return_usd.value == pytest.approx(80.0 - row.cost_usd.value)
    assert row.return_ratio.value == pytest.approx(80.0 / row.cost_usd.value - 1)


def test_a_spot_price_that_is_the_usual_price_is_no_spot_price():
    assert ways(make_offer(usd_per_hour=1.39, spot_usd_per_hour=1.39)) == ("on-demand",)
    assert ways(make_offer(usd_per_hour=1.39, spot_usd_per_hour=0.0)) == ("on-demand",)
    assert ways(make_offer(usd_per_hour=1.39, spot_usd_per_hour=0.7)) == ("on-demand", "spot")
    assert ways(make_offer(usd_per_hour=0.0)) == ("free",)


def test_a_price_of_the_card_alone_gets_a_machine_around_it():
    bare = make_candidate(usd=1.0, offer={"instance": ""})
    assert bare.usd_per_hour == pytest.approx(1.26)
    assert make_candidate(usd=1.0).usd_per_hour == pytest.approx(1.0)


def test_the_short_table_has_one_line_for_each_place_and_way():
    places = [make_place("a"), make_place("b")]
    offers = [
        make_offer("a", usd_per_hour=2.0, spot_usd_per_hour=1.0),
        make_offer("a", usd_per_hour=3.0, gpu="H100 SXM"),
        make_offer("b", usd_per_hour=4.0),
        make_offer("unknown", usd_per_hour=4.0),
    ]
    found = list_candidates(
        offers, places, estimate=lambda gpu, gpus, _: make_run(gpu=gpu, gpus=gpus), today="2026-08-22"
    )
    assert len(found) == 4
    rows = compare(found, terms=make_terms(), disk=DISK, rows=ROWS, run={}).rows
    assert [(row.place, row.billing) for row in best_of_each_place(rows)] == [
        ("a", "spot"), ("a", "on-demand"), ("b", "on-demand"),
    ]  # fmt: skip


def test_intervals_are_whole_steps_and_saves_are_closer_where_machines_are_taken_away():
    found = table_of(
        make_candidate("calm", run=make_run(20.0)),
        make_candidate("wild", billing="spot", run=make_run(20.0)),
        preemptions_per_hour=0.5,
    )  # fmt: skip
    every = {row.place: row.intervals for row in found.rows}
    assert every["wild"].checkpoint_steps.value < every["calm"].checkpoint_steps.value
    assert every["calm"].evaluations <= 20
    assert every["wild"].checkpoint_minutes.value == pytest.approx(1200 / every["wild"].checkpoints)


def test_a_place_whose_disk_is_too_small_is_not_possible_and_says_so():
    small = make_candidate("lab", usd=0.01, place={"disk_gib": 14.0})
    roomy = make_candidate("roomy", usd=5.0, place={"disk_gib": 500.0})
    found = table_of(small, roomy)
    assert found.best == "Roomy (A100 40GB)"
    line = next(row for row in found.rows if row.place == "lab")
    assert not line.fits
    assert "disk is too small" in line.why_not
    assert not any("Lab" in change.winner for change in found.sensitivity)
