"""Names of subjects and files of cases: understood, or refused with the place and the reason."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.cases import read_case_file
from graftwork.evaluate.subjects import parse_subject, parse_subjects
from graftwork.grading.checks import GradeCheck
from graftwork.records.errors import UserError


@pytest.mark.parametrize(
    ("text", "kind", "which"),
    [
        ("base", "base", ""),
        ("adapter", "adapter", ""),
        ("log", "log", ""),
        ("champion", "release", "champion"),
        ("release:ab12", "release", "ab12"),
        ("release:tagger/champion", "release", "tagger/champion"),
        ("adapter:out/peft", "folder", "out/peft"),
        ("run:2026-01", "run", "2026-01"),
    ],
)
def test_a_subject_is_what_it_is_called(text, kind, which):
    assert parse_subject(text)[1:3] == (kind, which)


def test_an_endpoint_names_its_model_and_where_its_key_is():
    subject = parse_subject("https://host.example/v1/#big/model,key=ACME_KEY,concurrency=16")
    assert subject.name == "https://host.example/v1#big/model"
    assert subject.endpoint is not None
    assert (subject.endpoint.api_key_env, subject.endpoint.concurrency) == ("ACME_KEY", 16)


@pytest.mark.parametrize(
    "text",
    [
        "", "bass", "release:", "https://host/v1", "https://#m", "https://host/v1#m,key=",
        "http://h/v1#m,concurrency=0",
    ],
)  # fmt: skip
def test_an_invalid_subject_is_refused(text):
    with pytest.raises(UserError):
        parse_subject(text)


@pytest.mark.parametrize(
    "text",
    ["https://me:sk-secret@host/v1#m", "https://host/v1?api_key=sk-secret#m", "http://h/v1#m,key=sk-secret"],
)
def test_a_key_in_the_wrong_place_is_refused_and_not_repeated(text):
    with pytest.raises(UserError) as refused:
        parse_subject(text)
    assert "sk-secret" not in json.dumps(refused.value.as_json())


def test_a_subject_named_twice_is_asked_once():
    assert [s.name for s in parse_subjects(["base", "log", "base"])] == ["base", "log"]


def write(tmp_path, *lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_cases_are_read_with_all_their_fields(tmp_path):
    path = write(
        tmp_path,
        {
            "prompt": "2+2?",
            "system": "Count.",
            "reference": "4",
            "group": "maths",
            "domain": "d",
            "session": "s",
        },
        "",
        {
            "id": 7,
            "messages": [{"role": "user", "content": "x"}],
            "checks": [{"exact": "4"}],
            "duration_ms": 12,
        },
    )
    first, second = read_case_file(path)
    assert [m.role for m in first.messages] == ["system", "user"]
    assert (first.reference, first.group, first.domain, first.session) == ("4", "maths", "d", "s")
    assert (second.id, second.origin.line, second.duration_ms) == ("7", 3, 12.0)
    assert read_case_file(path) == (first, second)


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("no json", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"reference": "x"}, "has no question"),
        ({"prompt": "x"}, "the correct answer"),
        ({"prompt": "x", "reference": "y", "refrence": "z"}, "'refrence'"),
        ({"prompt": 3, "reference": "y"}, "not a string"),
        ({"messages": [], "reference": "y"}, "not a list of turns"),
        ({"messages": [{"role": "user"}], "reference": "y"}, "no text content"),
        ({"messages": [{"role": "robot", "content": "x"}], "reference": "y"}, "'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}], "reference": "y"}, "the assistant's"),
        ({"prompt": "x", "reference": "y", "duration_ms": -1}, "duration_ms"),
        ({"prompt": "x", "reference": "y", "checks": ["exact"]}, "checks"),
        ({"prompt": "good", "reference": "y", "id": "a"}, "twice"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_line(tmp_path, line, output):
    path = write(tmp_path, {"prompt": "good", "reference": "y", "id": "a"}, line)
    with pytest.raises(UserError, match=output) as refused:
        read_case_file(path)
    assert refused.value.where == "cases.jsonl:2"


@pytest.mark.parametrize(
    ("checks", "output"),
    [
        (
            [{"contans": "x"}],
            "checks.0 of the case: a check names one rule as its metric; did you mean contains",
        ),
        ([{"exact": "y"}, {"regex": "("}], "checks.1 of the case: regex: "),
        ([{"json_schema": {"unevaluatedProperties": False}}], "unevaluatedProperties is not known"),
        ([{"exact": "y", "ignore_cas": True}], "did you mean ignore_case"),
        ([{}], "a check names one rule"),
        ([{"metric": "rules.py:polite"}], "graft.yaml does not name it"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused_before_anybody_is_asked(tmp_path, checks, output):
    path = write(tmp_path, {"prompt": "good", "reference": "y"}, {"prompt": "x", "checks": checks})
    with pytest.raises(UserError, match="is not valid") as refused:
        read_case_file(path, named=())
    assert output in refused.value.why
    assert refused.value.where == "cases.jsonl:2"
    assert refused.value.fix


def test_an_own_function_that_graft_yaml_names_may_be_asked_for(tmp_path):
    path = write(tmp_path, {"prompt": "x", "checks": [{"metric": "rules.py:polite"}]})
    named = (GradeCheck(name="polite", metric="rules.py:polite"),)
    assert len(read_case_file(path, named=named)) == 1


@given(st.binary(max_size=80))
def test_whatever_the_file_holds_it_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "cases.jsonl"
    path.write_bytes(content)
    with suppress(UserError):
        assert read_case_file(path)
