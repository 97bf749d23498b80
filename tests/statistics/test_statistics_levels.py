"""The gate calls proven what is not so no more often than it says, also where that is hard."""

import pytest
from levels import quick_grid, whole_grid


@pytest.mark.parametrize("cell", list(quick_grid()), ids=lambda cell: f"{cell.group}: {cell.name}")
def test_a_hard_setting_holds_its_level(cell):
    assert cell.observe() <= cell.allowed


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(whole_grid()), ids=lambda cell: f"{cell.group}: {cell.name}")
def test_every_setting_of_the_grid_holds_its_level(cell):
    observed = cell.observe()
    if cell.holds:
        assert observed <= cell.allowed
    else:
        # The docs say so; were it to hold one day, they would be wrong.
        assert observed > 0 or cell.name == "n 300"
