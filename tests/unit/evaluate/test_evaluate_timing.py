"""Latency is measured in turn: load that comes and goes is no difference between models."""

from pathlib import Path
from statistics import median

import pytest
from test_subjects_models import make_cases, make_job, read_generation

from graftwork.engines.interface import Timing
from graftwork.evaluate import project as evaluation
from graftwork.evaluate.ask.runner import time_in_turn
from graftwork.evaluate.ask.timing import group_of, is_timed, time_subjects
from graftwork.evaluate.ask.worker import evaluate
from graftwork.evaluate.cases import cases_to_time
from graftwork.evaluate.project import ask_everybody
from graftwork.evaluate.subjects import Lineup, Subject, share_engine, timed_together
from graftwork.records.report import Endpoint, TimingJob


class BusyMachine:
    """Requests take 1 s; from the given request on, 5 s."""

    def __init__(self, *, busy_from):
        self.asked = []
        self._busy_from = busy_from

    def time_one(self, name, _prompt):
        self.asked.append(name)
        return Timing(None, 5.0 if len(self.asked) > self._busy_from else 1.0)


def test_load_that_comes_half_way_falls_on_all_subjects_alike():
    machine = BusyMachine(busy_from=8)
    prompts = {"base": [[1]] * 8, "adapter": [[1]] * 8}
    timings = time_in_turn(prompts, time_one=machine.time_one)
    base, adapter = ([timing.total for timing in timings[name]] for name in prompts)
    assert median(base) == median(adapter)
    assert base == adapter


def test_the_order_of_timed_subjects_rotates_over_the_cases():
    machine = BusyMachine(busy_from=99)
    rounds = []
    time_in_turn(
        {"a": [[1]] * 3, "b": [[2]] * 3, "c": [[3]] * 3}, time_one=machine.time_one, after_round=rounds.append
    )
    assert machine.asked == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert rounds == [1, 2, 3]


@pytest.fixture
def subjects(tmp_path, tiny_base):
    """Base and adapter that have answered their cases and were not timed."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    shape = AdapterShape(rank=2, alpha=4, targets=("q_proj",), layers=(0, 1))
    model = load_base(tiny_base)
    attach(model, shape, seed=1)
    save_adapter(model, tmp_path / "learned", shape=shape, base="tiny")
    base = make_job(tmp_path, tiny_base, cases=4, latency_cases=3)
    adapter = base.model_copy(
        update={
            "subject": "adapter",
            "folder": str(tmp_path / "adapter"),
            "adapter_folder": str(tmp_path / "learned"),
            "identity": "learned",
        }
    )
    for job in (base, adapter):
        evaluate(job.model_copy(update={"latency_cases": 0}))
    return base, adapter


def test_one_process_answers_for_all_subjects_as_a_process_of_each_does(tmp_path, subjects, monkeypatch):
    from graftwork.evaluate.ask import timing
    from graftwork.evaluate.ask.answers import read_answers

    loads = []

    class CountedEngine(timing.EmbeddedEngine):
        def __init__(self, source):
            loads.append(source.base_folder)
            super().__init__(source)

    monkeypatch.setattr(timing, "EmbeddedEngine", CountedEngine)
    again = tuple(
        job.model_copy(update={"folder": str(tmp_path / f"{job.subject}-again"), "latency_cases": 0})
        for job in subjects
    )
    group = group_of(again, cases=make_cases(4), requests=3)
    (tmp_path / "timing").mkdir()
    job = TimingJob(folder=str(tmp_path / "timing"), jobs=again, requests=3, group=group, answers_first=True)
    for _ in range(2):  # the second time everything is there
        time_subjects(job)
    assert len(loads) == 1
    assert is_timed(again, group)
    for alone, together in zip(subjects, again, strict=True):
        first, second = ({a.case_id: a.text for a in read_answers(Path(j.folder))} for j in (alone, together))
        assert first == second


def test_on_a_card_base_and_adapter_share_a_process(subjects):
    def placed(**changes):
        return [
            Subject(job.subject, Path(job.folder), job.model_copy(update={"engine": "graftwork", **changes}))
            for job in subjects
        ]

    assert share_engine(placed(device="cuda"))
    assert not share_engine(placed(device="cpu"))
    assert not share_engine(placed(device="cuda", shards=2))
    assert not share_engine(placed(device="cuda", engine="llamacpp 0.2"))


def test_subjects_timed_in_turn_have_the_times_of_the_same_cases(tmp_path, subjects):
    cases = make_cases(4)
    group = group_of(subjects, cases=cases, requests=3)
    assert read_generation(subjects[0].folder).single_latency_seconds == ()
    assert not is_timed(subjects, group)
    (tmp_path / "timing").mkdir()
    time_subjects(TimingJob(folder=str(tmp_path / "timing"), jobs=subjects, requests=3, group=group))
    assert is_timed(subjects, group)
    made = [read_generation(job.folder) for job in subjects]
    for report in made:
        assert len(report.single_latency_seconds) == len(report.first_token_seconds) == 3
        assert report.timed_cases == tuple(case.id for case in cases_to_time(cases, most=3))
        assert report.timed_group == group
    assert made[0].answers == made[1].answers == 4


def make_subject(job, name, **changes):
    job = job.model_copy(update={"subject": name, "folder": str(Path(job.folder).parent / name), **changes})
    return Subject(name, Path(job.folder), job, name)


def test_own_models_are_timed_together_after_all_have_answered(tmp_path, tiny_base, monkeypatch):
    done = []
    monkeypatch.setattr(
        evaluation,
        "ask_subject",
        lambda _work, subject, _cases: done.append((subject.name, subject.job.latency_cases)),
    )
    monkeypatch.setattr(
        evaluation,
        "time_together",
        lambda _work, subjects, _cases, **_: done.append(
            tuple((subject.name, subject.job.latency_cases) for subject in subjects)
        ),
    )
    job = make_job(tmp_path, tiny_base)
    away = make_subject(job, "away", endpoint=Endpoint(url="http://h/v1", model="m"))
    base, adapter = make_subject(job, "base"), make_subject(job, "adapter")
    ask_everybody(None, Lineup(base, adapter, references=(away,)), [])
    assert done == [("away", 2), ("base", 0), ("adapter", 0), (("base", 2), ("adapter", 2))]


def test_a_subject_alone_is_timed_by_its_own_worker(tmp_path, tiny_base):
    job = make_job(tmp_path, tiny_base)
    base = make_subject(job, "base")
    assert timed_together([base, make_subject(job, "untimed", latency_cases=0)]) == []
