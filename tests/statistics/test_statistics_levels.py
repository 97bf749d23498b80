"""The gate calls proven what is not so no more often than it says, also where that is hard.

A seeded part of the grid in `levels`; `make test-statistics` simulates all of it.
"""

import pytest
from levels import quick_grid


@pytest.mark.parametrize("cell", list(quick_grid()), ids=lambda cell: f"{cell.group}: {cell.name}")
def test_a_hard_setting_holds_its_level(cell):
    assert cell.observe() <= cell.allowed
