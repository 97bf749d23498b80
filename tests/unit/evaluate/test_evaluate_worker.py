"""Asking: nothing is repeated after a kill, a stop is in order, the real worker runs end to end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gate_samples import new_generation
from hypothesis import given
from hypothesis import strategies as st
from stand_in_engine import StandInEngine

from graftwork.evaluate.ask.answers import ANSWERS_FILE, cut_missing, read_answers
from graftwork.evaluate.ask.runner import CaseRunner
from graftwork.evaluate.ask.worker import GENERATION_FILE, drop_answers_of_another_job, evaluate
from graftwork.evaluate.cases import choose_cases, choose_worked_example, hash_cases, read_cases, write_cases
from graftwork.grading.answers import AnswerFields
from graftwork.records.dataset import Row
from graftwork.records.errors import EXIT_RESUME, GracefulStop, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.release import PromptVariant
from graftwork.records.report import Case, EvalJob, Generation


def make_cases(n):
    return tuple(
        Case(
            id=f"c{i:03}",
            origin=Origin(file="f", line=i + 1),
            messages=(
                Message(role="system", content="Answer."),
                Message(role="user", content="why " * (1 + i % 5)),
            ),
            reference="{}",
        )
        for i in range(n)
    )


def make_row(i, reply, tokens=10):
    return Row(
        id=f"r{i}",
        origin=Origin(file="f", line=i + 1),
        messages=(Message(role="system", content="S"), Message(role="user", content=f"q{i}")),
        reply=reply,
        tokens=tuple(range(tokens)),
        trained_from=1,
    )


def make_job(folder, **changes):
    values = {
        "subject": "adapter",
        "folder": str(folder),
        "base_folder": str(folder),
        "adapter_folder": None,
        "cases_file": str(folder / "cases.jsonl"),
        "max_new_tokens": 8,
        "batch_size": 4,
        "latency_cases": 3,
    }
    return EvalJob(**{**values, **changes})


class Silent:
    def __init__(self):
        self.beats = []

    def beat(self, phase, done, total, *, seconds_left=None, **detail):
        self.beats.append((phase, done, total))


def make_runner(job, model, *, stop=lambda: False, progress=None):
    return CaseRunner(job, engine=model, progress=progress or Silent(), stop_asked=stop)


def texts(folder):
    return {a.case_id: a.text for a in read_answers(folder)}


def test_all_cases_are_answered_in_batches(tmp_path):
    cases, model, progress = make_cases(10), StandInEngine(), Silent()
    runner = make_runner(make_job(tmp_path), model, progress=progress)
    runner.ask_all(cases)
    assert model.batches == [4, 4, 2]
    assert texts(tmp_path) == {c.id: str(len(model.render(c.messages).tokens)) for c in cases}
    assert progress.beats[-1] == ("answering", 10, 10)
    seconds = tuple(timing.total for timing in runner.time_requests(cases))
    assert len(seconds) == 3
    generation = runner.summarise(single_latency_seconds=seconds)
    assert (generation.answers, generation.peak_memory_gib) == (10, 0.5)


def test_a_killed_worker_repeats_nothing(tmp_path):
    cases, job = make_cases(10), make_job(tmp_path)
    with pytest.raises(RuntimeError):
        make_runner(job, StandInEngine(fail_at_batch=2)).ask_all(cases)
    first = (tmp_path / ANSWERS_FILE).read_bytes()
    assert len(first.splitlines()) == 4
    model = StandInEngine()
    make_runner(job, model).ask_all(cases)
    assert model.batches == [4, 2]
    assert (tmp_path / ANSWERS_FILE).read_bytes().startswith(first)
    assert len(texts(tmp_path)) == 10


def test_a_batch_torn_in_the_middle_is_asked_whole_and_kept_once(tmp_path):
    cases, job = make_cases(8), make_job(tmp_path)
    make_runner(job, StandInEngine()).ask_all(cases)
    whole = texts(tmp_path)
    lines = (tmp_path / ANSWERS_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / ANSWERS_FILE).write_bytes(b"".join(lines[:5]) + lines[5][:20])
    model = StandInEngine()
    make_runner(job, model).ask_all(cases)
    assert model.batches == [4]
    assert texts(tmp_path) == whole


def test_a_stop_ends_at_the_next_batch(tmp_path):
    cases, job, model = make_cases(10), make_job(tmp_path), StandInEngine()
    with pytest.raises(GracefulStop, match="4 of 10"):
        make_runner(job, model, stop=lambda: len(model.batches) >= 1).ask_all(cases)
    assert len(texts(tmp_path)) == 4


def test_answers_of_another_job_are_not_taken_up(tmp_path):
    write_cases(tmp_path / "cases.jsonl", cases=make_cases(2))
    folder, base = tmp_path / "job", tmp_path / "base"
    base.mkdir()
    job = make_job(folder, base_folder=str(base), cases_file=str(tmp_path / "cases.jsonl"))
    drop_answers_of_another_job(job)
    (folder / ANSWERS_FILE).write_text("kept")
    drop_answers_of_another_job(job)
    assert (folder / ANSWERS_FILE).exists()
    drop_answers_of_another_job(job.model_copy(update={"max_new_tokens": 9}))
    assert not (folder / ANSWERS_FILE).exists()


@given(st.dictionaries(st.text(min_size=1), st.lists(st.just(0), max_size=9)), st.integers(1, 5))
def test_batches_hold_every_case_once_whatever_their_order(prompts, size):
    lengths = {case: len(tokens) for case, tokens in prompts.items()}
    batches = [batch.cases for batch in cut_missing(lengths, set(), size=size, repeats=1)]
    assert sorted(i for batch in batches for i in batch) == sorted(prompts)
    assert all(1 <= len(batch) <= size for batch in batches)
    again = cut_missing(dict(reversed(lengths.items())), set(), size=size, repeats=1)
    assert [batch.cases for batch in again] == batches


def test_cases_survive_the_file_and_their_choice_is_stable(tmp_path):
    rows = [make_row(i, "{}") for i in range(20)]
    chosen = choose_cases(rows, most=7)
    assert chosen == choose_cases(rows, most=7)
    assert set(chosen) <= set(choose_cases(rows, most=12)) <= set(choose_cases(rows))
    write_cases(tmp_path / "c.jsonl", cases=chosen)
    assert read_cases(tmp_path / "c.jsonl") == chosen
    assert hash_cases(chosen) != hash_cases(chosen[:-1])
    with pytest.raises(UserError, match="no held-out cases"):
        choose_cases([])
    with pytest.raises(UserError, match="no such file"):
        read_cases(tmp_path / "absent.jsonl")


def test_the_worked_example_answers_and_follows_the_system_turn():
    rows = [
        make_row(0, '{"answer": "", "refused": true}', tokens=12),
        make_row(1, '{"answer": "long", "refused": false}', tokens=90),
        make_row(2, '{"answer": "middle", "refused": false}', tokens=12),
        make_row(3, '{"answer": "short", "refused": false}', tokens=2),
    ]
    example = choose_worked_example(rows, fields=AnswerFields())
    assert [m.role for m in example] == ["user", "assistant"]
    assert "middle" in example[1].content
    messages = PromptVariant(examples=example).apply(rows[0].messages)
    assert [m.role for m in messages] == ["system", "user", "assistant", "user"]
    assert PromptVariant().apply(messages) == messages
    assert choose_worked_example([], fields=AnswerFields()) == ()


def start_worker(job_file):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "graftwork.evaluate.ask.worker", str(job_file)], env=environment
    )


def wait_for_lines(path: Path, *, lines: int, worker, deadline: float = 120.0) -> None:
    end = time.monotonic() + deadline
    while not (path.exists() and path.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < end, "the worker did not answer in time"
        try:
            pytest.fail(f"the worker ended with {worker.wait(timeout=0.02)}")
        except subprocess.TimeoutExpired:
            continue


def test_the_real_worker_killed_stopped_and_resumed_says_the_same(tmp_path, tiny_base):
    write_cases(tmp_path / "cases.jsonl", cases=make_cases(60))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    job = make_job(
        broken,
        base_folder=str(tiny_base),
        cases_file=str(tmp_path / "cases.jsonl"),
        max_new_tokens=16,
        batch_size=2,
        threads=1,
    )
    import torch

    threads = torch.get_num_threads()
    evaluate(job.model_copy(update={"folder": str(whole)}))
    torch.set_num_threads(threads)
    (tmp_path / "job.json").write_text(job.to_json())

    worker = start_worker(tmp_path / "job.json")
    wait_for_lines(broken / ANSWERS_FILE, lines=3, worker=worker)
    worker.kill()
    assert worker.wait() == -signal.SIGKILL
    assert not (broken / GENERATION_FILE).exists()

    worker = start_worker(tmp_path / "job.json")
    wait_for_lines(broken / ANSWERS_FILE, lines=12, worker=worker)
    worker.terminate()
    assert worker.wait(timeout=120) == EXIT_RESUME
    assert json.loads((broken / "error.json").read_text())["error"] == "GracefulStop"

    assert start_worker(tmp_path / "job.json").wait(timeout=120) == 0
    generation = Generation.from_json((broken / GENERATION_FILE).read_bytes())
    assert generation.answers == 60
    assert len(generation.single_latency_seconds) == 3
    assert not (broken / "error.json").exists()
    assert texts(broken) == texts(whole)


def test_the_worker_answers_with_the_adapter_it_is_given(tmp_path, tiny_base):
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    model = load_base(tiny_base)
    shape = AdapterShape(rank=4, alpha=64, targets=("q_proj", "v_proj", "o_proj"), layers=(0, 1))
    torch.manual_seed(1)
    for parameter in attach(model, shape, seed=1):
        parameter.data.normal_()
    save_adapter(model, tmp_path / "adapter", shape=shape, base="tiny")
    write_cases(tmp_path / "cases.jsonl", cases=make_cases(2))
    job = make_job(
        tmp_path / "base",
        base_folder=str(tiny_base),
        cases_file=str(tmp_path / "cases.jsonl"),
        latency_cases=1,
        threads=torch.get_num_threads(),
    )
    evaluate(job)
    adapted = {"folder": str(tmp_path / "adapted"), "adapter_folder": str(tmp_path / "adapter")}
    evaluate(job.model_copy(update=adapted))
    assert texts(tmp_path / "base") != texts(tmp_path / "adapted")


def test_single_requests_are_timed_in_as_many_sessions_as_there_are():
    from graftwork.evaluate.cases import cases_to_time

    sessions = ["a", "a", "a", "b", None, None, "b"]
    cases = [
        case.model_copy(update={"session": session})
        for case, session in zip(make_cases(7), sessions, strict=True)
    ]
    found = cases_to_time(cases, most=7)
    assert cases_to_time(cases, most=3) == found[:3]
    assert [case.session for case in found] == ["a", "b", None, None, "a", "b", "a"]
    assert sorted(case.id for case in found) == sorted(case.id for case in cases)


@pytest.mark.parametrize(("timed", "asked_anew"), [(0, True), (2, False), (3, False)])
def test_answers_that_were_not_timed_are_timed_when_somebody_wants_to_know(tmp_path, timed, asked_anew):
    from graftwork.evaluate.ask import worker

    cases = make_cases(2)
    job = make_job(tmp_path, latency_cases=3)
    made = new_generation("adapter", answers=2, single_latency_seconds=(0.1,) * timed, peak_memory_gib=0)
    (tmp_path / GENERATION_FILE).write_text(made.to_json())
    assert worker._all_is_there(job, cases) is not asked_anew
    assert worker._all_is_there(job.model_copy(update={"latency_cases": 0}), cases)
