"""Text in documents: letter for letter, whatever it contains."""

import pytest
from rich.text import Text

from graftwork.records.report import Metric
from graftwork.views.document import quote
from graftwork.views.evaluation_page import page_figure
from graftwork.views.html import mark_up


@pytest.mark.parametrize("text", ["a", "[/]", "[b]", "a\\", "a\\\\", "\\\\\\", "\\[/]", "a\\[b]\\\\"])
def test_quoted_text_is_shown_letter_for_letter_wherever_it_stands(text):
    assert Text.from_markup(quote(text), emoji=False).plain == text
    marked = f"[bold]{quote(text)}[/][dim]{quote('[x]')}[/]"
    assert Text.from_markup(marked, emoji=False).plain == f"{text}[x]"
    assert str(mark_up(marked)) == f'<span class="strong">{text}</span><span class="soft">[x]</span>'


def test_why_a_figure_proves_nothing_is_shown_with_its_brackets():
    metric = Metric(name="m", kind="rate", value=0, low=0, high=0, n=0, vacuous="no reference has tags[/b]")
    assert "tags[/b]" in str(mark_up(page_figure(metric)))
