"""What a run costs where: bills, interruptions, the comparison, and the question of a project."""

import math
import random
from datetime import date

import pytest
from cost_examples import DISK, ROWS, make_candidate, make_offer, make_place, make_run, make_terms
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.catalog.prices import list_places
from graftwork.plan.cost import (
    CRASH_RATE,
    Hazard,
    MeasuredRun,
    Terms,
    Tweak,
    best_interval,
    choose_saves,
    compute_bill,
    cut,
    expect,
    fit_in_brief,
    young_interval,
)
from graftwork.plan.cost_comparison import (
    ComparisonInputs,
    OfferFilter,
    best_of_each_place,
    compare,
    compare_places,
    find_changes,
    list_candidates,
    of_size,
    ways,
    winner,
)
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import make_question
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine, Offer
from graftwork.records.plan import FitOptions


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


TERMS = Terms(today=date(2026, 8, 22), budget_usd=500.0)
PLACES = {
    "runpod", "huggingface-spaces", "huggingface-jobs", "autotrain", "colab-pro", "colab-pro-plus", "lambda",
    "sagemaker", "sagemaker-spot", "azure-ml", "kaggle", "vast", "gcp",
}  # fmt: skip


def question(gpu="A100 40GB", **more):
    machine = Machine(gpu=find_gpu(gpu), gpus=1, ram_gib=64.0)
    facts = {"rows": 2000, "epochs": 3.0, "method": "qlora", "seq": 1024, **more}
    asked = make_question(find_model("smollm2-135m"), FitOptions(**facts), machine=machine)
    # Two layers show as much as thirty and are computed sooner.
    return asked.model_copy(
        update={"shape": asked.shape.model_copy(update={"layers": 2}), "adapted_layers": 2}
    )


@pytest.fixture(scope="module")
def found():
    return compare_places(
        question(),
        OfferFilter(sorted(PLACES), own=[("RTX 5060 Ti 16GB", 1)]),
        terms=TERMS,
        with_sensitivity=False,
    )


def test_every_place_of_the_catalog_has_a_line(found):
    assert PLACES | {"own"} <= {row.place for row in found.rows}
    assert all(row.price_source and row.price_dated for row in found.rows)


def test_a_line_is_what_the_fit_says_of_that_card():
    asked = question("A100 40GB")
    brief, whole = fit_in_brief(asked), fit(asked)
    assert brief.fits == whole.fits
    assert brief.hours.value == pytest.approx(whole.run_minutes.value / 60, rel=0.02)
    assert brief.steps == whole.steps.value


def test_measured_hours_take_the_place_of_ours_and_other_cards_keep_their_ratio(found):
    measured = compare_places(
        question(),
        OfferFilter(["lambda"]),
        terms=TERMS,
        measured=MeasuredRun("A100 40GB", 1, 2.0),
        with_sensitivity=False,
    )
    ours = {(row.gpu, row.gpus): row.training_hours.value for row in found.rows if row.place == "lambda"}
    theirs = {(row.gpu, row.gpus): row.training_hours for row in measured.rows}
    assert theirs["A100 40GB", 1].value == pytest.approx(2.0)
    assert theirs["A100 40GB", 1].low == theirs["A100 40GB", 1].high
    ratio = ours["A10", 1] / ours["A100 40GB", 1]
    assert theirs["A10", 1].value == pytest.approx(2.0 * ratio)


def test_a_place_that_is_warned_of_is_listed_and_never_wins(found):
    warned = [row for row in found.rows if row.place == "autotrain"]
    assert warned
    assert all(not row.eligible for row in warned)
    assert all(row.verdict.startswith("not recommended") for row in warned if row.fits)


def test_runpods_spot_that_costs_the_usual_price_is_not_listed(found):
    assert {row.billing for row in found.rows if row.place == "runpod"} == {"on-demand"}


def test_free_quotas_are_reported_in_sessions_and_weeks():
    long = compare_places(
        question(rows=9_000_000), OfferFilter(["kaggle"]), terms=TERMS, with_sensitivity=False
    ).rows[0]
    assert long.sessions.value > 1
    assert long.hours_to_result.value > long.machine_hours.value
    assert any("30 h a week" in words for words in long.limits)
    assert long.cost_usd.value == 0


def test_an_unknown_place_or_a_card_that_nobody_offers_is_a_mistake():
    with pytest.raises(UserError, match="no place 'mars'"):
        compare_places(question(), OfferFilter(["mars"]), terms=TERMS)
    with pytest.raises(UserError, match="no place of the catalog offers"):
        compare_places(question(), OfferFilter(gpu="RTX 2080 Ti"), terms=TERMS)


def test_the_smallest_machine_of_a_card_is_always_there():
    offers = [
        Offer(place=place, gpu="A100", gpus=gpus, usd_per_hour=1.0, source="test", dated="2026-08-22")
        for place, gpus in (("a", 1), ("a", 2), ("a", 8), ("b", 8))
    ]
    assert [(offer.place, offer.gpus) for offer in of_size(offers, gpus=1)] == [("a", 1), ("b", 8)]
    assert len(of_size(offers, gpus=8)) == 4


def test_two_kinds_of_one_card_at_one_place_are_distinguished():
    both = compare_places(question(), OfferFilter(["runpod"]), terms=TERMS, with_sensitivity=False)
    labels = [row.label for row in both.rows]
    assert len(labels) == len(set(labels))
    assert {"RunPod (A100 80GB)", "RunPod (A100 80GB PCIe)"} <= set(labels)


def test_the_disks_of_notebooks_are_known():
    disks = {place.name: place.disk_gib for place in list_places()}
    assert disks["sagemaker-studio-lab"] < 15 < disks["kaggle"] < disks["colab-pro"]
    assert disks["runpod"] is None


