"""A new user's first hour: init, a dry run, mistakes found before training, and labels that mean nothing."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from flows import opened

from graftwork.api.project import Project
from graftwork.data.audit.row_findings import BUT_FOR_LENGTH
from graftwork.pipeline.table import dry_run, run_pipeline
from graftwork.project.folder import open_project
from graftwork.project.init import start_project
from graftwork.records.errors import UserError
from graftwork.records.report import Verdict
from tickets import write_tickets


def graft(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.cli.main", *words, "-C", str(folder), "--json"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def start_tickets(folder, tiny_base, **log):
    write_tickets(folder / "logs" / "tickets.jsonl", **log)
    start_project(folder, [str(folder / "logs" / "tickets.jsonl")], base=str(tiny_base))
    return folder


def edit(folder, **sections):
    path = folder / "graft.yaml"
    settings = yaml.safe_load(path.read_text())
    for name, changes in sections.items():
        settings[name] = {**settings[name], **changes}
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def test_init_and_a_dry_run_say_what_will_be_done_and_how_long_it_takes(tmp_path, tiny_base):
    write_tickets(tmp_path / "tickets.jsonl")
    code, output = graft(tmp_path, "init", str(tmp_path / "tickets.jsonl"), "--base", str(tiny_base))
    assert code == 0, output
    assert output["proposal"]["kind"] == "json"
    to_do = [stage["stage"] for stage in output["preflight"]["run"]["stages"] if stage["state"] == "to do"]
    assert to_do[:2] == ["train", "evaluate"]
    edit(tmp_path, gate={"rules": [{"metric": "queue", "over": 0.99}]})
    code, found = graft(tmp_path, "run", "--dry-run")
    assert code == 2
    assert "cannot pass" in found["problems"][0]["what"]
    minutes = found["run"]["minutes"]
    assert minutes["low"] <= minutes["value"] <= minutes["high"]
    assert {trial["name"] for trial in found["metrics"]} >= {"queue", "priority", "all_right"}
    assert not (tmp_path / ".graft" / "runs").exists()


def test_init_audit_and_prepare_count_the_same_rows(tmp_path, tiny_base, monkeypatch):
    log = tmp_path / "logs" / "tickets.jsonl"
    write_tickets(log)
    lines = log.read_text().splitlines()
    again = [json.dumps({**json.loads(line), "id": f"again-{n}"}) for n, line in enumerate(lines[:9])]
    log.write_text("\n".join([*lines, *again]) + "\n")
    started = start_project(tmp_path, [str(log)], base=str(tiny_base))
    project = Project(open_project(tmp_path))
    splits = project.prepare().dataset.splits
    assert started.estimated is None
    assert started.proposal.rows == sum(split.rows for split in splits.values()) < started.rows_read
    # Each row has some tokens more than its text; by characters, none would be too long.
    limit = max(split.longest for split in splits.values()) - 1
    edit(tmp_path, data={"max_tokens": limit})
    project = Project(open_project(tmp_path))
    audit = project.audit()
    (long,) = (found for found in audit.findings if found.code == "too_long")
    kept = sum(split.rows for split in project.prepare().dataset.splits.values())
    assert audit.lengths_counted
    assert audit.usable - long.reasons[BUT_FOR_LENGTH] == kept
    # Without the extra that tokenizes, the audit works and says that it estimates.
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert not project.audit().lengths_counted


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"data": {"test": 0}}, "no held-out row"),
        (
            {"evaluate": {"checks": [{"name": "mine", "metric": "metrics/gone.py:mine"}]}},
            "no file for the metric",
        ),
        ({"gate": {"rules": [{"metric": "json_valid", "over": 0.99}]}}, "cannot pass"),
        (
            {"evaluate": {"checks": [{"name": "tag", "metric": "exact", "field": "tag"}]}},
            "tag grades none of the held-out cases",
        ),
    ],
)
def test_a_mistake_is_found_before_the_first_training_step(small_project, sections, what):
    edit(small_project, **sections)
    with opened(small_project) as work:
        assert any(what in problem.what for problem in dry_run(work).errors)
        with pytest.raises(UserError, match=what):
            run_pipeline(work)
    assert not (small_project / ".graft" / "runs").exists()


def test_training_alone_asks_for_no_verdict_and_is_not_held_up(small_project):
    edit(small_project, data={"test": 0})
    with opened(small_project) as work:
        assert run_pipeline(work, upto="train").outputs["train"]


def test_a_port_in_use_is_reported_and_does_not_stop_the_run(small_project):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        edit_port = {"port": taken.getsockname()[1]}
        settings = yaml.safe_load((small_project / "graft.yaml").read_text())
        (small_project / "graft.yaml").write_text(yaml.safe_dump({**settings, "serve": edit_port}))
        with opened(small_project) as work:
            found = dry_run(work)
    assert [problem.severity for problem in found.problems if "port" in problem.what] == ["warning"]
    assert not found.errors


def test_shuffled_labels_are_not_deployed_by_the_rules_of_init(tmp_path, tiny_base):
    folder = start_tickets(tmp_path / "tickets", tiny_base, count=120, shuffled=True)
    # Quick, and high enough a rate that the tiny model learns the form of a reply.
    edit(folder, train={"epochs": 2, "upper_layers": 2, "threads": 1}, evaluate={"latency_cases": 2})
    with opened(folder) as work:
        made = run_pipeline(work)
    assert made.get("gate", Verdict).decision != "deploy"
    assert "release" not in made.outputs
