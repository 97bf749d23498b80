"""Batches without a number are skipped, a model that got worse is stopped, and rows are named."""

import json
import math
import random
from contextlib import nullcontext

import pytest
from sample_plans import make_step
from sample_rows import make_row

from graftwork.train.callbacks import Diverged, DivergenceCallback, name_rows
from graftwork.train.checkpoints import CheckpointStore
from graftwork.train.engine import StepResult
from graftwork.train.settings import TrainSettings, WatchSettings
from graftwork.train.worker import guard_callbacks


def row(line):
    return make_row(str(line - 1), (1, 2), 1)


ROWS = [row(line) for line in (3, 8)]


def measured(loss, norm=1.0):
    return StepResult(loss, norm, 10, 5)


class Model:
    """Stands in for an engine: what the rows of another step cost now."""

    def __init__(self, loss=0.0):
        self.now = loss
        self.asked = []

    def loss(self, rows):
        self.asked.append(rows)
        return self.now


def watching(model, *, words=None, **settings):
    """A callback that watches `model`; the rows of step N are [N]."""
    report = (lambda _word: None) if words is None else words.append
    watch = DivergenceCallback(WatchSettings(**settings), peek=lambda number: [number], report=report)
    watch.on_train_begin(model, done=0, steps=100)
    return watch


def take(watch, number, loss, norm=1.0):
    """Report a step; whether its update was applied."""
    result = measured(loss, norm)
    accepted = watch.accept_gradient(number, result, ROWS)
    step = make_step(number, loss=loss, gradient_norm=norm, skipped=not accepted)
    watch.on_step_end(step, 100)
    return accepted


def usual(watch, count=8, loss=2.0):
    for number in range(1, count + 1):
        assert take(watch, number, loss + number / 100)


NO_NUMBERS = [
    (math.nan, 1.0, "the loss is nan"),
    (math.inf, 1.0, "the loss is inf"),
    (2.0, math.nan, "the gradient is nan"),
    (2.0, math.inf, "the gradient is inf"),
]
SPIKES = [(30.0, 1.0, "the loss jumped to 30 from about 2.0"), (2.0, 1e6, r"the gradient exploded to 1e\+06")]


@pytest.mark.parametrize(("loss", "norm", "output"), NO_NUMBERS)
def test_a_step_without_a_finite_loss_is_skipped_with_a_warning_and_a_second_stops_the_run(
    loss, norm, output
):
    words = []
    watch = watching(Model(), words=words)
    usual(watch)
    assert not take(watch, 9, loss, norm)
    assert output in words[0]
    assert "log.jsonl:3, log.jsonl:8" in words[0]
    assert "trained on again" in words[0]
    assert "`train.watch.tolerate`" in words[0]
    with pytest.raises(Diverged, match=output) as caught:
        take(watch, 10, loss, norm)
    assert caught.value.where == "log.jsonl:3, log.jsonl:8"
    assert "last good checkpoint is kept" in caught.value.why
    assert len(words) == 1


@pytest.mark.parametrize(("loss", "norm", "output"), SPIKES)
def test_spikes_stop_the_run_if_rows_that_the_model_knew_got_worse_too(loss, norm, output):
    watch = watching(Model(loss=25.0))
    usual(watch)
    assert take(watch, 9, loss, norm)
    with pytest.raises(
        Diverged, match=output + r".*, and the rows of step 1 rose to 25 from 2\.01"
    ) as caught:
        take(watch, 10, loss, norm)
    assert caught.value.where == "log.jsonl:3, log.jsonl:8"
    for setting in ("train.learning_rate", "train.watch.spike", "train.watch.tolerate"):
        assert setting in caught.value.fix


def test_known_rows_whose_loss_is_no_number_any_more_are_worse():
    watch = watching(Model(loss=math.nan), tolerate=0)
    usual(watch)
    with pytest.raises(Diverged):
        take(watch, 9, 30.0)


@pytest.mark.parametrize(("loss", "norm", "_output"), SPIKES)
def test_hard_rows_are_learned_from_while_the_model_knows_what_it_knew(loss, norm, _output):
    words, model = [], Model(loss=2.0)
    watch = watching(model, words=words)
    usual(watch)
    assert all(take(watch, number, loss, norm) for number in range(9, 60))
    assert model.asked
    assert not words


def test_a_spike_alone_measures_nothing_and_skips_nothing():
    model = Model(loss=30.0)
    watch = watching(model)
    usual(watch)
    for number in range(9, 30, 2):
        assert take(watch, number, 40.0)
        assert take(watch, number + 1, 2.0)
    assert not model.asked


def test_a_good_step_between_two_skipped_ones_counts():
    watch = watching(Model())
    usual(watch)
    for number in range(9, 20, 2):
        assert not take(watch, number, math.nan)
        assert take(watch, number + 1, 2.0)


def test_the_model_is_asked_for_the_rows_that_it_knew_best():
    model = Model(loss=0.4)
    watch = watching(model, tolerate=0)
    for number, loss in enumerate((2.0, 0.3, 1.0, 1.1, 9.0), 1):
        take(watch, number, loss)
    assert model.asked == [[2]]


@pytest.mark.parametrize(("objective", "stops"), [("sft", True), ("dpo", True), ("grpo", False)])
def test_the_loss_of_sampled_answers_may_jump(tmp_path, objective, stops):
    """It is a sum weighted by advantages, of either sign: large rewards make it large, and right."""
    rewards = {"rewards": [{"metric": "task_success"}]} if objective == "grpo" else {}
    settings = TrainSettings.model_validate({"objective": objective, **rewards})
    store = CheckpointStore(tmp_path, keep=1)
    (watch,) = guard_callbacks(
        settings, store, deadline=None, peek=lambda number: [number], report=lambda _message: None
    )
    watch.on_train_begin(Model(loss=5.0), done=0, steps=100)
    for number, loss in enumerate((-0.2, 0.1, 0.3, -0.1, 0.2), 1):
        assert take(watch, number, loss)
    assert take(watch, 6, 5.0)
    with pytest.raises(Diverged) if stops else nullcontext():
        take(watch, 7, 5.0)
    assert take(watch, 8, 0.1)
    assert not take(watch, 9, math.nan)
    with pytest.raises(Diverged):
        take(watch, 10, math.nan)


def test_close_to_zero_a_multiple_alone_is_no_spike():
    watch = watching(Model(loss=50.0), tolerate=0)
    usual(watch, loss=0.001)
    assert take(watch, 9, 0.4)


def test_divergence_is_judged_the_same_after_a_resume_at_any_step():
    chance = random.Random(5)
    losses = [chance.choice([2.0, 2.5, 3.0, 50.0, 50.0]) * chance.uniform(0.8, 1.2) for _ in range(60)]
    for number in (20, 40):
        losses[number - 1 : number + 1] = [2.0, math.nan]

    def judge(watch, numbers):
        return [take(watch, number, losses[number]) for number in numbers]

    whole_model = Model(loss=2.0)
    expected = judge(watching(whole_model, tolerate=2, window=6), range(60))
    assert False in expected
    assert whole_model.asked
    for cut in range(0, 60, 7):
        model = Model(loss=2.0)
        before, after = (watching(model, tolerate=2, window=6) for _ in range(2))
        got = judge(before, range(cut))
        after.restore(json.loads(json.dumps(before.state())))
        assert [*got, *judge(after, range(cut, 60))] == expected
        assert model.asked == whole_model.asked


def test_at_most_a_dozen_rows_are_named():
    assert name_rows([row(line) for line in range(1, 31)]).endswith("log.jsonl:12 and 18 more")
