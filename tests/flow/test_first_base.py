"""The base of a new project is chosen from a catalog, by task and machine; what cannot work is refused."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from graftwork.evaluate.project import Evaluated
from graftwork.model.base import EMBEDDED
from graftwork.pipeline.quick import SIZE, choose_size, run_quick
from graftwork.pipeline.table import run_pipeline
from graftwork.project.folder import open_project
from graftwork.project.open_project import name_entry, use_project
from graftwork.project.reporter import NullReporter
from tickets import write_tickets


@pytest.fixture
def log(tmp_path):
    write_tickets(tmp_path / "logs" / "tickets.jsonl")
    return tmp_path / "logs" / "tickets.jsonl"


def init(folder, *words, code=0):
    """What `graft init` prints with --json, without a network."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "graftwork.cli.main",
            "init",
            *words,
            "-C",
            str(folder),
            "--no-plan",
            "--json",
        ],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_init_chooses_a_base_and_says_what_it_can_and_cannot_do(tmp_path, log):
    bases = init(tmp_path, str(log))["bases"]
    assert yaml.safe_load((tmp_path / "graft.yaml").read_text())["base"] == EMBEDDED
    chosen = next(option for option in bases["options"] if option["name"] == bases["chosen"])
    assert "JSON" in chosen["good_for"]
    assert "code" in chosen["not_for"]
    assert all(option["minutes"]["low"] <= option["minutes"]["high"] for option in bases["options"])


def test_a_better_base_that_cannot_be_fetched_leaves_the_embedded_one_and_is_named(tmp_path, log):
    bases = init(tmp_path, str(log), "--gpu", "RTX 4090")["bases"]
    settings = yaml.safe_load((tmp_path / "graft.yaml").read_text())
    assert settings["base"] == EMBEDDED
    assert "suits better but was not fetched" in bases["why"]
    assert "upper_layers" not in settings["train"]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--base", "nope"], "no base model 'nope'", "qwen3-1.7b"),
        (["--base", "Qwen/Qwen2.5-32B-Instruct", "--gpu", "T4"], "does not fit T4", "--base Qwen/Qwen3-"),
        (["--license", "gpl"], "no base under 'gpl'", "--base"),
    ],
)
def test_a_base_that_cannot_work_is_refused_before_anything_is_written(tmp_path, log, words, what, fix):
    error = init(tmp_path, str(log), *words, code=2)
    assert what in error["what"]
    assert error["why"]
    assert fix in error["fix"]
    assert not (tmp_path / "graft.yaml").exists()


def test_a_quick_run_says_that_it_is_one_and_is_never_released(small_project, change_settings):
    change_settings(small_project, train={"threads": 1})
    with use_project(open_project(small_project), NullReporter()) as work:
        outputs = run_quick(work)
        report = outputs.get("evaluate", Evaluated).report
        assert report.remarks[0].startswith("quick trial")
        assert report.cases <= 40
        assert not {"gate", "release"} & set(outputs.outputs)
        assert not work.releases.list()
        full = run_pipeline(work, upto="evaluate").get("evaluate", Evaluated).report
    assert not any(remark.startswith("quick") for remark in full.remarks)
    # The trial asked none of the questions that decide.
    assert (report.looks, full.looks) == (1, 1)


def test_a_quick_run_that_is_continued_keeps_its_rows_whatever_is_planned_since(
    small_project, change_settings, monkeypatch
):
    change_settings(small_project, train={"threads": 1})
    with use_project(open_project(small_project), NullReporter()) as work:
        size = choose_size(work)
        # As if the first part had shown a slow machine: every plan is longer than this.
        monkeypatch.setattr("graftwork.pipeline.quick.QUICK_MINUTES", 1e-9)
        assert choose_size(work) == size
        work.ledger.forget(name_entry(work, SIZE))
        assert choose_size(work).rows < size.rows
