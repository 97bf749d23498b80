"""`graft data repair` as a process that is killed again and again, against a teacher over HTTP that fails."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))

from data_rows import chat, write_log
from stand_in_teacher import answer_to, teacher_over_http

CUT = "This answer was going well until it suddenly stopped and then it was"


@pytest.fixture
def project(tmp_path):
    rows = [chat(question(n), CUT, finish_reason="length") for n in range(150)]
    rows += [chat(question(500 + n), f"{answer_to([], n)}", finish_reason="stop") for n in range(20)]
    (tmp_path / "logs").mkdir()
    write_log(tmp_path / "logs" / "log.jsonl", rows)
    (tmp_path / "graft.yaml").write_text("project: killed\ndata: {logs: [logs/]}\n")
    return tmp_path


def question(number):
    return f"Please explain item number {number} of the {answer_to([], number)[:60]}"


def start(project, url, *more):
    command = [sys.executable, "-m", "graftwork.cli.main", "data", "repair", "--json", "-C", str(project)]
    command += ["--teacher", f"{url}#stand-in", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_fifty_killed_repairs_lose_no_row_and_write_none_twice(project):
    chance, kills, in_flight = random.Random(3), 50, 4
    journal = project / ".graft" / "repair" / "answers.jsonl"
    # So slow that the answers last for all kills.
    with teacher_over_http(error_rate=0.2, seconds=0.6) as (url, answered):
        for number in range(kills):
            process = start(project, url)
            with pytest.raises(subprocess.TimeoutExpired):
                # Some at the start, some in the middle of the answers.
                process.communicate(timeout=chance.uniform(0.3, 3.0) if number % 5 else 0.2)
            process.kill()
            process.communicate()
        known = _count_answered(journal)
        process = start(project, url)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    outcome = json.loads(output)
    assert outcome["states"] == {"accepted": 150}
    written = [json.loads(line) for line in (project / "logs" / "repaired.jsonl").read_text().splitlines()]
    assert Counter(row["answered"]["prompt_hash"] for row in written).most_common(1)[0][1] == 1
    assert len(written) == 150
    assert known <= 150 == _count_answered(journal)
    # What a kill interrupts is asked again; nothing that was kept is.
    assert sum(answered.values()) - 150 <= kills * in_flight
    assert outcome["usable_after"] == 170


def _count_answered(journal):
    if not journal.exists():
        return 0
    lines = [line for line in journal.read_text().splitlines() if '"event":"answered"' in line]
    keys = [json.loads(line)["key"] for line in lines if line.endswith("}")]
    assert len(keys) == len(set(keys))
    return len(keys)
