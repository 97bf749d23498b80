"""Lint of a project whose rows are prepared: their own number and lengths are what is looked at."""

import pytest
from flows import opened

from graftwork.pipeline.table import run_pipeline
from graftwork.plan.lint.project import LintOptions, lint_file


@pytest.fixture
def prepared(small_project, change_settings, listener):
    def prepare(**sections):
        change_settings(small_project, **sections)
        with opened(small_project, listener) as work:
            made = run_pipeline(work, upto="prepare")
        return lint_file(small_project / "graft.yaml", LintOptions()), made.outputs["prepare"].dataset

    return prepare


def test_rows_that_were_left_out_for_their_length_are_reported(prepared):
    linted, dataset = prepared(data={"max_tokens": 87})
    found = {finding.rule: finding for finding in linted.findings}
    assert dataset.splits["train"].rows > 0
    assert "left out" in found["rows-are-cut"].what
    assert "87" in found["rows-are-cut"].what


def test_steps_are_counted_from_the_prepared_rows(prepared):
    linted, dataset = prepared(train={"checkpoint_every": 500, "epochs": 1})
    steps = -(-dataset.splits["train"].rows // 4)
    found = {finding.rule: finding for finding in linted.findings}
    assert f"but the run has {steps}" in found["checkpoint-never-comes"].what
    assert not any("--rows" in gap or "--lengths" in gap for gap in linted.unknown)


def test_a_rate_that_the_held_out_rows_cannot_prove_is_reported(prepared):
    linted, dataset = prepared(gate={"rules": [{"metric": "json_valid", "over": 0.99}]})
    found = {finding.rule: finding for finding in linted.findings}
    assert found["rate-cannot-be-proven"].what.startswith(f"{dataset.splits['test'].rows} held-out rows")
