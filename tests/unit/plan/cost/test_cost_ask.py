"""The comparison over the shipped catalog: the fit of `graft plan fit`, every place, its rules."""

from datetime import date

import pytest

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.catalog.prices import list_places
from graftwork.plan.cost import MeasuredRun, Terms, fit_in_brief
from graftwork.plan.cost_comparison import OfferFilter, compare_places, of_size
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import make_question
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine, Offer
from graftwork.records.plan import FitOptions

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
