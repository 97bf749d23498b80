"""Prices of API models: found by the names that logs have for them, dated and with a source."""

import pytest

from graftwork.plan.catalog.prices import find_token_price, index_prices, list_token_prices


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
