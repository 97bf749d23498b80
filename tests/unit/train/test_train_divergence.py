"""What goes wrong is refused; what stays wrong is stopped, and the rows are named."""

import json
import math
import random

import pytest

from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.train.callbacks.guards import Diverged, DivergenceCallback, name_rows
from graftwork.train.checkpoints.store import CheckpointStore
from graftwork.train.engine import StepResult
from graftwork.train.run_setup import guard_callbacks
from graftwork.train.settings import TrainSettings, WatchSettings


def row(line):
    return Row(
        id=str(line),
        origin=Origin(file="log.jsonl", line=line),
        messages=(Message(role="user", content="x"),),
        reply="y",
        tokens=(1, 2),
        trained_from=1,
    )


ROWS = [row(line) for line in (3, 8)]


def measured(loss, norm=1.0):
    return StepResult(loss, norm, 10, 5)


def usual(watch, count=8, loss=2.0):
    for number in range(1, count + 1):
        assert watch.accept_gradient(number, measured(loss + number / 100), ROWS)


@pytest.mark.parametrize(
    ("bad", "output"),
    [
        (measured(math.nan), "the loss is nan"),
        (measured(math.inf), "the loss is inf"),
        (measured(2.0, math.nan), "the gradient is nan"),
        (measured(2.0, 1e6), "the gradient exploded"),
        (measured(30.0), "the loss jumped to 30"),
    ],
)
def test_one_bad_step_is_skipped_with_a_warning_and_a_second_stops_the_run(bad, output):
    words = []
    watch = DivergenceCallback(WatchSettings(tolerate=1), report=words.append)
    usual(watch)
    assert not watch.accept_gradient(9, bad, ROWS)
    assert output in words[0]
    assert "log.jsonl:3, log.jsonl:8" in words[0]
    with pytest.raises(Diverged, match=output) as caught:
        watch.accept_gradient(10, bad, ROWS)
    assert caught.value.where == "log.jsonl:3, log.jsonl:8"
    assert "last good checkpoint is kept" in caught.value.why


def test_a_good_step_between_two_bad_ones_counts():
    watch = DivergenceCallback(WatchSettings(tolerate=1))
    usual(watch)
    for number in range(9, 20, 2):
        assert not watch.accept_gradient(number, measured(40.0), ROWS)
        assert watch.accept_gradient(number + 1, measured(2.0), ROWS)


def test_a_spike_does_not_become_the_usual():
    watch = DivergenceCallback(WatchSettings(tolerate=100, window=4))
    usual(watch)
    assert not any(watch.accept_gradient(number, measured(40.0), ROWS) for number in range(9, 60))


@pytest.mark.parametrize(("objective", "stops"), [("sft", True), ("dpo", True), ("grpo", False)])
def test_the_loss_of_sampled_answers_may_jump(tmp_path, objective, stops):
    """It is a sum weighted by advantages, of either sign: large rewards make it large, and right."""
    rewards = {"rewards": [{"metric": "task_success"}]} if objective == "grpo" else {}
    settings = TrainSettings.model_validate({"objective": objective, **rewards})
    store = CheckpointStore(tmp_path, keep=1)
    (watch,) = guard_callbacks(settings, store, deadline=None, report=lambda _message: None)
    for number, loss in enumerate((-0.2, 0.1, 0.3, -0.1, 0.2), 1):
        assert watch.accept_gradient(number, measured(loss), ROWS)
    assert watch.accept_gradient(6, measured(5.0), ROWS) is not stops
    assert watch.accept_gradient(7, measured(0.1), ROWS)
    assert not watch.accept_gradient(8, measured(0.1, 1e6), ROWS)
    with pytest.raises(Diverged):
        watch.accept_gradient(9, measured(math.nan), ROWS)


def test_close_to_zero_a_multiple_alone_is_no_spike():
    watch = DivergenceCallback(WatchSettings(tolerate=0))
    usual(watch, loss=0.001)
    assert watch.accept_gradient(9, measured(0.4), ROWS)


def test_divergence_is_judged_the_same_after_a_resume_at_any_step():
    chance = random.Random(5)
    losses = [chance.choice([2.0, 2.5, 3.0, 50.0]) * chance.uniform(0.8, 1.2) for _ in range(60)]
    settings = WatchSettings(tolerate=50, window=6)
    whole = DivergenceCallback(settings)
    expected = [whole.accept_gradient(number, measured(loss), ROWS) for number, loss in enumerate(losses)]
    assert False in expected
    for cut in range(0, 60, 7):
        before, after = DivergenceCallback(settings), DivergenceCallback(settings)
        got = [
            before.accept_gradient(number, measured(loss), ROWS) for number, loss in enumerate(losses[:cut])
        ]
        after.restore(json.loads(json.dumps(before.state())))
        got += [
            after.accept_gradient(number, measured(loss), ROWS) for number, loss in enumerate(losses[cut:])
        ]
        assert got == expected


def test_at_most_a_dozen_rows_are_named():
    assert name_rows([row(line) for line in range(1, 31)]).endswith("log.jsonl:12 and 18 more")
