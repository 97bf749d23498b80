"""Cards, processors, prices and places: found however they are written, and a team's own rows over them."""

from datetime import date
from pathlib import Path

import pytest

from graftwork.plan.catalog.hardware import find_cpu, find_gpu, list_cpus, list_gpus
from graftwork.plan.catalog.models import find_model
from graftwork.plan.catalog.prices import (
    STALE_AFTER_DAYS,
    age_days,
    is_stale,
    list_offers,
    list_places,
    list_quoted_offers,
)
from graftwork.records.errors import UserError

WRITTEN = {
    "RTX 5060 Ti 16GB": "RTX 5060 Ti 16GB",
    "RTX5060Ti": "RTX 5060 Ti 16GB",
    "5060 ti": "RTX 5060 Ti 16GB",
    "NVIDIA GeForce RTX 5060 Ti": "RTX 5060 Ti 16GB",
    "rtx 5060 ti 8gb": "RTX 5060 Ti 8GB",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "4090": "RTX 4090",
    "A100": "A100 40GB",
    "A100-80GB": "A100 80GB",
    "A100-80GB-SXM": "A100 80GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "H100-SXM": "H100 SXM",
    "NVIDIA H200": "H200 SXM",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "V100": "V100 16GB",
    "Tesla T4": "T4",
    "RTXA6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "rtx_6000ada": "RTX 6000 Ada",
}
HEADER = "name,memory_gib,capability,half_tflops,bandwidth_gb_s,pcie_gb_s,watts,source,dated\n"


@pytest.mark.parametrize("written", sorted(WRITTEN))
def test_a_card_is_found_as_people_and_drivers_write_it(written: str):
    assert find_gpu(written).name == WRITTEN[written]


def test_no_two_cards_or_processors_share_a_name():
    for things, find in ((list_gpus(), find_gpu), (list_cpus(), find_cpu)):
        for thing in things:
            for name in (thing.name, *thing.aliases):
                assert find(name) == thing


def test_cards_have_the_precision_that_they_have():
    for name in ("T4", "V100", "P100", "2080 Ti"):
        assert not find_gpu(name).has_bf16
    for name in ("A100", "3090", "L4", "5060 Ti"):
        assert find_gpu(name).has_bf16
    assert not find_gpu("A100").has_fp8
    assert find_gpu("4090").has_fp8


def test_geforce_cards_have_half_the_rate_of_their_professional_kin():
    # The same chip: GeForce halves products that are summed in float32.
    assert find_gpu("3090").half_tflops < 0.5 * find_gpu("A6000").half_tflops
    assert find_gpu("4090").half_tflops < 0.5 * find_gpu("RTX 6000 Ada").half_tflops


def test_a_card_shows_less_memory_than_its_box():
    for gpu in list_gpus():
        stated = [float(part[:-2]) for part in gpu.name.split() if part.endswith("GB")]
        assert all(0.9 * box < gpu.memory_gib < box for box in stated)


def test_processors_of_the_table_are_there():
    assert find_cpu("Ryzen 9950X").cores == 16
    assert find_cpu("AMD EPYC 9454P 48-Core Processor").bandwidth_gb_s == pytest.approx(460.8)


def test_every_offer_names_a_known_card_and_place():
    places = {place.name for place in list_places()}
    offers = (*list_offers(), *list_quoted_offers())
    assert len(offers) > 150
    for offer in offers:
        assert offer.place in places
        assert find_gpu(offer.gpu)
        assert date.fromisoformat(offer.dated)


def test_every_place_but_ones_own_has_an_offer():
    offered = {offer.place for offer in list_offers()}
    assert {place.name for place in list_places()} - offered == {"own"}


def test_quoted_prices_are_not_used_in_estimates():
    ours = {(o.place, o.gpu, o.gpus): o for o in list_offers()}
    quoted = {(o.place, o.gpu, o.gpus): o for o in list_quoted_offers()}
    spot = quoted["runpod", "RTX4090", 1].spot_usd_per_hour
    assert spot == 0.44
    assert ours["runpod", "RTX4090", 1].usd_per_hour == 0.74
    assert all("comparison" not in offer.source for offer in list_offers())


def test_a_spot_price_that_equals_the_usual_one_is_none():
    for offer in list_offers():
        if offer.place in {"runpod", "vast"}:
            assert offer.spot_usd_per_hour is None
        if offer.spot_usd_per_hour is not None and offer.usd_per_hour is not None:
            assert 0 < offer.spot_usd_per_hour < offer.usd_per_hour


