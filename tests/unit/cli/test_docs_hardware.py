"""The pages about one card of 16 GB and about two show what their commands print today.

What `graft plan buy` prints takes too long to be run again here: the page has it with its date.
"""

import re

import pytest
from shown_commands import ANSWERS, ROOT, astray, printed_by, shown_in, unshown_figures

PAGES = {name: ANSWERS / f"{name}.md" for name in ("16gb", "dual-gpu")}
SHOWN = {shown.command: (name, shown) for name, page in PAGES.items() for shown in shown_in(page)}
UNITS = "GiB|h|min|s|days|tokens/s"
COMPUTED = {"16gb": {"102", "5.3", "6.3", "0.1"}, "dual-gpu": set()}
"""Seconds of a step by its two prompts; the bytes of all tokens."""


@pytest.mark.parametrize("command", SHOWN)
def test_the_page_shows_what_is_printed_and_marks_what_it_leaves_out(command):
    _, shown = SHOWN[command]
    printed = printed_by(command)
    assert astray(shown, printed) == []
    assert printed.failed is shown.lines[0].startswith("✗")


@pytest.mark.parametrize(
    ("name", "other"), [("16gb", ROOT / "docs" / "benchmarks.md"), ("dual-gpu", PAGES["16gb"])]
)
def test_every_figure_of_the_text_is_in_an_output(name, other):
    assert set(unshown_figures(PAGES[name], units=UNITS, others=(other,))) <= COMPUTED[name]


@pytest.mark.parametrize(("name", "headings"), [("16gb", 8), ("dual-gpu", 7)])
def test_every_section_of_the_questions_has_its_answer(name, headings):
    numbers = re.findall(r"^## (\d)\. ", PAGES[name].read_text(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, headings + 1)]


def test_the_index_names_every_answer():
    index = (ANSWERS / "README.md").read_text()
    assert [page.name for page in ANSWERS.glob("*.md") if f"]({page.name})" not in index] == ["README.md"]
