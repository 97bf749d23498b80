"""Changes in the text of a YAML file: only the value changes."""

import difflib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graftwork.files.config_text import set_values
from graftwork.records.errors import UserError

COMMENTED = """\
# A project.
project: p
train:            # how
  rank: 8         # of the adapters
  epochs: 2
  # the end of train

models:
  main: {curriculum: true}
  other: {train: &shared {rank: 4}, replay: 0.2}
  third: {train: *shared}
logs:
  - a.jsonl
"""


def changed_lines(before: str, after: str) -> list[str]:
    return [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]


def test_a_changed_value_leaves_every_other_character_as_it_was():
    after = set_values(COMMENTED, ("train",), {"rank": 16}, where="graft.yaml")
    assert after == COMMENTED.replace("rank: 8 ", "rank: 16 ", 1)


def test_a_new_key_is_added_behind_the_last_one_of_its_block():
    after = set_values(COMMENTED, ("train",), {"learning_rate": 0.0003}, where="graft.yaml")
    assert changed_lines(COMMENTED, after) == ["+   learning_rate: 0.0003"]


def test_a_new_key_of_a_flow_mapping_stays_on_its_line():
    after = set_values(COMMENTED, ("models", "main", "train"), {"rank": 2}, where="graft.yaml")
    assert yaml.safe_load(after)["models"]["main"] == {"curriculum": True, "train": {"rank": 2}}
    assert len(after.splitlines()) == len(COMMENTED.splitlines())


@pytest.mark.parametrize("model", ["other", "third"])
def test_a_value_that_models_share_is_refused(model):
    with pytest.raises(UserError):
        set_values(COMMENTED, ("models", model, "train"), {"rank": 2}, where="graft.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1\n",
        "a: 1",
        "train:\n",
        "train: {}\n",
        "a: 1\ntrain:\nb: 2\n",
        "train:",
        "a: 1\ntrain:",
        "a: 1\ntrain: ",
        "a: 1\ntrain:  # later",
        "a: 1\ntrain:  # later\n",
    ],
)
def test_a_section_that_is_missing_or_empty_is_made(text):
    after = set_values(text, ("train",), {"rank": 2, "learning_rate": 5e-5}, where="graft.yaml")
    assert yaml.safe_load(after)["train"] == {"rank": 2, "learning_rate": 5e-5}


KEYS = st.sampled_from(["rank", "alpha", "epochs", "learning_rate", "seed"])
NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False))
SECTIONS = st.dictionaries(KEYS, NUMBERS, max_size=4)


@given(SECTIONS, st.booleans(), KEYS, NUMBERS)
def test_what_is_read_afterwards_is_the_old_content_with_the_value(section, flow, key, value):
    content = {"project": "p", "train": section, "logs": ["a", "b"]}
    text = yaml.safe_dump(content, default_flow_style=flow, sort_keys=False)
    after = yaml.safe_load(set_values(text, ("train",), {key: value}, where="graft.yaml"))
    assert after == {**content, "train": {**section, key: value}}
