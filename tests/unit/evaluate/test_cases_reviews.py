"""What reviewers said of a reply goes with it from the log to the case."""

from graftwork.evaluate.cases import choose_cases, hash_cases
from graftwork.files.dataset import row_from_values, rows_table
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin


def row(**more):
    return Row(
        id="a",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="why?"),),
        reply="because",
        tokens=(1, 2),
        trained_from=1,
        **more,
    )


def test_a_mark_survives_the_dataset_and_reaches_the_case():
    (values,) = rows_table([row(reward=0.75, rejected="no idea")]).to_pylist()
    (case,) = choose_cases([row_from_values(values)])
    assert (case.reward, case.rejected) == (0.75, "no idea")


def test_rows_of_a_dataset_without_marks_still_read():
    (values,) = rows_table([row()]).to_pylist()
    del values["reward"]
    assert row_from_values(values).reward is None


def test_a_mark_does_not_make_it_another_test_set():
    assert hash_cases(choose_cases([row()])) == hash_cases(choose_cases([row(reward=0.5)]))
