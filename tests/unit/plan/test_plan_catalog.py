"""The catalogs: GPUs, offers, models and prices, and a team's own rows."""

import json
from datetime import date
from pathlib import Path

import pytest

from graftwork.model.shape import linear_names, total_parameters
from graftwork.plan.catalog.hardware import find_cpu, find_gpu, list_cpus, list_gpus
from graftwork.plan.catalog.models import find_model, list_models
from graftwork.plan.catalog.prices import (
    STALE_AFTER_DAYS,
    age_days,
    find_token_price,
    index_prices,
    is_stale,
    list_offers,
    list_places,
    list_quoted_offers,
    list_token_prices,
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


PUBLISHED = {
    "deepseek-coder-1.3b": 1.346e9,
    "deepseek-coder-6.7b": 6.740e9,
    "deepseek-coder-33b": 33.34e9,
    "olmo-7b": 6.888e9,
    "olmo2-7b": 7.299e9,
    "qwen2.5-0.5b": 494.0e6,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-coder-7b": 7.616e9,
    "qwen2.5-14b": 14.77e9,
    "qwen2.5-32b": 32.76e9,
    "qwen2.5-72b": 72.71e9,
    "qwen3-0.6b": 596e6,
    "qwen3-4b": 4.022e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.3-70b": 70.55e9,
    "llama-2-7b": 6.738e9,
    "llama-2-13b": 13.02e9,
    "tinyllama-1.1b": 1.100e9,
    "mistral-7b": 7.248e9,
    "mistral-7b-v0.1": 7.242e9,
    "mistral-nemo-12b": 12.25e9,
    "smollm2-135m": 134.5e6,
    "smollm2-360m": 361.8e6,
    "smollm2-1.7b": 1.711e9,
    "gemma-2-2b": 2.614e9,
    "gemma-2-9b": 9.242e9,
    "gemma-2-27b": 27.23e9,
    "gemma-3-1b": 999.9e6,
    "gemma-3-4b": 3.880e9,
    "phi-3-mini": 3.821e9,
    "phi-4": 14.66e9,
}
HIDDEN, LAYERS = 64, 2
SMALL = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
FAMILIES = (
    "llama",
    "mistral",
    "granite",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo",
    "olmo2",
    "starcoder2",
    "stablelm",
    "phi",
    "gpt_neox",
)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_model_has_as_many_parameters_as_was_published(name: str):
    assert total_parameters(find_model(name).shape) == pytest.approx(PUBLISHED[name], rel=0.002)


def test_every_row_has_a_source_and_a_name_that_finds_it():
    for model in list_models():
        assert model.source
        assert find_model(model.name) == model
        assert find_model(model.hf_id) == model
        for alias in model.aliases:
            assert find_model(alias) == model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_alone_counts_what_transformers_builds(family: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SMALL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    written = config.to_dict() | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    found = find_model(tmp_path)
    assert total_parameters(found.shape) == real
    assert found.architecture == family
    names = {
        path.rsplit(".", 1)[-1] for path, part in model.named_modules() if type(part).__name__ == "Linear"
    }
    assert set(linear_names(found.shape)) == names - {"lm_head"}


def test_a_config_file_is_taken_as_its_folder_is(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert find_model(tmp_path) == find_model(str(tmp_path / "config.json")).model_copy(
        update={"source": str(tmp_path / "config.json")}
    )


def test_a_nested_config_of_gemma_3_needs_no_more_than_it_says(tmp_path: Path):
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert total_parameters(find_model(tmp_path).shape) == total_parameters(find_model("gemma-3-4b").shape)


def test_an_unknown_family_is_counted_as_llama_and_says_so(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", **SMALL}))
    found = find_model(tmp_path)
    assert "'novel' is not known" in found.doubt


def test_experts_are_counted_all_and_take_no_adapter(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"model_type": "mixtral"}, default=str)
    )
    shape = find_model(tmp_path).shape
    assert total_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    assert set(linear_names(shape)) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_wrong_name_is_answered_with_near_ones():
    with pytest.raises(UserError) as mistake:
        find_model("deepseek-coder-7b")
    assert "deepseek-coder-6.7b" in mistake.value.fix


@pytest.mark.parametrize("body", ["{", "[]", '{"model_type": "llama"}'])
def test_a_broken_config_is_a_mistake_with_its_place(tmp_path: Path, body: str):
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(UserError) as mistake:
        find_model(tmp_path)
    assert "config.json" in mistake.value.where


@pytest.fixture(scope="module")
def known():
    return index_prices(list_token_prices())


@pytest.mark.parametrize(
    ("logged", "model"),
    [
        ("gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("openrouter/openai/gpt-5-mini", "gpt-5-mini"),
        ("us.anthropic.claude-3-5-sonnet-20241022-v2:0", "claude-3-5-sonnet"),
        ("anthropic/claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
        ("models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("GPT-4o", "gpt-4o"),
    ],
)
def test_a_price_is_found_by_the_name_that_a_log_has(known, logged, model):
    assert find_token_price(logged, known).model == model


@pytest.mark.parametrize("logged", ["tongyi", "", "gpt", "gpt-4o-mini-but-other"])
def test_a_model_that_nobody_listed_has_no_price(known, logged):
    assert find_token_price(logged, known) is None


def test_every_price_has_a_source_and_a_date_and_output_costs_no_less_than_input():
    for price in list_token_prices():
        assert price.source
        assert price.dated
        assert price.usd_per_million_output >= price.usd_per_million_input


def test_a_teams_own_price_replaces_the_listed_one(tmp_path):
    head = "model,provider,usd_per_million_input,usd_per_million_output,source,dated"
    (tmp_path / "api_prices.csv").write_text(f"{head}\ngpt-4o,azure,1.5,6,contract,2026-11-01\n")
    own = index_prices(list_token_prices(overlay=tmp_path))
    assert find_token_price("gpt-4o-2024-08-06", own).usd_per_million_input == 1.5
