"""Looks change nothing but the end of a run, and a resumed run decides as the whole one did."""

from types import SimpleNamespace

import pytest
import torch
from test_train_loop import SETTINGS, SHAPE, Before, Killed, final, make_rows

from graftwork.files.disk import Journal
from graftwork.model.adapters.peft import attach
from graftwork.model.load import load_base
from graftwork.records.errors import EnvironmentFailure, GracefulStop, UserError
from graftwork.train.callbacks import EvaluationCallback, choose_evaluation_rows, read_evaluations
from graftwork.train.distributed.strategies import SingleProcess
from graftwork.train.engine import TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import EvalSettings


class Scripted:
    """Gives the grades that it is asked to, call by call, and counts the calls."""

    def __init__(self, *looks, smaller=False):
        self.looks = list(looks)
        self.smaller = smaller
        self.asked = []

    def choose(self, rows, *, metric, most):
        return list(rows)[:most]

    def smaller_is_better(self, metric):
        return self.smaller

    def evaluate(self, model, rows, *, metric, seconds, progress):
        progress()
        self.asked.append(len(rows))
        return tuple(self.looks.pop(0))[: len(rows)]


def make_loop(tiny_base, folder, *, settings=None, evaluator=None, before=None, words=None, **more):
    torch.set_num_threads(1)
    model = load_base(tiny_base)
    engine = TrainingEngine(model, attach(model, SHAPE, seed=SETTINGS.seed), settings=SETTINGS)
    callbacks = [Before(before)] if before else []
    evaluation = None
    if settings:
        output = words.append if words is not None else lambda word: None
        evaluation = EvaluationCallback(
            settings, make_rows(6), folder=folder, evaluator=evaluator, report=output, **more
        )
        callbacks.append(evaluation)
    loop = TrainingLoop(
        engine,
        EpochOrder(make_rows(), settings=SETTINGS),
        RunContext(SETTINGS, folder, report=words.append if words is not None else lambda word: None),
        callbacks=callbacks,
    )
    return loop, evaluation


def test_a_run_with_evaluations_has_the_losses_and_bytes_of_one_without(tiny_base, tmp_path):
    plain, _ = make_loop(tiny_base, tmp_path / "plain")
    plain.run()
    looked, _ = make_loop(tiny_base, tmp_path / "looked", settings=EvalSettings(every=3, cases=4))
    looked.run()
    assert final(looked) == final(plain)
    assert [s.loss for s in read_steps(tmp_path / "looked")] == [
        s.loss for s in read_steps(tmp_path / "plain")
    ]
    looks = read_evaluations(tmp_path / "looked")
    assert [look.step for look in looks] == [3, 6, 8]
    assert all(look.cases == 4 and look.compared for look in looks)
    assert looks[0].value > looks[-1].value


def test_patience_ends_a_run_with_a_plain_reason(tiny_base, tmp_path):
    words = []
    settings = EvalSettings(every=1, metric="m", cases=2, early_stopping=2)
    evaluator = Scripted((0, 1), (1, 1), (1, 0), (1, 1))
    loop, evaluation = make_loop(tiny_base, tmp_path, settings=settings, evaluator=evaluator, words=words)
    loop.run()
    assert len(read_steps(tmp_path)) == 4
    reason = next(word for word in words if word.startswith("stopped early"))
    assert "after step 4 of 8" in reason
    assert "best at step 2" in reason
    assert evaluation.state()["best_step"] == 2


@pytest.mark.parametrize("smaller", [True, False])
def test_the_score_is_smaller_for_the_better_model_whatever_the_metric(tiny_base, tmp_path, smaller):
    settings = EvalSettings(every=4, metric="m", cases=2)
    scores = []
    loop, evaluation = make_loop(
        tiny_base,
        tmp_path,
        settings=settings,
        evaluator=Scripted((0, 1), (1, 1), smaller=smaller),
        before=lambda *_: scores.append(evaluation.score()),
    )
    loop.run()
    scores.append(evaluation.score())
    assert [score is not None for score in scores] == [False] * 4 + [True] + [False] * 3 + [True]
    assert (scores[4] < scores[-1]) is smaller


