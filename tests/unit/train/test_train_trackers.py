"""A tracker gets every step once, and costs the run nothing when it fails."""

import sys
import threading
import types
from importlib import metadata

import pytest
from pydantic import ValidationError
from test_train_evaluations import make_step

from graftwork.process import extensions
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.run import TrainingEvaluation
from graftwork.train.settings import RunSettings, TrainSettings
from graftwork.train.trackers import TrackerCallback, require_installed


class Tape:
    """A tracker that notes what it gets, and fails at the step it is asked to."""

    PACKAGE = "json"

    def __init__(self, *, fails_at=None, fails_to_open=False):
        self.logged, self.opened, self.closed = [], [], 0
        self.fails_at, self.fails_to_open = fails_at, fails_to_open

    def open_run(self, run_id, settings, folder):
        if self.fails_to_open:
            raise ValueError("no such host\nand much more")
        self.opened.append((run_id, folder.name))
        return self

    def log(self, step, figures):
        if step == self.fails_at:
            raise RuntimeError("the line is down")
        self.logged.append((step, dict(figures)))

    def close(self):
        self.closed += 1


@pytest.fixture
def declare(monkeypatch):
    """Installs trackers, as packages with an entry point do."""
    installed = {}

    def declare(**trackers):
        installed.update(trackers)
        module = types.ModuleType("installed_trackers")
        vars(module).update(installed)
        monkeypatch.setitem(sys.modules, "installed_trackers", module)
        points = metadata.EntryPoints(
            metadata.EntryPoint(name, f"installed_trackers:{name}", "graftwork.trackers")
            for name in installed
        )
        monkeypatch.setattr(extensions.metadata, "entry_points", points.select)

    return declare


@pytest.fixture
def tape(declare):
    tape = Tape()
    declare(tape=tape)
    return tape


def make_track(folder, words=None, look=None, trackers=("tape",), **options):
    return TrackerCallback(
        trackers,
        run_id="run-1",
        settings={"rank": 8},
        folder=folder,
        latest_evaluation=lambda: look,
        report=(words if words is not None else []).append,
        **options,
    )


def work_through(track, steps):
    track.on_train_begin(None, done=0, steps=9)
    for step in steps:
        track.on_step_end(make_step(step), 9)


def test_steps_that_are_done_again_are_not_reported_again(tape, tmp_path):
    work_through(make_track(tmp_path), [1, 2, 3, 4])
    track = make_track(tmp_path)
    work_through(track, [3, 4, 5, 6])
    track.on_train_end()
    assert [step for step, _ in tape.logged] == [1, 2, 3, 4, 5, 6]
    assert tape.opened == [("run-1", "tape")] * 2
    assert tape.closed == 1


def test_a_look_goes_with_the_figures_of_its_step(tape, tmp_path):
    look = TrainingEvaluation(step=2, metric="json_valid", value=0.75, cases=4, seconds=1)
    work_through(make_track(tmp_path, look=look), [1, 2])
    assert tape.logged[1][1] == {
        "train/loss": 1.0,
        "train/learning_rate": 1e-3,
        "train/gradient_norm": 1.0,
        "train/tokens_per_second": 20.0,
        "look/json_valid": 0.75,
        "look/cases": 4.0,
    }
    assert "look/json_valid" not in tape.logged[0][1]


def test_a_tracker_that_fails_is_left_out_with_one_word(tape, declare, tmp_path):
    tape.fails_at = 2
    other = Tape()
    declare(other=other)
    words = []
    track = make_track(tmp_path, words, trackers=("tape", "other"))
    work_through(track, [1, 2, 3, 4])
    track.on_train_end()
    assert [step for step, _ in tape.logged] == [1]
    assert [step for step, _ in other.logged] == [1, 2, 3, 4]
    assert words == ["tracker tape is disabled for the rest of the run: RuntimeError: the line is down"]


@pytest.mark.parametrize("call", ["open_run", "log", "close"])
def test_a_tracker_that_never_answers_does_not_hold_the_run(tape, tmp_path, monkeypatch, call):
    held = threading.Event()
    monkeypatch.setattr(tape, call, lambda *_arguments: held.wait(60))
    words = []
    track = make_track(tmp_path, words, patience=0.05)
    work_through(track, [1, 2, 3])
    track.on_train_end()
    held.set()
    assert words == [
        "tracker tape is disabled for the rest of the run: TimeoutError: no answer within 0.05 s"
    ]


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_run(tape, tmp_path):
    tape.fails_to_open = True
    words = []
    work_through(make_track(tmp_path, words), [1, 2])
    assert words == ["tracker tape is disabled for the rest of the run: ValueError: no such host"]


def test_require_installed_names_the_missing_package_of_an_installed_tracker(declare):
    declare(tape=types.SimpleNamespace(PACKAGE="surely_not_installed", open_run=None))
    with pytest.raises(EnvironmentFailure) as caught:
        require_installed(["tape"])
    assert caught.value.fix.startswith("pip install surely_not_installed")


def test_require_installed_names_the_extra_of_a_built_in_tracker(monkeypatch):
    monkeypatch.setattr("graftwork.train.trackers.WeightsAndBiases.PACKAGE", "surely_not_installed")
    with pytest.raises(EnvironmentFailure) as caught:
        require_installed(["wandb"])
    assert '[wandb]"' in caught.value.fix


def test_settings_accept_a_tracker_of_an_installed_package_and_no_unknown_one(tape):
    assert RunSettings(trackers=("tape", "wandb")).trackers == ("tape", "wandb")
    with pytest.raises(ValidationError, match=r"unknown tracker 'tapes'; known: tensorboard, .*, tape"):
        RunSettings(trackers=("tapes",))


def test_a_tracker_without_open_run_is_refused_before_the_run(declare):
    declare(tape=types.SimpleNamespace(PACKAGE="json"))
    with pytest.raises(EnvironmentFailure, match="has no open_run"):
        require_installed(["tape"])


def test_a_missing_tracker_is_reported_before_rows_are_read_or_a_model_is_loaded(tmp_path, monkeypatch):
    from graftwork.train.worker import reporting_callbacks

    monkeypatch.setattr("graftwork.train.trackers.WeightsAndBiases.PACKAGE", "surely_not_installed")
    job = types.SimpleNamespace(run_id="run-1", folder=str(tmp_path), dataset_folder=str(tmp_path / "none"))
    settings = TrainSettings(run=RunSettings(trackers=("wandb",)), eval={"every": 5})
    with pytest.raises(EnvironmentFailure, match="the tracker wandb is not installed"):
        reporting_callbacks(job, settings)


def test_the_word_about_a_tracker_that_fails_has_no_password_in_it(tape, tmp_path, monkeypatch):
    address = "http://joe:pass-word@host:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)

    def fail(*_words):
        raise OSError(f"no answer from {address}/api for joe:pass-word")

    monkeypatch.setattr(tape, "open_run", fail)
    words = []
    work_through(make_track(tmp_path, words), [1])
    assert words == [
        "tracker tape is disabled for the rest of the run: OSError: "
        "no answer from http://…@host:5000/api for …"
    ]
