"""Claims, citations, sources and refusals: what each metric sees, and what it cannot be fooled by."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.answers import AnswerFields, read_answer, source_texts, split_claims, support
from graftwork.grading.metrics import GRADERS, METRICS, SCORED
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

FIELDS = AnswerFields()
WORDS = AnswerFields(form="text")
PROMPT = (
    "Sources:\n[1] The mill opens at six on weekdays.\n[2] The oven was built in 1931 by Ada Brandt.\n"
    "[3] Parking is free.\n\nWhen does the mill open, and who built the oven?"
)


def make_case(reference=None, *, prompt=PROMPT, refused=False, **more):
    if reference is None:
        reference = json.dumps(
            {"answer": "At six [1]. Ada Brandt built it [2].", "citations": [1, 2], "refused": refused}
        )
    return Case(
        id="c",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content=prompt),),
        reference=reference,
        **more,
    )


def reply(answer, citations=(), refused=False):
    return json.dumps({"answer": answer, "citations": list(citations), "refused": refused})


def grade(name, text, case=None, fields=FIELDS):
    return GRADERS[name](case or make_case(), text, fields)


def test_sources_are_cut_at_their_numbers_and_the_question_is_none_of_them():
    assert source_texts(make_case()) == {
        1: "The mill opens at six on weekdays.",
        2: "The oven was built in 1931 by Ada Brandt.",
        3: "Parking is free.",
    }
    last_line = source_texts(make_case(prompt="[1] One.\nmore of it.\n[2] Two.\nWhat?"))
    assert last_line == {1: "One.\nmore of it.", 2: "Two."}
    assert source_texts(make_case(prompt="no sources here")) == {}


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("One thing [1]. Another thing. [2] A third?", ["One thing [1].", "Another thing. [2]", "A third?"]),
        ("Summary:\n- first point [1]\n- second point", ["- first point [1]", "- second point"]),
        ("", []),
        ("[1][2]", []),
        ("Version 3.5 works.", ["Version 3.5 works."]),
    ],
)
def test_claims_are_sentences_with_the_citations_behind_them(text, claims):
    assert split_claims(text) == claims


def test_support_is_by_distinctive_words_and_a_wrong_figure_refutes():
    source = ["The oven was built in 1931 by Ada Brandt."]
    assert support("Ada Brandt built the oven in 1931", source) == 1.0
    assert support("Ada Brandt built the oven in 1932", source) == 0.0
    assert support("The bakery was sold to strangers", source) == 0.0
    assert support("It is so.", source) == 1.0


@pytest.mark.parametrize(
    ("answer", "citations", "cited", "exist", "supported"),
    [
        ("The mill opens at six [1]. Ada Brandt built the oven [2].", [1, 2], 1, 1, 1),
        ("The mill opens at six [1]. Ada Brandt built the oven.", [1], 0, 1, 0),
        ("The mill opens at six [2].", [2], 1, 1, 0),
        ("The mill opens at six [7].", [7], 1, 0, 0),
        ("The mill opens at six.", [1], 1, 1, 1),
        ("The mill opens at six.", [], 0, 0, 0),
        ("The mill opens at seven forty [1].", [1], 1, 1, 1),
        ("The mill opens at 7 [1].", [1], 1, 1, 0),
        ("", [1], 0, 1, 0),
    ],
)
def test_each_claim_is_cited_each_citation_exists_and_supports(answer, citations, cited, exist, supported):
    text = reply(answer, citations)
    assert grade("claims_cited", text) == cited
    assert grade("citations_exist", text) == exist
    assert grade("citations_support", text) == supported


def test_groundedness_is_the_share_of_claims_that_the_sources_bear_out():
    text = reply("The mill opens at six. The mayor eats bread daily.")
    assert grade("groundedness", text) == 0.5
    assert grade("grounded", text) == 0.0
    assert grade("grounded", reply("The mill opens at six.")) == 1.0
    assert grade("groundedness", "no json") == 0.0


@pytest.mark.parametrize("name", ["claims_cited", "citations_exist", "citations_support", "groundedness"])
def test_grounds_are_asked_for_only_where_the_reference_answers_from_sources(name):
    assert grade(name, reply("x"), make_case(refused=True)) is None
    assert grade(name, reply("x"), make_case(prompt="no sources")) is None
    assert grade(name, reply("x"), make_case("plain words")) is None


def test_refusals_are_graded_each_way_by_itself():
    due, not_due = make_case(reply("", refused=True)), make_case()
    refusing, answering = reply("", refused=True), reply("At six.")
    assert grade("refused_where_due", refusing, due) == 1.0
    assert grade("refused_where_due", answering, due) == 0.0
    assert grade("refused_where_due", refusing, not_due) is None
    assert grade("answered_where_due", refusing, not_due) == 0.0
    assert grade("answered_where_due", answering, not_due) == 1.0
    assert grade("answered_where_due", answering, due) is None
    assert grade("answered_where_due", "garbage", not_due) == 0.0


def test_plain_words_are_read_where_the_fields_say_so():
    case = make_case("The mill opens at six [1].")
    assert grade("claims_cited", "The mill opens at six [1].", case, WORDS) == 1.0
    assert grade("citation_correct", "At six, says [1].", case, WORDS) == 1.0
    assert grade("refusal_correct", "I don\u2019t know.", case, WORDS) == 0.0
    assert grade("refused_where_due", "I cannot answer that.", make_case("I don't know."), WORDS) == 1.0
    assert read_answer("  ", fields=WORDS) is None
    assert grade("json_valid", "The mill.", case, WORDS) == 0.0
    assert grade("json_valid", "{}", case, WORDS) == 1.0


def test_similarity_to_the_reference_reads_both_the_same_way():
    plain = make_case("the quick brown fox")
    for name in ("token_f1", "edit_similarity", "chrf"):
        assert grade(name, "the quick brown fox", plain) == pytest.approx(1.0)
        assert grade(name, "zzz", plain) == pytest.approx(0.0, abs=0.1)
        assert 0.1 < grade(name, "the quick red fox", plain) < 1.0
        assert grade(name, make_case().reference) == 1.0
        assert grade(name, reply("x", refused=True)) == 0.0
        assert grade(name, "x", make_case(reply("", refused=True))) is None
        assert grade(name, "x", make_case("  ")) is None


def test_reviewers_marks_belong_to_the_text_they_read():
    case = make_case("At six.", reward=0.75)
    assert grade("reviewer_score", " At six.\n", case) == 0.75
    assert grade("reviewer_score", "At seven.", case) is None
    assert grade("reviewer_score", "At six.", make_case("At six.")) is None


def test_the_answer_nearer_to_the_preferred_reply_wins():
    case = make_case("The mill opens at six.", rejected="No idea, ask somebody else.")
    assert grade("nearer_to_preferred", "The mill opens at six o'clock.", case) == 1.0
    assert grade("nearer_to_preferred", "Ask somebody else.", case) == 0.0
    assert grade("nearer_to_preferred", "x", make_case("x")) is None
    assert grade("nearer_to_preferred", "x", make_case("x", rejected="x ")) is None


def test_a_schema_in_the_settings_is_held_against_every_reply():
    fields = AnswerFields(json_schema={"required": ["answer"], "properties": {"answer": {"type": "string"}}})
    assert grade("schema_valid", '{"answer": "x"}', fields=fields) == 1.0
    assert grade("schema_valid", '{"answer": 3}', fields=fields) == 0.0
    assert grade("schema_valid", "no json", fields=fields) == 0.0
    assert grade("schema_valid", '{"answer": "x"}') is None


answers = st.text(max_size=80) | st.builds(
    reply,
    st.text(alphabet="The mill opens at six [1] [2]. 19", max_size=60),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
cases = st.sampled_from(
    [
        make_case(),
        make_case(refused=True),
        make_case("plain words here"),
        make_case("plain", rejected="other", reward=0.5),
        make_case(prompt="no sources"),
    ]
)


@given(answers, cases, st.sampled_from([FIELDS, WORDS]))
def test_no_answer_breaks_a_metric_and_applicability_is_the_cases_alone(text, case, fields):
    for name, metric in GRADERS.items():
        given_grade = metric(case, text, fields)
        if name == "reviewer_score":
            continue
        assert (given_grade is None) == (metric(case, "{}", fields) is None), name
        if given_grade is not None:
            assert 0.0 <= given_grade <= 1.0, name
            assert name in SCORED or given_grade in (0.0, 1.0), name


@given(cases, st.sampled_from([FIELDS, WORDS]))
def test_joint_refusal_is_one_way_or_the_other(case, fields):
    for text in (case.reference, "{}", "I don't know."):
        ways = [GRADERS[name](case, text, fields) for name in ("refused_where_due", "answered_where_due")]
        joint = METRICS["refusal_correct"](case, text, fields)
        assert [way for way in ways if way is not None] == ([] if joint is None else [joint])
