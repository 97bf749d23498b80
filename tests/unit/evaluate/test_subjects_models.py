"""Models as subjects: shared out they say the same, killed they lose nothing."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gate_samples import new_case

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.local import settle, source_of
from graftwork.evaluate.ask import shards as shard_processes
from graftwork.evaluate.ask.answers import CaseBatch, read_answers
from graftwork.evaluate.ask.shards import share_out
from graftwork.evaluate.ask.worker import GENERATION_FILE, evaluate
from graftwork.evaluate.cases import write_cases
from graftwork.records.report import EvalJob, Generation


def make_cases(n):
    return tuple(new_case(f"c{i:03}", "why " * (1 + i % 5), f"because {i}") for i in range(n))


def make_job(root, base, *, cases=12, **changes):
    write_cases(root / "cases.jsonl", cases=make_cases(cases))
    values = {
        "subject": "base",
        "folder": str(root / "job"),
        "base_folder": str(base),
        "adapter_folder": None,
        "cases_file": str(root / "cases.jsonl"),
        "max_new_tokens": 6,
        "batch_size": 3,
        "latency_cases": 2,
        "threads": 1,
        "identity": "tiny",
    }
    return EvalJob(**{**values, **changes})


def texts(folder):
    return {(a.case_id, a.repeat): a.text for a in read_answers(Path(folder))}


def read_generation(folder):
    return Generation.from_json((Path(folder) / GENERATION_FILE).read_bytes())


@pytest.fixture
def same_threads():
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("same_threads")
def test_shared_out_to_processes_the_answers_are_those_of_one(tmp_path, tiny_base):
    sampled = {"temperature": 0.9, "repeats": 2, "seed": 5}
    one = make_job(tmp_path, tiny_base, folder=str(tmp_path / "one"), **sampled)
    evaluate(one)
    many = one.model_copy(update={"folder": str(tmp_path / "many"), "shards": 2})
    evaluate(many)
    assert texts(many.folder) == texts(one.folder)
    made = read_generation(many.folder)
    assert made.settings["processes"] == 2
    assert made.answers == 24
    assert len(list((tmp_path / "many").glob("shard-*/answers.jsonl"))) == 2


def wait_for_an_answer(folder, worker):
    end = time.monotonic() + 120
    while not list(folder.rglob("*.json")):
        assert time.monotonic() < end
        try:
            pytest.fail(f"the worker ended with {worker.wait(timeout=0.02)}")
        except subprocess.TimeoutExpired:
            continue


@pytest.mark.usefixtures("same_threads")
def test_killed_while_shared_out_what_was_answered_stays(tmp_path, tiny_base, monkeypatch):
    # Orphans stop at their next batch; on a busy machine that may take minutes.
    monkeypatch.setattr(shard_processes, "PATIENCE_SECONDS", 600)
    job = make_job(
        tmp_path, tiny_base, cases=40, batch_size=2, shards=2, answers_folder=str(tmp_path / "answers")
    )
    (tmp_path / "job.json").write_text(job.to_json())
    command = [sys.executable, "-m", "graftwork.evaluate.ask.worker", str(tmp_path / "job.json")]
    worker = subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    wait_for_an_answer(tmp_path / "answers", worker)
    worker.kill()
    assert worker.wait() == -signal.SIGKILL
    kept = {path: path.read_bytes() for path in (tmp_path / "answers").glob("??/[!.]*.json")}
    evaluate(job)
    assert len(texts(job.folder)) == 40
    assert kept
    assert all(path.read_bytes() == content for path, content in kept.items())
    evaluate(job.model_copy(update={"folder": str(tmp_path / "one"), "shards": 1, "answers_folder": None}))
    assert texts(tmp_path / "one") == texts(job.folder)


def test_shares_hold_every_batch_once_and_no_process_is_idle(tmp_path, tiny_base):
    job = make_job(tmp_path, tiny_base, shards=5, threads=4, device="cuda")
    batches = [CaseBatch(0, (f"c{i}",)) for i in range(3)]
    shares = share_out(job, batches, gpus=2)
    assert [share.device for share in shares] == ["cuda:0", "cuda:1", "cuda:0"]
    assert sorted(b for share in shares for b in share.batches) == [(0, (f"c{i}",)) for i in range(3)]
    assert {share.threads for share in shares} == {1}
    assert share_out(job, []) == []


@pytest.mark.usefixtures("same_threads")
def test_the_recorded_reply_is_weighed_as_transformers_weighs_it(tmp_path, tiny_base):
    import torch
    from transformers import AutoModelForCausalLM

    model = EmbeddedEngine(source_of(settle(make_job(tmp_path, tiny_base, perplexity=True))))
    conversations = [(case.messages, "because " * (1 + n)) for n, case in enumerate(make_cases(6))]
    found = model.reply_losses(conversations)
    peer = AutoModelForCausalLM.from_pretrained(tiny_base)
    for (messages, reply), loss in zip(conversations, found, strict=True):
        row = model.template.render(messages, reply)
        labels = torch.tensor([[-100] * row.trained_from + list(row.tokens[row.trained_from :])])
        with torch.no_grad():
            expected = peer(input_ids=torch.tensor([list(row.tokens)]), labels=labels).loss
        assert loss == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.usefixtures("same_threads")
def test_the_first_token_comes_before_the_last_and_the_report_says_what_was_loaded(tmp_path, tiny_base):
    job = make_job(tmp_path, tiny_base, cases=2, perplexity=True)
    evaluate(job)
    made = read_generation(job.folder)
    assert all(0 < f <= t for f, t in zip(made.first_token_seconds, made.single_latency_seconds, strict=True))
    output = {
        "engine": "graftwork",
        "device": "cpu",
        "base_as": "float32, not quantized",
        "decoding": "greedy",
    }
    assert output.items() <= made.settings.items()
    assert all(
        a.reference_loss is not None and math.isfinite(a.reference_loss)
        for a in read_answers(Path(job.folder))
    )