def test_a_reserved_price_is_compared_as_a_month_that_is_paid_whether_used_or_not(tmp_path):
    head = "place,gpu,gpus,usd_per_hour,reserved_usd_per_hour,reserved_term,instance,source,dated"
    (tmp_path / "prices.csv").write_text(
        f"{head}\nrunpod,A100 40GB,1,2.0,1.2,1 year,a100,our offer,2026-08-22\n"
    )
    found = compare_places(
        question(),
        OfferFilter(["runpod"], gpu="A100 40GB"),
        terms=TERMS,
        overlay=tmp_path,
        with_sensitivity=False,
    )
    rows = {row.billing: row for row in found.rows if row.price_source == "our offer"}
    assert set(rows) == {"on-demand", "subscription"}
    assert rows["subscription"].cost_usd.value == pytest.approx(1.2 * 730 / TERMS.runs_per_month, rel=0.05)
    assert rows["on-demand"].cost_usd.value < rows["subscription"].cost_usd.value


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


def live_through(hazard: Hazard, *, work: float, saves: int, dice: random.Random) -> tuple[float, int, float]:
    """One run, event by event: hours of machine, interruptions, hours on the clock."""
    machine, clock, interruptions = 0.0, 0.0, 0
    until_next = dice.expovariate(hazard.rate)
    todo = [hazard.restart] + [work / saves + hazard.save] * saves
    ready = False
    while todo:
        piece = todo[0] if ready or len(todo) == saves + 1 else hazard.restart
        if until_next >= piece:
            machine, clock, until_next = machine + piece, clock + piece, until_next - piece
            if ready or len(todo) == saves + 1:
                todo.pop(0)
            ready = True
        else:
            machine, clock = machine + until_next, clock + until_next + hazard.wait
            interruptions += 1
            until_next, ready = dice.expovariate(hazard.rate), False
    return machine, interruptions, clock


@pytest.mark.parametrize(
    ("rate", "save", "restart", "wait", "work", "saves"),
    [
        (0.05, 0.01, 0.15, 0.25, 8.0, 6),
        (0.5, 0.02, 0.1, 0.5, 4.0, 8),
        (1.5, 0.05, 0.2, 0.0, 3.0, 3),
        (0.02, 0.002, 0.1, 1.0, 40.0, 1),
    ],
)
def test_expected_hours_are_those_of_a_simulated_run(rate, save, restart, wait, work, saves):
    hazard = Hazard(rate=rate, save=save, restart=restart, wait=wait)
    dice = random.Random(20261115)
    lives = [live_through(hazard, work=work, saves=saves, dice=dice) for _ in range(6000)]
    expected = expect(hazard, work=work, saves=saves)
    for index, estimated in enumerate((expected.machine, expected.interruptions, expected.clock)):
        values = [life[index] for life in lives]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        # Four standard errors: a wrong formula is off by far more.
        assert abs(mean - estimated) < 4 * deviation / math.sqrt(len(values))


def test_a_run_without_interruptions_takes_what_it_takes():
    calm = Hazard(rate=0.0, save=0.01, restart=0.2)
    assert expect(calm, work=5.0, saves=3).machine == pytest.approx(5.0 + 0.2 + 0.03)
    assert expect(calm, work=5.0, saves=3).lost == 0.0
    assert best_interval(calm) == math.inf
    assert choose_saves(calm, work=5.0) == 1


@given(rate=st.floats(0.001, 3.0), save=st.floats(0.0005, 0.2), work=st.floats(0.5, 50.0))
def test_no_other_number_of_saves_is_better_than_the_chosen(rate, save, work):
    hazard = Hazard(rate=rate, save=save, restart=0.1)
    chosen = choose_saves(hazard, work=work)
    best = expect(hazard, work=work, saves=chosen).machine
    for other in {max(1, chosen - 1), chosen + 1, max(1, chosen // 2), 2 * chosen}:
        assert best <= expect(hazard, work=work, saves=other).machine * (1 + 1e-9)


@given(rate=st.floats(0.001, 1.0), save=st.floats(0.0005, 0.1))
def test_the_exact_interval_is_below_youngs_and_meets_it_where_interruptions_are_rare(rate, save):
    hazard = Hazard(rate=rate, save=save, restart=0.1)
    exact, young = best_interval(hazard), young_interval(hazard)
    assert exact <= young
    assert exact >= young * (1 - math.sqrt(rate * save))


@given(
    rate=st.floats(0.0, 2.0), more=st.floats(0.01, 1.0), work=st.floats(0.1, 20.0), saves=st.integers(1, 30)
)
def test_more_interruptions_never_make_a_run_shorter(rate, more, work, saves):
    calm = expect(Hazard(rate=rate, save=0.01, restart=0.1), work=work, saves=saves)
    wild = expect(Hazard(rate=rate + more, save=0.01, restart=0.1), work=work, saves=saves)
    assert wild.machine >= calm.machine
    assert wild.lost >= calm.lost >= 0
    assert calm.clock >= calm.machine


def test_a_flat_tenth_is_wrong_in_both_directions():
    """Two hours at 0.05 interruptions an hour lose 2 %; thirty hours saved once at the end lose far more."""
    short = Hazard(rate=0.05, save=0.003, restart=0.1)
    little = expect(short, work=2.0, saves=choose_saves(short, work=2.0))
    assert little.lost / 2.0 < 0.03
    never_saved = expect(short, work=30.0, saves=1)
    assert never_saved.lost / 30.0 > 1.0


def test_a_save_that_costs_nothing_is_asked_about():
    with pytest.raises(ValueError, match="specify what it costs"):
        choose_saves(Hazard(rate=0.1, save=0.0, restart=0.1), work=2.0)