@pytest.mark.parametrize("killed_before", [2, 4, 5, 7, 8])
def test_killed_anywhere_it_decides_as_the_whole_run_did(tiny_base, tmp_path, killed_before):
    """The evaluator of the second process would say otherwise; what was found before the kill holds."""
    settings = EvalSettings(every=2, metric="m", cases=4, early_stopping=2)
    reported = [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 0, 0), (1, 0, 0, 0)]
    whole, whole_evaluation = make_loop(
        tiny_base, tmp_path / "a", settings=settings, evaluator=Scripted(*reported)
    )
    whole.run()

    def die(step, _steps):
        if step == killed_before:
            raise Killed

    taken = (killed_before - 1) // 2
    first = Scripted(*reported)
    cut, _ = make_loop(tiny_base, tmp_path / "b", settings=settings, evaluator=first, before=die)
    with pytest.raises(Killed):
        cut.run()
    second = Scripted(*reported[taken:])
    resumed, evaluation = make_loop(tiny_base, tmp_path / "b", settings=settings, evaluator=second)
    resumed.run()
    assert final(resumed) == final(whole)
    assert evaluation.state() == whole_evaluation.state()

    def seen(folder):
        return [look.model_copy(update={"seconds": 0}) for look in read_evaluations(folder)]

    assert seen(tmp_path / "b") == seen(tmp_path / "a")
    assert len(first.asked) + len(second.asked) == len(reported)
    assert len(Journal(tmp_path / "b" / "evaluations.jsonl").read()) == len(reported)


def test_a_first_evaluation_cut_short_sets_the_measure_and_a_shorter_one_is_not_compared(tiny_base, tmp_path):
    words = []
    evaluator = Scripted((1, 1, 1, 1, 0), (1,) * 6, (1, 1, 1), (0, 0, 0, 0))
    settings = EvalSettings(every=2, metric="m", cases=6, early_stopping=1)
    loop, _ = make_loop(tiny_base, tmp_path, settings=settings, evaluator=evaluator, words=words)
    loop.run()
    looks = read_evaluations(tmp_path)
    assert evaluator.asked[:2] == [6, 4]
    assert [(look.cases, look.compared, look.better) for look in looks] == [(4, True, True), (4, True, False)]
    assert any("over 4 case(s) of 6, as many as the time allowed" in word for word in words)


def test_asked_to_stop_during_a_look_it_stops_and_the_look_is_not_lost(tiny_base, tmp_path):
    settings = EvalSettings(every=4, metric="m", cases=2)
    whole, _ = make_loop(tiny_base, tmp_path / "a", settings=settings, evaluator=Scripted((0, 1), (1, 1)))
    whole.run()
    cut, _ = make_loop(
        tiny_base, tmp_path / "b", settings=settings, evaluator=Scripted((0, 1)), stop_requested=lambda: True
    )
    with pytest.raises(GracefulStop, match="during the evaluation after step 4"):
        cut.run()
    resumed, _ = make_loop(tiny_base, tmp_path / "b", settings=settings, evaluator=Scripted((0, 1), (1, 1)))
    resumed.run()
    assert final(resumed) == final(whole)
    assert [(k.step, k.value) for k in read_evaluations(tmp_path / "b")] == [(4, 0.5), (8, 1.0)]


def test_a_missing_requirement_of_evaluations_is_reported_before_the_run():
    with pytest.raises(EnvironmentFailure, match="the metric json_valid cannot be measured here"):
        choose_evaluation_rows(
            make_rows(2), settings=EvalSettings(every=1, metric="json_valid"), evaluator=None
        )
    with pytest.raises(UserError, match="the validation split is empty"):
        choose_evaluation_rows([], settings=EvalSettings(every=1), evaluator=None)


class Second(SingleProcess):
    """One of two who train together: what the first says arrives by `broadcast`."""

    rank, size = 1, 2

    def __init__(self, *reported):
        super().__init__()
        self.reported = list(reported)

    def broadcast(self, value):
        return self.reported.pop(0)


def test_other_processes_decide_by_the_evaluation_of_the_first(tiny_base, tmp_path):
    from test_train_evaluations import make_step

    settings = EvalSettings(every=1, metric="m", cases=4)
    first = {"metric": "m", "cases": 4, "seconds": 1.0}
    strategy = Second(False, {**first, "step": 1, "value": 0.75}, True, {**first, "step": 2, "value": 0.5})
    evaluation = EvaluationCallback(settings, make_rows(4), folder=tmp_path, evaluator=Scripted())
    evaluation.on_train_begin(SimpleNamespace(strategy=strategy), done=0, steps=9)
    evaluation.on_step_end(make_step(1), 9)
    assert (evaluation.latest.value, evaluation.latest.cases, evaluation.latest.better) == (0.75, 4, True)
    evaluation.on_step_end(make_step(2), 9)
    assert (evaluation.latest.value, evaluation.latest.better) == (0.5, False)
    assert not (tmp_path / "evaluations.jsonl").exists()
