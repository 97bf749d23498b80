"""The page about the six managers shows what its commands print today."""

import pytest
from shown_commands import ANSWERS, printed_by, shown_in, unshown_figures

PAGE = ANSWERS / "federation.md"
SHOWN = shown_in(PAGE)


@pytest.mark.parametrize("shown", SHOWN, ids=[shown.command for shown in SHOWN])
def test_every_line_that_is_shown_is_printed(shown):
    printed = printed_by(shown.command)
    assert [line for line in shown.lines if line not in printed.lines] == []
    assert printed.failed is shown.lines[0].startswith("✗")


def test_every_figure_of_the_text_is_in_an_output():
    assert unshown_figures(PAGE, units="GiB|s|min") == []


def test_the_page_has_its_commands():
    assert len(SHOWN) > 8
