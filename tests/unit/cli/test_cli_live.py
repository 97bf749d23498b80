"""The live view: a trend that is true, two lines on a terminal, few plain ones in a file."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from graftwork.cli.progress import (
    BLOCKS,
    KEPT,
    PLAIN_SECONDS,
    LossTrend,
    RichReporter,
    sparkline,
)
from graftwork.train.runs import Event
from graftwork.views.run import mark_up_event
from graftwork.views.terminal import to_text

DETAIL = {
    "loss": 1.25,
    "tokens_per_second": 12345.6,
    "gradient_norm": 0.5,
    "memory_gib": 7.9,
    "step_seconds": 0.5,
    "expected_step_seconds": 0.4,
}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32)), st.integers(2, 40))
def test_a_sparkline_has_at_most_its_width_whatever_the_values(values, width):
    line = sparkline(values, width=width)
    assert len(line) <= width
    assert set(line) <= set(BLOCKS)


def test_a_falling_loss_falls():
    line = sparkline([float(100 - step) for step in range(100)])
    assert list(line) == sorted(line, reverse=True)
    assert (line[0], line[-1]) == (BLOCKS[-1], BLOCKS[0])


def test_the_trend_counts_a_step_once_and_forgets_nothing_of_its_shape():
    course = LossTrend()
    for step in range(3 * KEPT):
        for _ in range(2):
            course.see(step, {"loss": float(3 * KEPT - step)})
    assert len(course._losses) <= KEPT
    assert list(course.trend) == sorted(course.trend, reverse=True)


def test_a_terminal_gets_the_bar_and_one_line_below_it():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with RichReporter(console) as reporter:
        reporter.started("train", "train the adapter")
        for step in range(1, 5):
            reporter.progress("training", step, 9, seconds_left=61, detail={**DETAIL, "loss": 2.0 / step})
        reporter._bar.refresh()
    text = out.getvalue()
    assert "4/9" in text
    assert "1 min 01 s left" in text
    assert "loss 0.500 █" in text


def test_a_file_gets_one_plain_line_in_a_while():
    out, moment = io.StringIO(), [0.0]
    console = Console(file=out, width=80, force_terminal=False)
    with RichReporter(console, clock=lambda: moment[0]) as reporter:
        for step in range(100):
            moment[0] += PLAIN_SECONDS / 10
            reporter.progress("training", step, 100, seconds_left=5, detail=DETAIL)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 9
    assert lines[0].startswith("  training 10/100, 5.0 s left, loss 1.250")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (
            "step",
            {
                "step": 3,
                "loss": 1.5,
                "gradient_norm": 2.0,
                "learning_rate": 1e-4,
                "seconds": 2.0,
                "tokens": 100,
            },
            "3: loss 1.5000, gradient 2, rate 0.0001, 2.00 s, 50 tokens/s",
        ),
        (
            "evaluation",
            {"step": 4, "metric": "loss", "value": 0.5, "better": True},
            "loss 0.5000 (best so far)",
        ),
        ("alert", {"what": "it is stuck", "why": "[b]swap"}, "it is stuck: [b]swap"),
        ("message", {"message": "\x1b[2J"}, "␛[2J"),
        ("output", {"text": "a line"}, "a line"),
        ("checkpoint", {"step": 5, "folder": "step-5"}, "after step 5 (step-5)"),
        (
            "machine",
            {"memory_gib": 2.0, "devices": [{"index": 0, "use_percent": 97.0, "temperature_c": 64}]},
            "memory 2.00 GiB; device 0: 97 % use, 64 °C",
        ),
    ],
)
def test_every_kind_of_event_is_a_readable_line(kind, body, words):
    assert words in to_text(mark_up_event(Event(at=0.0, kind=kind, body=body))).plain
