"""Seeded mutants: what is mutated, that a draw repeats, and which mutants of a journal other source has."""

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = '''
"""At most 3 of them."""
from typing import Final
MOST: Final[int] = 3

def is_full(rows: list[int], *, log) -> bool:
    if not rows:
        log.warning("no rows", count=1)
        raise ValueError(f"no rows of {2 + 2}")
    return len(rows) >= MOST and max(rows) > 0
'''


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location(
        "draw_mutants", Path(__file__).parents[2] / "mutants" / "draw.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_mutants"] = module
    spec.loader.exec_module(module)
    return module


def test_mutants_change_what_decides_and_no_text(draw):
    mutants = draw.find_mutants("area", "full.py", SOURCE)
    assert {mutant.change for mutant in mutants} == {
        "3 -> (4)",
        "not rows -> (rows)",
        'raise ValueError(f"no rows of {2 + 2}") -> pass',
        "len(rows) >= MOST and max(rows) > 0 -> (None)",
        "len(rows) >= MOST and max(rows) > 0 -> (len(rows) >= MOST or max(rows) > 0)",
        "len(rows) >= MOST -> (len(rows) > MOST)",
        "len(rows) >= MOST -> (len(rows) < MOST)",
        "max(rows) -> (min(rows))",
        "max(rows) > 0 -> (max(rows) >= 0)",
        "max(rows) > 0 -> (max(rows) <= 0)",
        "0 -> (1)",
    }
    for mutant in mutants:
        compile(mutant.apply(SOURCE.encode()), "full.py", "exec")
    (most,) = [mutant for mutant in mutants if mutant.change == "3 -> (4)"]
    assert most.lines == (4, 10)


def test_a_draw_repeats_and_takes_a_line_once(draw):
    areas = {"area": draw.find_mutants("area", "full.py", SOURCE)}
    assert draw.draw(areas, seed=1, count=3) == draw.draw(areas, seed=1, count=3)
    assert len({mutant.text for mutant in draw.draw(areas, seed=1, count=9)}) == 4
    assert len({tuple(draw.draw(areas, seed=seed, count=1)) for seed in range(20)}) > 3


def test_mutants_of_a_journal_are_found_where_they_moved_and_missed_where_they_changed(draw):
    entries = [mutant._asdict() for mutant in draw.find_mutants("area", "full.py", SOURCE)]
    changed = "\n\n" + SOURCE.replace("if not rows:", "if len(rows) == 0:")
    matched, gone = draw.match(entries, draw.find_mutants("area", "moved.py", changed))
    assert [entry["change"] for entry in gone] == ["not rows -> (rows)"]
    assert len(matched) == len(entries) - 1
    assert {mutant.line - 2 for mutant in matched} == {4, 9, 10}
