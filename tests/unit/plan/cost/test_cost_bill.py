"""A run's bill: every dollar is for something, and limits of places are kept."""

import pytest
from cost_examples import DISK, ROWS, make_candidate, make_run, make_terms
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.cost import CRASH_RATE, compute_bill, cut


def bill(candidate, **terms):
    return compute_bill(candidate, terms=make_terms(**terms), disk=DISK, rows=ROWS)


@given(
    hours=st.floats(0.05, 200.0),
    usd=st.floats(0.05, 50.0),
    billing=st.sampled_from(["on-demand", "spot"]),
    setup=st.floats(0.0, 40.0),
)
def test_the_parts_are_the_whole(hours, usd, billing, setup):
    found = bill(
        make_candidate(usd=usd, billing=billing, run=make_run(hours), place={"setup_minutes": setup})
    )
    assert sum(found.parts.values()) == pytest.approx(found.cost, rel=1e-9)
    assert all(part >= -1e-9 for part in found.parts.values())


@given(hours=st.floats(0.05, 100.0), more=st.floats(1.01, 3.0), usd=st.floats(0.05, 10.0))
def test_more_hours_and_higher_prices_cost_more(hours, more, usd):
    short, long = (
        bill(make_candidate(usd=usd, run=make_run(duration))) for duration in (hours, hours * more)
    )
    dear = bill(make_candidate(usd=usd * more, run=make_run(hours)))
    assert long.cost > short.cost
    assert long.clock > short.clock
    assert dear.cost > short.cost
    assert dear.clock == pytest.approx(short.clock)


def test_two_hours_at_a_listed_price_cost_a_little_more_than_twice_the_price():
    found = bill(make_candidate(usd=1.39, run=make_run(2.0)))
    assert found.parts["training"] == pytest.approx(2.78)
    assert found.parts["setup"] == pytest.approx(1.39 * 0.1)
    assert found.parts["evaluation"] <= 0.05 * found.parts["training"] * 1.001
    assert found.parts["interruptions"] < 0.01 * found.parts["training"]
    assert 2.9 < found.cost < 3.2


def test_more_interruptions_cost_more_and_only_on_spot_machines():
    spot = make_candidate(usd=0.5, billing="spot")
    calm, wild = bill(spot, preemptions_per_hour=0.01), bill(spot, preemptions_per_hour=1.0)
    assert wild.cost > calm.cost
    assert wild.clock - wild.machine == pytest.approx(0.25 * wild.interruptions)
    usual = make_candidate(usd=0.5)
    assert bill(usual, preemptions_per_hour=1.0).hazard.rate == CRASH_RATE


def test_the_smallest_billed_time_is_paid_for_a_short_run():
    short = make_candidate(usd=6.0, run=make_run(0.1), place={"smallest_billed_minutes": 60})
    paid = sum(
        bill(short).parts[name] for name in ("training", "setup", "evaluation", "saves", "interruptions")
    )
    assert paid == pytest.approx(6.0)


def test_a_subscription_is_shared_and_its_first_bill_is_whole():
    found = bill(
        make_candidate(
            billing="subscription",
            offer={"usd_per_hour": None, "usd_per_month": 50.0, "hours_per_month": 40.0},
        ),
        runs_per_month=10.0,
    )
    assert found.paid_first == pytest.approx(50.0)
    assert found.cost == pytest.approx(5.0)


def test_electricity_is_watts_times_hours():
    own = make_candidate("own", billing="electricity", place={"kind": "own", "setup_minutes": 0.0})
    found = bill(own, electricity_usd_kwh=0.30, host_watts=100.0)
    assert found.cost == pytest.approx(found.machine * 0.4 * 0.30)


def test_storage_and_transfer_are_charged_where_the_place_charges_them():
    found = bill(make_candidate(place={"storage_usd_gib_month": 0.2, "egress_usd_gib": 0.1}))
    assert found.parts["storage"] == pytest.approx(DISK.total_gib.value * 0.2 * found.clock / 730)
    assert found.parts["transfer"] == pytest.approx(DISK.result_gib * 0.1)


def test_nine_hour_sessions_and_thirty_hours_a_week():
    """40 hours of work: 8.8 useful hours a session, the fifth runs in the second week."""
    place = make_candidate(place={"session_hours": 9.0, "free_hours_per_week": 30.0}).place
    stay = cut(place, work=40.0, setup=0.15, save=0.05)
    assert stay.sessions == 5
    assert stay.machine == pytest.approx(40.0 + 5 * 0.15 + 4 * 0.05)
    assert stay.clock == pytest.approx(168 + 10.95)


def test_four_hours_a_day_take_as_many_days_as_sessions():
    place = make_candidate(place={"session_hours": 4.0, "free_hours_per_day": 4.0}).place
    stay = cut(place, work=10.0, setup=0.25)
    assert stay.sessions == 3
    assert stay.clock == pytest.approx(48 + 10.75 - 8)


def test_a_session_that_ends_before_the_first_step_is_no_place():
    place = make_candidate(place={"session_hours": 0.1}).place
    assert not cut(place, work=1.0, setup=0.2).possible


@given(work=st.floats(0.1, 500.0), more=st.floats(0.0, 50.0), quota=st.floats(2.0, 60.0))
def test_more_work_is_never_done_sooner(work, more, quota):
    place = make_candidate(place={"session_hours": 9.0, "free_hours_per_week": quota}).place
    assert cut(place, work=work + more, setup=0.1).clock >= cut(place, work=work, setup=0.1).clock - 1e-9
    assert cut(place, work=work, setup=0.1).clock >= work


def test_disk_is_weights_packages_and_a_few_checkpoints():
    assert DISK.parts_gib["base weights"].value == pytest.approx(14e9 / 2**30)
    assert DISK.checkpoint_gib == pytest.approx(40e6 * 12 / 2**30)
    assert DISK.total_gib.low < DISK.total_gib.value < DISK.total_gib.high
    assert DISK.total_gib.value == pytest.approx(sum(part.value for part in DISK.parts_gib.values()))
