"""kill -9 at random moments of real GRPO runs, with reward processes: the same bytes, nothing graded twice.

`pytest -m slow --kills 50 tests/unit/train/test_train_rollout_kills.py` prints what was found.
"""

import json
import os
import random
import signal
import time
import traceback
from pathlib import Path

import pytest
from test_train_rollouts import make_cases, make_grpo_job

from graftwork.files.disk import Journal
from graftwork.records.run import TrainOutcome
from graftwork.train import worker
from graftwork.train.rollouts.episodes import EpisodeJournal

GRADES = """
import json, os

def noted(case, text):
    line = json.dumps([case.id, text]) + "\\n"
    file = os.open("{log}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
    return min(text.count("e") / 8, 1.0)
"""
ROLLOUTS = {"steps": 6, "prompts": 2, "num_generations": 4, "max_completion_length": 6}


def make_noted_job(base, folder):
    """A job whose reward writes down every answer that it grades."""
    job = make_grpo_job(base, folder, reward="noted", rollouts=ROLLOUTS)
    project = Path(job.project_folder) / folder.name
    (project / "rewards").mkdir(parents=True, exist_ok=True)
    (project / "rewards" / "own.py").write_text(GRADES.format(log=folder / "graded.jsonl"))
    return job.model_copy(update={"project_folder": str(project)})


def start(job):
    """The job in a process of its own. This process runs no tensor operation, so it may fork."""
    child = os.fork()
    if child:
        return child
    from train_samples import make_rows

    code = 1
    try:
        os.setsid()
        worker.read_rows = lambda _folder, _split: make_rows(8)
        worker.train(job, cases=make_cases())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def journaled(folder):
    """Which answers have a verdict on disk."""
    journal, found = EpisodeJournal(folder), set()
    for batch in journal.batches():
        verdicts = journal.verdicts(batch)
        answers = journal.answers(batch) or []
        found |= {(answer.prompt, answer.text) for answer in answers if answer.key in verdicts}
    return found


def graded(folder):
    path = folder / "graded.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def read_outcome(folder):
    return TrainOutcome.from_json((folder / "outcome.json").read_bytes())


def phase_of(folder):
    """What a killed run was doing, by what is on disk."""
    journal = EpisodeJournal(folder)
    batches = journal.batches()
    if not batches:
        return "first answers"
    answers, verdicts = journal.answers(batches[-1]) or [], journal.verdicts(batches[-1])
    if len(verdicts) < len(answers):
        return "rewards"
    done = {line["step"] for line in Journal(folder / "steps.jsonl").read()}
    return "answers" if batches[-1] in done else "update"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kills_at_random_moments_change_no_byte_and_grade_nothing_again(tiny_base, tmp_path, request, capsys):
    begun = time.monotonic()
    assert wait(start(make_noted_job(tiny_base, tmp_path / "whole"))) == 0
    span = time.monotonic() - begun
    whole = read_outcome(tmp_path / "whole")
    wanted, chance = request.config.getoption("--kills"), random.Random(7)
    kills = runs = again = 0
    phases = {}
    while kills < wanted:
        folder = tmp_path / f"run{runs}"
        job = make_noted_job(tiny_base, folder)
        while not (folder / "outcome.json").exists():
            before, known = len(graded(folder)), journaled(folder)
            child = start(job)
            # A run begins with loading: earlier kills would interrupt nothing else.
            deadline = time.monotonic() + chance.uniform(0.3, 1.0) * span
            while time.monotonic() < deadline:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                time.sleep(0.01)
            if not (folder / "outcome.json").exists() and kills < wanted:
                os.kill(child, signal.SIGKILL)
            code = wait(child)
            if code == -signal.SIGKILL:
                kills += 1
                phases[phase_of(folder)] = phases.get(phase_of(folder), 0) + 1
            else:
                assert code == 0
            assert not known & set(graded(folder)[before:])
        assert read_outcome(folder).adapter_hash == whole.adapter_hash
        for path in (folder / "episodes").glob("*.verdicts.jsonl"):
            keys = [line["key"] for line in Journal(path).read()]
            assert len(keys) == len(set(keys)) == 8
        asked = graded(folder)
        again += len(asked) - len(set(asked))
        runs += 1
    with capsys.disabled():
        print(f"\n{kills} kills in {runs} runs, by what was interrupted: {phases}; same bytes in all; ")
        print(f"{again} answers whose grading a kill interrupted were graded again, no finished one")
