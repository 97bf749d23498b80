"""The own fields of a log: mapped next to a known format, as a condition, and as a score on a scale."""

import pytest
from data_rows import chat, make_row, write_log
from pydantic import ValidationError
from test_data_prepare import ASKS, THINGS, all_rows, run

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.read import read_file
from graftwork.data.prepare import audit_files
from graftwork.data.settings import DataSettings, find_objection
from graftwork.files.dataset import iterate_drops, read_rows
from graftwork.project.init import find_own_fields
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import UserError

TOOLS = [{"type": "function", "function": {"name": "run_sql", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "run_sql", "arguments": '{"query": "SELECT 1"}'}}


def starred(stars=(1, 2, 3, 4, 5)):
    """Chat rows with own fields; every seventh row has no stars."""
    questions = [ask.format(thing) for ask in ASKS for thing in THINGS]
    rows = [
        chat(asked, f"Reply {n} on that.", stars=stars[n % len(stars)], conversation=f"c{n // 2}")
        for n, asked in enumerate(questions)
    ]
    return [
        {key: value for key, value in row.items() if n % 7 or key != "stars"} for n, row in enumerate(rows)
    ]


def read_one(tmp_path, row, **settings):
    write_log(tmp_path / "log.jsonl", [row])
    [read] = read_file("log.jsonl", root=tmp_path, settings=DataSettings(**settings))
    return read


def test_a_mapping_without_texts_takes_only_the_fields_of_a_chat_row_with_calls(tmp_path):
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    row = {"messages": turns, "tools": TOOLS, "outcome": "ok", "meta": {"stars": "4"}, "conversation": 7}
    plain = read_one(tmp_path, row)
    mapping = {"status": "outcome", "session": "conversation", "reward": "meta.stars"}
    read = read_one(tmp_path, row, mapping=mapping)
    assert (read.messages, read.reply) == (plain.messages, plain.reply)
    assert "run_sql" in read.reply
    assert "run_sql" in read.messages[0].content
    assert (read.status, read.session, read.reward) == ("ok", "7", 4.0)


def test_ratings_within_a_feedback_object_are_own_fields(tmp_path):
    row = chat("A?", "B.", feedback={"csat": 2, "resolved": "no"}, reviews={"tone": 4})
    plain = read_one(tmp_path, row)
    assert plain.extra == {"feedback.csat": 2, "feedback.resolved": "no", "reviews.tone": 4}
    mapped = [field.name for field in find_own_fields([plain], formats=["chat"]) if field.mapped]
    assert mapped == ["feedback.csat"]
    assert read_one(tmp_path, row, mapping={"reward": "feedback.csat"}).reward == 2.0


def test_an_id_that_stands_in_several_rows_is_named_for_the_split(tmp_path):
    rows = [chat(f"Q{n}?", "A.", trip_id=f"t{n // 3}", rowId=n, tool_id=n % 4) for n in range(60)]
    write_log(tmp_path / "log.jsonl", rows)
    read = list(read_file("log.jsonl", root=tmp_path, settings=DataSettings()))
    notes = {field.name: field.note for field in find_own_fields(read, formats=["chat"])}
    assert "data.split_by" in notes["trip_id"]
    assert (notes["rowId"], notes["tool_id"]) == ("", "")


def test_a_mapped_score_that_is_no_number_names_the_row_and_the_field(tmp_path):
    read = read_one(tmp_path, chat("A?", "B.", stars="good"), mapping={"reward": "stars"})
    assert isinstance(read, ReadFault)
    assert str(read.origin) == "log.jsonl:1"
    assert "`stars` must be a number" in read.message


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("stars >= 3", True),
        ("stars>3", False),
        ("score == 3", False),
        ("stars < 3 or lang == de", True),
        ('stars < 3 or lang == "fr"', False),
        ("stars >= 3 and lang != 'fr' and done == true", True),
        ("lang missing", False),
        ("nothing missing", True),
        ("`meta.stars` <= 2 or domain == bikes and stars == 3.0", True),
    ],
)
def test_a_condition_keeps_the_rows_that_meet_it(condition, kept):
    row = make_row("A?", extra={"stars": "3", "lang": "de", "done": True}, domain="bikes")
    assert (find_objection(row, condition) is None) == kept


@pytest.mark.parametrize(
    "condition",
    [
        "", "stars", "stars >=", "stars >= good", "stars >= 3 and", "stars >= 3 lang == de", "3 < stars < 5",
        "__import__('os').system('true')", "stars = 3", "stars >= 3)", '"stars" >= 3', "or",
        "a == 1 or or b == 1",
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_with_the_grammar(condition):
    with pytest.raises(ValidationError, match="FIELD >= NUMBER"):
        DataSettings(keep=condition)


def test_rows_that_do_not_meet_the_condition_are_dropped_from_every_split_with_the_reason(tmp_path):
    _, folder = run(tmp_path, starred(), keep="stars >= 3", mapping={"reward": "stars"})
    assert {row.reward for split in SPLITS for row in read_rows(folder, split)} == {3.0, 4.0, 5.0}
    reasons = {drop.reason for drop in iterate_drops(folder) if drop.step == "filter"}
    assert reasons == {"not_kept: it is not stars >= 3", "not_kept: `stars` is missing"}
    _, folder = run(tmp_path, starred(), keep="stars >= 3 or stars missing", mapping={"reward": "stars"})
    assert None in {row.reward for row in all_rows(folder)}


@pytest.mark.parametrize(
    ("stars", "condition", "said"),
    [
        ((1, 5), "starz >= 3", "`starz` is missing in 42 rows, first in log.jsonl:1"),
        (
            (1, "good"),
            "stars >= 3",
            "`stars` is text, and it is compared with 3 in 18 rows, first in log.jsonl:2",
        ),
    ],
)
def test_a_condition_on_a_missing_field_or_on_text_is_an_error_with_the_row(tmp_path, stars, condition, said):
    with pytest.raises(UserError) as raised:
        run(tmp_path, starred(stars), keep=condition)
    assert said in str(raised.value.why)
    assert "stars" in str(raised.value.fix)


def test_replies_below_the_score_of_a_scale_are_dropped_or_kept_and_never_a_reference(tmp_path):
    given = {"mapping": {"reward": "stars"}, "rated_bad_below": 3}
    _, folder = run(tmp_path, starred(), **given)
    assert {row.reward for row in all_rows(folder)} == {None, 3.0, 4.0, 5.0}
    audit = audit_files([str(tmp_path / "log.jsonl")], DataSettings(**given))
    [found] = [item for item in audit.findings if item.code == "rated_bad"]
    assert found.count == sum(row.get("stars", 5) < 3 for row in starred())
    _, folder = run(tmp_path, starred(), **given, drop_rated_bad=False)
    assert {1.0, 2.0} < {row.reward for row in read_rows(folder, "train")}
    for split in ("validation", "test"):
        assert {row.reward for row in read_rows(folder, split)} <= {None, 3.0, 4.0, 5.0}
