"""Keep, buy or rent: dollars that can be checked by hand, and an answer that follows from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.cost import PlaceRow
from graftwork.plan.purchase import (
    MachineReach,
    Price,
    PurchaseOption,
    Reach,
    Use,
    decide,
    news,
    own_choice,
    read_purchase_option,
    rent_choice,
)
from graftwork.records.base import Figure
from graftwork.records.errors import UserError

USE = Use(
    runs_per_week=7.0,
    years=2.0,
    electricity_usd_kwh=0.30,
    residual_share=0.5,
    host_watts=120.0,
    waiting_usd_per_hour=0.0,
)


def machine(label="old card", *, hours=8.0, watts=180.0, fits=True, gpus=1, alone=None, longest=2048):
    return MachineReach(
        label=label,
        gpu=label,
        gpus=gpus,
        watts=watts,
        fits=fits,
        why_not="" if fits else "takes 20.0 of 15.0 GiB",
        hours=Figure.exact(hours, "h"),
        alone_hours=Figure.exact(alone, "h") if alone else None,
        reaches=(
            Reach(method="qlora", longest=longest if fits else None),
            Reach(method="full", longest=None),
        ),
    )


def rental(cost=2.0, hours=2.0, place="cloud"):
    return PlaceRow.model_construct(
        place=place,
        title=place,
        gpu="A100",
        gpus=1,
        billing="on-demand",
        cost_usd=Figure.about(cost, down=0.8, up=1.2, unit="USD"),
        hours_to_result=Figure.exact(hours, "h"),
        price_dated="2026-08-22",
    )


def bought(usd=1000.0, *, use=USE, have=None, **facts):
    made = machine("new card", **{"hours": 4.0, "watts": 380.0, **facts})
    return own_choice(
        made,
        label="buy new card",
        price=Price(usd, "as stated"),
        use=use,
        have=have or machine(),
        rentals=[rental()],
    )


def test_a_purchase_bears_what_is_not_got_back_and_its_power():
    choice = bought()
    assert choice.power_usd_per_run.value == pytest.approx(4.0 * 0.5 * 0.30)
    assert choice.cost_usd_per_run.value == pytest.approx(500.0 / USE.runs + 0.60)
    assert USE.runs == pytest.approx(730.5)
    assert choice.speed_up.value == pytest.approx(2.0)


def test_payback_is_the_price_over_what_a_month_of_runs_saves():
    payback = bought().paybacks[0]
    a_month = 7 * 365.25 / 7 / 12
    assert payback.months.value == pytest.approx(1000.0 / ((2.0 - 0.60) * a_month))
    assert payback.in_time
    assert payback.months.low < payback.months.value < payback.months.high


def test_a_rent_below_the_power_never_pays_a_card_back():
    choice = own_choice(
        machine("new card", hours=4.0), label="buy", price=Price(1000.0, ""), use=USE, have=machine(),
        rentals=[rental(cost=0.1)],
    )  # fmt: skip
    assert choice.paybacks[0].months is None
    assert not choice.paybacks[0].in_time


@given(runs=st.floats(0.5, 20.0), more=st.floats(1.1, 3.0), usd=st.floats(100.0, 5000.0))
def test_more_runs_make_a_run_cheaper_and_pay_back_sooner(runs, more, usd):
    few, many = (bought(usd, use=USE._replace(runs_per_week=number)) for number in (runs, runs * more))
    assert many.cost_usd_per_run.value < few.cost_usd_per_run.value
    assert many.paybacks[0].months.value < few.paybacks[0].months.value


def test_the_cheapest_that_can_do_the_run_wins_and_says_when_the_other_would():
    keep = own_choice(
        machine(), label="keep old card", price=Price(0.0, ""), use=USE, have=machine(), rentals=[]
    )
    ranked, best, answer = decide([bought(), keep, rent_choice(rental(), use=USE, have=machine())], use=USE)
    assert best is keep
    assert answer.startswith("Keep old card: a run costs $0.72")
    assert "7 runs a week for 2 years" in answer
    new = next(option for option in ranked if option.label == "buy new card")
    worth = new.pays_above_usd_per_hour.value
    above, below = (
        decide([bought(), keep], use=USE._replace(waiting_usd_per_hour=worth * factor))[1].label
        for factor in (1.01, 0.99)
    )
    assert (above, below) == ("buy new card", "keep old card")


def test_where_the_old_card_cannot_the_price_decides_between_buying_and_renting():
    have = machine(fits=False)
    keep = own_choice(have, label="keep", price=Price(0.0, ""), use=USE, have=have, rentals=[])
    dear, cheap = (rent_choice(rental(cost=cost), use=USE, have=have) for cost in (3.0, 0.5))
    assert decide([keep, bought(have=have), dear], use=USE)[1].label == "buy new card"
    assert decide([keep, bought(have=have), cheap], use=USE)[1].label == "rent cloud (A100)"
    assert bought(have=have).speed_up is None
    assert decide([keep], use=USE)[1] is None


def test_a_card_that_a_rent_beats_in_both_is_right_only_where_nothing_may_be_rented():
    keep = own_choice(
        machine(), label="keep old card", price=Price(0.0, ""), use=USE, have=machine(), rentals=[]
    )
    cheap = rent_choice(rental(cost=1.0, hours=2.0), use=USE, have=machine())
    ranked, best, answer = decide([bought(), keep, cheap], use=USE)
    new = next(option for option in ranked if option.label == "buy new card")
    assert best is keep
    assert new.pays_above_usd_per_hour is None
    worth = new.pays_unrented_above_usd_per_hour.value
    assert decide([bought(), keep], use=USE._replace(waiting_usd_per_hour=worth * 1.01))[1].label == new.label
    assert decide([bought(), keep, cheap], use=USE._replace(waiting_usd_per_hour=worth * 1.01))[1] is cheap
    assert "to rent cloud (A100) ($1.00 a run, 2.0 h) is right where" in answer
    assert "only where nothing may be rented" in answer


def test_more_runs_than_a_week_has_hours_are_not_possible():
    choice = bought(hours=30.0)
    assert not choice.possible
    assert choice.why_not == "7 runs take 210 of a week's 168 hours"
    assert bought(hours=30.0, gpus=2, alone=40.0).possible, "two cards with a run each: 140 hours"


def test_two_cards_do_two_runs_at_once():
    choice = bought(hours=7.0, gpus=2, alone=8.0)
    assert choice.runs_at_once == 2
    assert choice.throughput.value == pytest.approx(2.0)
    assert choice.hours_per_week.value == pytest.approx(28.0)


def test_news_are_what_only_the_other_machine_can():
    assert news(machine(), machine(longest=8192)) == ("qlora up to 8,192 tokens instead of 2,048",)
    assert news(machine(fits=False), machine()) == ("qlora at all, up to 2,048 tokens",)
    assert news(machine(), machine(longest=1024)) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2x RTX 5060 Ti 16GB=700", PurchaseOption("RTX 5060 Ti 16GB", 2, 700.0)),
        ("2 × RTX 5060 Ti 16GB = $1,700", PurchaseOption("RTX 5060 Ti 16GB", 2, 1700.0)),
        ("RTX 4090", PurchaseOption("RTX 4090", 1, None)),
        ("A100=0", PurchaseOption("A100", 1, 0.0)),
    ],
)
def test_options_are_read_as_people_write_them(text, expected):
    assert read_purchase_option(text, option="--option") == expected


@pytest.mark.parametrize("text", ["", "=700", "RTX 4090=cheap", "0x RTX 4090", "RTX 4090=-5", "RTX 4090=inf"])
def test_an_option_that_names_no_card_or_price_is_refused(text):
    with pytest.raises(UserError, match="does not name a GPU"):
        read_purchase_option(text, option="--option")
