"""Plots stay inside their frame, answers keep every letter, numbers read as people write them."""

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.base import Figure
from graftwork.records.plan import Residual
from graftwork.text.wording import change, number, p_value, percent, points, unbroken
from graftwork.views.charts import (
    BeforeAfter,
    PlotInterval,
    draw_before_after,
    draw_lengths,
    draw_loss,
    round_ticks,
    smooth,
    tick_text,
)
from graftwork.views.html import name_of, plural
from graftwork.views.page import make_pretty, mark_differences, show_answer
from graftwork.views.training import draw_plan

widths = st.sampled_from([340.0, 760.0])
names = st.text(st.characters(codec="utf-8", categories=["L", "P", "S"]), max_size=20)
shares = st.floats(0, 1)
spans = st.tuples(shares, shares, shares).map(lambda t: PlotInterval(sorted(t)[1], min(t), max(t)))


def check(svg):
    """Well-formed, named, and every mark inside the frame."""
    root = ElementTree.fromstring(str(svg))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.find("title").text
    assert root.find("desc") is not None
    assert root.attrib["role"] == "img"
    for node in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert -0.01 <= float(node.attrib.get(name, 0)) <= width + 0.01
        for name in ("y", "y1", "y2", "cy"):
            assert -0.01 <= float(node.attrib.get(name, 0)) <= height + 0.01
        assert float(node.attrib.get("width", 0)) >= 0
        assert float(node.attrib.get("height", 0)) >= 0
    assert "nan" not in str(svg)
    return root


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=60),
    st.tuples(st.none() | st.floats(0, 20), st.none() | st.floats(0, 20)),
    widths,
)
def test_any_loss_can_be_drawn(losses, held_out, width):
    steps = [(i + 1, loss) for i, loss in enumerate(losses)]
    restarts = [(len(steps), max(len(steps) // 2, 1))]
    check(draw_loss(steps, restarts=restarts, held_out=held_out, width=width))


@given(
    st.dictionaries(
        st.sampled_from(["train", "validation", "test"]), st.lists(st.integers(0, 9000), max_size=40)
    ),
    widths,
)
def test_every_row_is_counted_in_the_histogram(lengths, width):
    root = check(draw_lengths(lengths, width=width))
    if any(lengths.values()):
        assert root.findall("rect")


@given(
    st.lists(
        st.builds(BeforeAfter, name=names, before=spans, after=spans, limit=st.none() | shares, note=names),
        max_size=6,
    ),
    widths,
)
def test_any_rates_can_be_drawn(rows, width):
    check(draw_before_after(rows, width=width))


ratios = st.floats(0, 1e5)


@given(
    st.lists(
        st.builds(
            lambda name, pair, actual: Residual(
                name=name, planned=Figure(value=1.0, low=min(*pair, 1.0), high=max(*pair, 1.0)), actual=actual
            ),
            names,
            st.tuples(ratios, ratios),
            ratios,
        ),
        max_size=6,
    ),
    widths,
)
def test_any_plan_can_be_drawn(rows, width):
    check(draw_plan(rows, width=width))


def test_a_long_run_is_thinned_not_cut():
    svg = draw_loss([(i, 1.0 + i % 7) for i in range(1, 20_001)])
    check(svg)
    assert len(svg) < 100_000
    assert "20\u202f000" in svg


def test_names_in_plots_are_escaped():
    row = BeforeAfter("<b>&", PlotInterval(0.5, 0.4, 0.6), PlotInterval(0.9, 0.8, 1.0), 0.8, '"')
    assert "<b>" not in str(draw_before_after([row]))


def test_a_loss_that_is_not_a_number_does_not_break_the_plot():
    check(draw_loss([(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)]))
    check(draw_loss([(1, float("nan"))]))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(1, 10))
def test_ticks_are_even_and_cover_the_values(low, reach, count):
    ticks = round_ticks(low, low + reach, count=count)
    near = 1e-6 * max(abs(low), reach, 1)
    assert ticks[0] <= low + near
    assert ticks[-1] >= low + reach - near
    assert 2 <= len(ticks) <= count + 3


def test_ticks_of_an_axis_have_the_same_decimals():
    marks = round_ticks(0, 2.4)
    assert [tick_text(m, marks) for m in marks] == ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]


@given(st.lists(st.floats(-100, 100), min_size=1), st.integers(1, 9))
def test_smoothing_keeps_length_ends_and_range(values, reach):
    means = smooth(values, reach=reach)
    assert len(means) == len(values)
    assert (means[0], means[-1]) == (values[0], values[-1])
    assert min(values) - 1e-9 <= min(means) <= max(means) <= max(values) + 1e-9


@given(st.text(), st.text())
def test_marking_differences_loses_no_letter(text, reference):
    pieces = mark_differences(text, reference=reference)
    assert "".join(piece.text for piece in pieces) == text
    if text == reference:
        assert not any(piece.differs for piece in pieces)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers()), max_size=4))
def test_pretty_json_is_the_same_json(document):
    pretty, is_json = make_pretty(json.dumps(document))
    assert is_json
    assert json.loads(pretty) == document


def test_an_answer_is_marked_where_it_leaves_the_reference():
    shown = show_answer(
        '{"a": "ten crates", "refused":false}', reference='{"a":"two crates","refused":false}'
    )
    assert [piece.text for piece in shown.pieces if piece.differs] == ["ten"]
    assert shown.is_json
    assert not shown.same
    assert show_answer("plain", reference="").pieces == (("plain", False),)
    assert show_answer("[" * 100_000, reference="x").is_json is False


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "50 %"), (1.0, "100 %"), (0.994, "99.4 %"), (0.9998, "99.98 %"), (0.0002, "0.02 %")],
)
def test_percents_never_round_to_a_clean_sweep(value, text):
    assert percent(value) == text


@given(shares)
def test_only_all_is_a_hundred_percent(rate):
    assert (percent(rate) == "100 %") == (rate == 1.0)


def test_numbers_and_names_read_as_people_write_them():
    assert number(2_442_240) == "2\u202f442\u202f240"
    assert [number(x) for x in (0, 64, 3.2, 12.34, 123.4, 0.004)] == [
        "0",
        "64",
        "3.20",
        "12.3",
        "123",
        "0.004",
    ]
    assert [change(x) for x in (0.166, -0.05, 0.0001)] == ["+16.6 %", "−5.0 %", "0 %"]
    assert [name_of(n) for n in ("json_valid", "latency_seconds", "x")] == ["JSON valid", "Latency", "X"]
    assert (plural(1, "row"), plural(2, "row")) == ("1 row", "2 rows")
    assert (p_value(1e-9), p_value(0.031), p_value(0.5)) == ("< 0.001", "0.031", "0.50")
    assert points(-0.08) == "−8.0"
    assert re.search("95\u00a0%", unbroken("over 95 %."))
    assert unbroken("2 sources") == "2 sources"
