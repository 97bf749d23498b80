"""What reviewers said of a reply goes with it from the log to the case."""

import json

from graftwork.evaluate.cases import choose_cases, hash_cases
from graftwork.files.dataset import row_from_values
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


def as_stored(row):
    values = row.model_dump(exclude={"origin", "messages", "capture"}) | row.origin.model_dump()
    return values | {
        "messages": json.dumps(
            [{"role": message.role, "content": message.content} for message in row.messages]
        )
    }


def test_a_mark_survives_the_dataset_and_reaches_the_case():
    stored = row_from_values(as_stored(row(reward=0.75, rejected="no idea")))
    (case,) = choose_cases([stored])
    assert (case.reward, case.rejected) == (0.75, "no idea")


def test_a_mark_does_not_make_it_another_test_set():
    assert hash_cases(choose_cases([row()])) == hash_cases(choose_cases([row(reward=0.5)]))
