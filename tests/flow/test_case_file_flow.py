"""A file of cases takes the place of the test split."""

import json
from pathlib import Path

import pytest
from flows import opened

from graftwork.data.project import PreparedData
from graftwork.evaluate.project_subjects import hash_case_file, read_held_out
from graftwork.files.dataset import read_rows
from graftwork.pipeline.table import run_pipeline
from graftwork.records.errors import UserError


def write_cases(folder: Path, *messages: list[dict[str, str]]) -> None:
    rows = [
        {"id": f"c{number}", "messages": each, "reference": "yes", "domain": "stage 1"}
        for number, each in enumerate(messages)
    ]
    (folder / "cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_evaluate_cases_takes_the_place_of_the_test_split_and_refuses_training_rows(
    small_project, listener, change_settings
):
    change_settings(small_project, data={"test": 0, "validation": 0}, evaluate={"cases": "cases.jsonl"})
    write_cases(small_project, [{"role": "user", "content": "a question that no log has?"}])
    with opened(small_project, listener) as work:
        folder = Path(run_pipeline(work, upto="prepare").get("prepare", PreparedData).folder)
        [case] = read_held_out(work, folder)
        assert (case.id, case.domain) == ("c0", "stage 1")
        before = hash_case_file(work)
        trained = read_rows(folder, "train")[0]
        write_cases(small_project, [message.model_dump() for message in trained.messages])
        assert hash_case_file(work) != before
        with pytest.raises(UserError, match="is a training row"):
            read_held_out(work, folder)