def test_subscriptions_and_free_hours_are_numbers():
    offers = {(o.place, o.gpu): o for o in list_offers()}
    assert offers["colab-pro", "T4"].usd_per_month == 9.99
    assert offers["colab-pro", "T4"].hours_per_month == pytest.approx(54, abs=1)
    assert offers["kaggle", "P100"].usd_per_hour == 0
    assert next(p for p in list_places() if p.name == "kaggle").free_hours_per_week == 30
    assert next(p for p in list_places() if p.name == "sagemaker-studio-lab").free_hours_per_day == 4


def test_a_price_grows_old():
    dated = "2026-08-22"
    assert age_days(dated, today=date(2026, 8, 25)) == 3
    assert age_days(dated, today=date(2026, 8, 20)) == 0
    assert not is_stale(dated, today=date(2026, 8, 22))
    assert is_stale("2026-01-01", today=date.fromordinal(date(2026, 1, 1).toordinal() + STALE_AFTER_DAYS + 1))


def test_a_teams_own_rows_replace_and_add(tmp_path: Path):
    own = (
        HEADER
        + "rtx5090,31,12,200,1700,63,500,ours,2026-11-01\nMine 9000,48,12,300,2000,63,400,ours,2026-11-01\n"
    )
    (tmp_path / "gpus.csv").write_text(own)
    assert find_gpu("5090", overlay=tmp_path).half_tflops == 200
    assert find_gpu("mine 9000", overlay=tmp_path).memory_gib == 48
    assert len(list_gpus(overlay=tmp_path)) == len(list_gpus()) + 1
    assert find_gpu("5090").half_tflops != 200


def test_a_teams_own_price_replaces_ours(tmp_path: Path):
    (tmp_path / "prices.csv").write_text(
        "place,gpu,gpus,usd_per_hour,source,dated\nrunpod,RTX 4090,1,0.5,our bill,2026-11-01\n"
    )
    found = [
        o for o in list_offers(overlay=tmp_path) if o.place == "runpod" and find_gpu(o.gpu).name == "RTX 4090"
    ]
    assert [o.usd_per_hour for o in found if o.gpus == 1] == [0.5]


def test_the_folder_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gpus.csv").write_text(HEADER + "Mine 9000,48,12,300,2000,63,400,ours,2026-11-01\n")
    monkeypatch.setenv("GRAFT_CATALOG", str(tmp_path))
    assert find_gpu("Mine 9000").source == "ours"


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ("Mine,none,12,300,2000,63,400,ours,2026-11-01", "memory_gib"),
        ("Mine,48,12,-3,2000,63,400,ours,2026-11-01", "half_tflops"),
        ("Mine,48,12,0,2000,63,400,ours,2026-11-01", "half_tflops"),
        ("Mine,48,12,nan,2000,63,400,ours,2026-11-01", "half_tflops"),
        ("Mine,48,12,300,2000,63,400,,2026-11-01", "source"),
        ("Mine,48,12,300,2000,63,400,ours,yesterday", "dated"),
        ("Mine,48,12,300,2000,63,400,ours,2026-13-41", "dated"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_key(tmp_path: Path, row: str, key: str):
    good = "Good,48,12,300,2000,63,400,ours,2026-11-01\n"
    (tmp_path / "gpus.csv").write_text(HEADER + good + row + "\n")
    with pytest.raises(UserError) as mistake:
        list_gpus(overlay=tmp_path)
    assert "gpus.csv, line 3" in mistake.value.what
    assert f"`{key}`" in mistake.value.what
    assert mistake.value.fix
    assert mistake.value.where.endswith("gpus.csv:3")


def test_a_wrong_header_is_reported_with_the_expected_one(tmp_path: Path):
    (tmp_path / "gpus.csv").write_text("name,vram\nMine,48\n")
    with pytest.raises(UserError) as mistake:
        list_gpus(overlay=tmp_path)
    assert "memory_gib" in mistake.value.what
    (tmp_path / "gpus.csv").write_text(
        HEADER.replace("name,", "name,vram,") + "Mine,1,2,3,4,5,6,7,s,2026-11-01\n"
    )
    with pytest.raises(UserError, match="vram"):
        list_gpus(overlay=tmp_path)


def test_a_value_that_its_record_refuses_is_a_mistake_of_that_row(tmp_path: Path):
    (tmp_path / "places.csv").write_text("name,title,kind,source,dated\nx,X,planet,s,2026-11-01\n")
    with pytest.raises(UserError) as mistake:
        list_places(overlay=tmp_path)
    assert "`kind`" in mistake.value.what


def test_a_missing_overlay_folder_is_a_mistake(tmp_path: Path):
    with pytest.raises(UserError, match="no folder"):
        find_model("olmo-7b", overlay=tmp_path / "nowhere")
