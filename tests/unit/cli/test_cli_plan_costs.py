"""`graft plan compare` and `graft plan buy` at the door: JSON of figures, exit codes, mistakes in words."""

import json

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.records.errors import UserError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
RUN = ["--model", "config.json", "--rows", "2000", "--epochs", "3", "--seq", "1024", "--today", "2026-08-22"]
FIGURES = ("training_hours", "hours_to_result", "usd_per_hour", "cost_usd", "interruptions", "disk_gib")


@pytest.fixture(autouse=True)
def _small_model_here(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def ask(*words: str):
    return CliRunner().invoke(app, ["plan", *words])


def read(*words: str) -> dict:
    result = ask(*words, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def test_every_figure_of_a_comparison_is_an_object_with_a_range():
    found = read(
        "compare", *RUN, "--place", "lambda", "--place", "kaggle", "--budget", "500", "--own", "RTX 4090"
    )
    assert {row["place"] for row in found["rows"]} == {"lambda", "kaggle", "own"}
    for row in found["rows"]:
        for name in FIGURES:
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"], name
        assert row["price_source"]
        assert row["price_dated"]
    assert found["best"]
    assert found["sensitivity"]


def test_no_place_within_the_deadline_is_the_answer_no():
    result = ask("compare", *RUN, "--place", "lambda", "--deadline", "0.001")
    assert result.exit_code == 1
    assert "No place will do" in result.stdout


def test_old_prices_are_flagged_from_the_day_that_is_named():
    fresh = read("compare", *RUN, "--place", "lambda")
    assert not any(row["stale"] for row in fresh["rows"])
    later = [word if word != "2026-08-22" else "2026-12-24" for word in RUN]
    assert all(row["stale"] for row in read("compare", *later, "--place", "lambda")["rows"])


def test_hours_without_their_card_are_a_mistake():
    result = ask("compare", *RUN, "--hours", "2")
    assert isinstance(result.exception, UserError)
    assert "must be given together" in result.exception.what


def test_a_purchase_says_what_is_best_and_what_it_assumes():
    found = read(
        "buy", *RUN, "--have", "RTX 5060 Ti 16GB", "--option", "2x RTX 5060 Ti 16GB=700",
        "--option", "RTX 4090", "--runs-per-week", "7", "--place", "lambda",
    )  # fmt: skip
    labels = {choice["label"] for choice in found["choices"]}
    assert {"keep RTX 5060 Ti 16GB", "buy 2 × RTX 5060 Ti 16GB", "buy RTX 4090"} < labels
    assert found["best"] in labels
    assert "7 runs a week for 2 years" in found["answer"]
    launch = next(choice for choice in found["choices"] if choice["label"] == "buy RTX 4090")
    assert launch["price_usd"]["value"] == 1599
    assert any("launch price" in words for words in found["notes"])
    assert all(payback["place"] == "lambda" for payback in launch["paybacks"])


def test_a_narrow_terminal_breaks_tables_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = ask("buy", *RUN, "--have", "RTX 3090", "--option", "RTX 5090=2500", "--place", "lambda")
    shown = result.stdout.split("Longest rows")[0]
    assert "waiting" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("words", [("--have", "RTX 9999"), ("--have", "RTX 4090", "--option", "A100 80GB")])
def test_a_card_that_is_unknown_or_has_no_price_is_named(words):
    result = ask("buy", *RUN, *words, "--place", "lambda")
    assert isinstance(result.exception, UserError)


def test_nothing_of_an_epoch_is_a_mistake_and_not_one_epoch():
    result = ask("compare", *RUN, "--epochs", "0")
    assert result.exit_code == 2
    assert "--epochs" in result.output


def test_a_broken_project_next_to_it_is_no_hindrance_where_the_model_is_named(tmp_path):
    (tmp_path / "graft.yaml").write_text("base: [unclosed")
    assert read("compare", *RUN, "--place", "lambda")["best"]


def test_without_a_model_and_a_project_it_says_what_to_give():
    result = ask("compare", "--rows", "10")
    assert isinstance(result.exception, UserError)
    assert result.exception.where == "--model"
