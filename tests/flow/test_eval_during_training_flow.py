"""A run that is looked at on the way: by answers, sent to a tracker, killed once, shown on a page."""

import pytest
from flows import run, run_folder

from graftwork.records.run import TrainOutcome


def test_a_killed_run_with_evaluations_ends_as_if_nothing_had_happened(
    small_project, change_settings, listener
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    change_settings(
        small_project,
        train={
            "rank": 2,
            "epochs": 2,
            "batch_size": 4,
            "checkpoint_every": 4,
            "threads": 1,
            "eval": {"every": 3, "metric": "truncated", "cases": 3},
            "run": {"trackers": ["tensorboard"], "rehearse_crash": True},
        },
    )
    outcome = run(small_project, listener, upto="train").get("train", TrainOutcome)
    folder = run_folder(small_project)
    assert outcome.restarts == 1
    assert outcome.looks[-1].step == outcome.steps
    assert {look.cases for look in outcome.looks} == {3}
    assert outcome.best_step == outcome.looks[0].step, "a tie is not better"
    assert outcome.settings["evaluation"]["max_new_tokens"] == 4
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, outcome.steps + 1))
    assert [event.step for event in events.Scalars("look/truncated")] == [look.step for look in outcome.looks]
    page = (folder / "training.html").read_text()
    assert "Evaluations during training" in page
    assert "killed after step" in page
    assert any("evaluation after step 3: truncated" in word for word in listener.words)
