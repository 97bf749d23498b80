"""A project made by the commit before the redesign lists, verifies, serves and resumes with today's code.

The archive was made by tools/make_old_project.py. It is used through the command line only.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "tests" / "data" / "old_project.tar.xz"
GRAFT = [sys.executable, "-m", "graftwork.cli.main"]
QUESTION = "Where is the fern?"


def unpack(target: Path) -> dict:
    """Unpacks the archive, with the paths in its state changed to where it is now; returns its facts."""
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(target, filter="data")
    facts = json.loads((target / "expected" / "facts.json").read_text())
    made_in = facts["made_in"]
    releases = target / ".graft" / "releases"
    for path in target.rglob("*.json*"):
        text = path.read_text()
        if made_in in text and releases not in path.parents:  # Those are hashed.
            path.write_text(text.replace(made_in, str(target)))
    with sqlite3.connect(target / ".graft" / "state.db") as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                if kind == "TEXT":
                    change = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)"
                    database.execute(change, (made_in, str(target), made_in))
    database.close()
    return json.loads((target / "expected" / "facts.json").read_text())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old") / "project"
    return folder, unpack(folder)


@pytest.fixture
def old_project(unpacked):
    return unpacked[0]


@pytest.fixture
def facts(unpacked):
    return unpacked[1]


@pytest.fixture
def graft(old_project, monkeypatch, capsys):
    """Runs a command in this process; returns its exit code and its JSON document."""
    from graftwork.cli.main import main

    def run(*arguments, folder=old_project):
        monkeypatch.setattr(sys, "argv", ["graft", *arguments, "-C", str(folder), "--json"])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        output = capsys.readouterr()
        assert "Traceback" not in output.err, output.err
        return code, json.loads(output.out)

    return run


def same_machine(facts: dict) -> bool:
    """Whether equal bytes can be expected: other processors and versions of torch round differently."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from compare import describe_machine
    finally:
        sys.path.pop(0)
    known = ("cpu", "torch", "numpy")
    return all(describe_machine()[name] == facts["machine"][name] for name in known)


def test_an_old_project_lists_its_releases_runs_and_steps_as_before(graft, facts):
    for arguments, name in (
        (("release", "list"), "releases"),
        (("release", "show", "champion"), "release"),
        (("release", "lineage", "champion"), "lineage"),
        (("release", "log"), "moves"),
    ):
        assert graft(*arguments) == (0, facts[name]), arguments
    code, status = graft("status")
    assert code == 0
    for key in ("project", "aliases", "releases", "captures"):
        assert status[key] == facts["status"][key]
    states = {step["step"]: step["state"] for step in status["steps"]}
    assert states.pop("report") == "stale"  # The archive does not hold the page.
    assert set(states.values()) == {"fresh"}
    assert states.keys() < {step["step"] for step in facts["status"]["steps"]}
    runs = [{run["id"]: run["state"] for run in message["runs"]} for message in (status, facts["status"])]
    assert runs[0] == runs[1]
    assert sorted(runs[0].values()) == ["done", "stopped"]


def test_an_old_release_and_its_dataset_verify(graft, facts, old_project):
    assert graft("release", "verify", "champion")[0] == 0
    datasets = {path.parent.name for path in old_project.glob(".graft/datasets/*/manifest.json")}
    assert len(datasets) == 2
    code, prepared = graft("data", "prepare")
    assert code == 0
    assert {path.parent.name for path in old_project.glob(".graft/datasets/*/manifest.json")} == datasets
    assert any(name in json.dumps(prepared) for name in datasets)
    assert graft("data", "trace", "logs/log.jsonl:3")[0] == 0
    code, verdict = graft("gate")
    assert (code, verdict["decision"]) == (0, facts["gate"]["decision"])


def test_a_dataset_prepared_again_from_an_old_project_has_the_same_id(graft, old_project, tmp_path):
    again = tmp_path / "again"
    unpack(again)
    shutil.rmtree(again / ".graft")
    assert graft("data", "prepare", folder=again)[0] == 0
    made, before = ({path.name for path in each.glob(".graft/datasets/*")} for each in (again, old_project))
    assert made == before


def test_an_old_release_is_served_and_captured(tmp_path, graft):
    # In a project of its own: other tests count what was captured when it was old.
    project = tmp_path / "project"
    facts = unpack(project)
    captured = graft("status", folder=project)[1]["captures"]
    server = subprocess.Popen(
        [*GRAFT, "serve", "--port", "0", "--json", "-C", str(project)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        text = ""
        while not text.endswith("\n}\n"):
            line = server.stdout.readline()
            assert line, "the server ended before it was ready"
            text += line
        answers = {model: ask(json.loads(text)["url"], model) for model in ("champion", "base")}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    if same_machine(facts):
        assert answers == facts["answers"]
    assert all(isinstance(answer, str) for answer in answers.values())
    assert graft("status", folder=project)[1]["captures"] == captured + 2


def ask(url: str, model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 12}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_an_interrupted_old_run_resumes_to_the_adapter_of_the_uninterrupted_one(tmp_path, graft):
    project = tmp_path / "project"
    facts = unpack(project)
    expected = facts["second"]
    run = project / ".graft" / "runs" / expected["run"]
    before = read_steps(run)
    done = len(before)
    assert 0 < done == expected["interrupted_at"] < expected["steps"]
    # The last step is done again: it shows whether this machine computes as the one that made the archive.
    shutil.rmtree(run / "checkpoints" / f"step-{done:06d}")
    code, outcome = graft("train", "--model", "second", folder=project)
    assert (code, outcome["run_id"], outcome["steps"]) == (0, expected["run"], expected["steps"])
    after = read_steps(run)
    assert after[:done] == before
    assert [step["step"] for step in after] == [*range(1, done + 1), *range(done, expected["steps"] + 1)]
    # Alone it would not do: on another processor one step may come out the same by chance.
    same = same_machine(facts) and all(
        after[done][name] == before[-1][name] for name in ("loss", "gradient_norm")
    )
    made = load_file(Path(outcome["adapter_folder"]) / "adapter_model.safetensors")
    wanted = load_file(project / "expected" / "second" / "adapter_model.safetensors")
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if same:
            assert tensor.tobytes() == made[name].tobytes(), name
        else:
            # Over hundreds of steps another rounding grows to half a percent.
            assert np.linalg.norm(made[name] - tensor) < 0.02 * np.linalg.norm(tensor), name


def read_steps(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
