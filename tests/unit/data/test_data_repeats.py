from data_rows import make_row

from graftwork.data.repeats import find_conflicts, find_duplicates, find_near_duplicates

SOURCES = (
    "Sources:\n[1] The stage piano is packed with a folding stand and a dust cover.\n"
    "[2] Loans of the oak psaltery run for a weekend from Friday noon.\n\n"
)


def test_rows_that_differ_in_case_and_spacing_are_duplicates():
    rows = [
        make_row("Where is it?", "Here."),
        make_row("where  is it", "here"),
        make_row("Where is it?", "There."),
    ]
    assert find_duplicates(rows) == [(1, 0)]


def test_the_same_question_under_another_system_prompt_is_no_exact_duplicate():
    rows = [make_row("a?", "b", system="Be kind."), make_row("a?", "b", system="Be brief.")]
    assert find_duplicates(rows) == []


def test_nearly_the_same_row_is_found_and_the_first_stays():
    question = "Question: What comes with the stage piano when I take it home for the weekend?"
    rows = [
        make_row(SOURCES + question, "A folding stand."),
        make_row(SOURCES.replace("noon", "morning") + question, "A folding stand."),
    ]
    assert find_near_duplicates(rows, threshold=0.7) == [(1, 0)]


def test_other_questions_on_the_same_sources_are_no_near_duplicates():
    refusal = '{"answer": null, "refused": true}'
    rows = [
        make_row(SOURCES + f"Question: {question}?", refusal)
        for question in ("What does the psaltery weigh", "Who tunes the grand piano", "Are the drums insured")
    ]
    assert find_near_duplicates(rows, threshold=0.7) == []


def test_another_reply_to_the_same_prompt_is_a_conflict_and_the_last_stays():
    rows = [
        make_row("How long?", "An hour."),
        make_row("What for?", "Fun."),
        make_row("How long?", "Two days."),
        make_row("how long", "Three weeks."),
    ]
    assert find_near_duplicates(rows, threshold=0.85) == []
    assert find_conflicts(rows, keep="keep_last") == [(0, 3), (2, 3)]
    assert [repeat.position for repeat in find_conflicts(rows, keep="drop_all")] == [0, 2, 3]


def test_a_reply_that_was_given_corrected_and_given_again_stays():
    rows = [make_row("How long?", reply) for reply in ("An hour.", "Two days.", "an hour")]
    assert find_conflicts(rows, keep="keep_last") == [(1, 2)]
