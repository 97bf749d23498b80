"""The page about places shows what its commands print, with the prices of the day that it names."""

import json
import re

import pytest
from shown_commands import ANSWERS, astray, printed_by, shown_in

PAGE = ANSWERS / "environments.md"
SHOWN = shown_in(PAGE)


@pytest.mark.parametrize("shown", SHOWN, ids=["cheapest", "within a day"])
def test_the_page_shows_what_is_printed_and_marks_what_it_leaves_out(shown):
    printed = printed_by(shown.command)
    assert astray(shown, printed) == []
    assert not printed.failed


def rows_of_today() -> list[dict]:
    printed = printed_by(f"{SHOWN[0].command} --value 1000 --success 0.8 --json")
    return json.loads("\n".join(printed.lines))["rows"]


def test_the_figures_of_the_places_that_the_text_compares_are_those_of_today():
    rows = rows_of_today()
    text = re.sub(r"^```[\s\S]*?^```$", "", PAGE.read_text(), flags=re.MULTILINE)
    found = {(row["place"], row["instance"]): row for row in rows if row["billing"] == "on-demand"}
    for place, instance, cost, runs, ratio in (
        ("runpod", "1x_A100-80GB_SECURE", "$2.87 (2.32–3.56)", "174 (A100 80GB PCIe)", "278 times the cost"),
        ("runpod", "1x_RTX4090_SECURE", "$2.50", "200 at $0.74", ""),
        ("huggingface-spaces", "a10g-small", "$9.60", "52 (small)", "82 on HF's"),
        ("huggingface-spaces", "a10g-large", "$14.40", "34 (large)", ""),
        ("sagemaker", "ml.g5.xlarge", "$13.56", "36; managed", ""),
        ("azure-ml", "Standard_NC24ads_A100_v4", "$8.10", "61", ""),
    ):
        row = found[place, instance]
        assert all(output in text for output in (cost, runs, ratio))
        assert cost.startswith(f"${row['cost_usd']['value']:.2f}")
        assert re.match(rf"{row['runs_in_budget']['value']:.0f}\b", runs)
        assert not ratio or ratio.startswith(f"{row['return_ratio']['value']:.0f} ")


def test_hours_of_other_cards_are_those_of_today():
    rows = rows_of_today()
    hours = {(row["gpu"], row["gpus"]): row["training_hours"]["value"] for row in rows}
    output = re.search(
        r"A100 80GB ([\d.]+), RTX 4090 ([\d.]+), A10G ([\d.]+), V100 ([\d.]+)", PAGE.read_text()
    )
    assert output is not None
    cards = ("A100 80GB", "RTX 4090", "A10G", "V100 16GB")
    assert [f"{hours[card, 1]:.1f}" for card in cards] == list(output.groups())
