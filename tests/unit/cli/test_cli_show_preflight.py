"""What is printed before a run: how long it takes, and what shortens it."""

import io

import pytest
from rich.console import Console

from graftwork.pipeline.preflight import Preflight
from graftwork.records.base import Figure
from graftwork.records.plan import RunPlan, StagePlan
from graftwork.views.terminal import show


def printed(**hours):
    stages = tuple(
        StagePlan(stage=name, title=name, seconds=figure(3600 * value), state="to do")
        for name, value in hours.items()
    )
    run = RunPlan(stages=stages, minutes=figure(60 * sum(hours.values())))
    out = io.StringIO()
    show(Console(file=out, width=100), Preflight(cases=25, metrics=(), problems=(), run=run))
    return " ".join(out.getvalue().split())


def figure(value):
    return Figure(value=value, low=value, high=value)


@pytest.mark.parametrize(
    ("hours", "setting"),
    [({"train": 1, "evaluate": 9}, "evaluate.max_new_tokens"), ({"train": 9, "evaluate": 1}, "train.epochs")],
)
def test_a_run_of_many_hours_comes_with_the_settings_that_shorten_it(hours, setting):
    text = printed(**hours)
    assert setting in text
    assert "`graft plan compare` estimates it on other machines" in text
