"""From notes and columns to findings: what blocks, what is named, and what is never quoted."""

import json

import numpy as np
import pytest
from data_rows import SECRET, THINGS, make_row
from memory_corpus import Dealing, Fault, MemoryCorpus, audit_rows, find_equal, group_equal

from graftwork.data.audit import findings
from graftwork.data.audit.findings import MOST_REASONS, MOST_ROWS, OTHER_REASONS
from graftwork.data.audit.report import audit_corpus
from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.audit.row_findings import BUT_FOR_LENGTH
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import Audit
from graftwork.records.interaction import Origin


def good_rows(**more):
    return [
        make_row(
            f"What would I pay for the {thing} {n} times?",
            f"Some {n * 7} coins for the {thing}.",
            line=n + 1,
            **more,
        )
        for n, thing in enumerate(THINGS)
    ]


def with_more(*rows, **more):
    """Good rows, and behind them these, on the lines that follow."""
    first = good_rows(**more)
    behind = [
        row.model_copy(update={"origin": Origin(file=row.origin.file, line=len(first) + n + 1)})
        for n, row in enumerate(rows)
    ]
    return [*first, *behind]


def finding(found, code):
    return next(f for f in found.findings if f.code == code)


def codes(found):
    return [f.code for f in found.findings]


def test_clean_logs_are_fit_to_train_on():
    found = audit_rows(good_rows())
    assert found.fit_to_train
    assert found.verdict == "fit to train on as it is"
    assert (found.rows, found.readable, found.usable) == (14, 14, 14)
    assert found.findings == ()
    assert found.reply_length.smallest > 0
    assert len(found.examples) == 12


@pytest.mark.parametrize(
    ("code", "row"),
    [
        ("placeholder", make_row("Is it open?", "Mock response")),
        ("truncated", make_row("Is it closed?", '{"answer": "it is cl')),
        ("failed_status", make_row("Is it far?", "It is.", status="error")),
        ("claims_success_but_fails", make_row("Is it near?", "HTTP 502 Bad Gateway", status="success")),
        ("empty", make_row("Is it there?", "  ")),
        ("rated_bad", make_row("Is it good?", "It is not at all good.", reward=0.0)),
        ("secret", make_row("Is it safe?", f"Use {SECRET} for it.")),
    ],
)
def test_a_blocking_finding_names_its_fix(code, row):
    found = audit_rows(with_more(row))
    assert not found.fit_to_train
    blocker = finding(found, code)
    assert (blocker.severity, blocker.count) == ("blocker", 1)
    assert str(blocker.rows[0]) == "log.jsonl:15"
    assert blocker.examples[0].origin == blocker.rows[0]
    assert "graft data prepare" in blocker.fix
    assert blocker.effect
    assert blocker.title in found.verdict
    assert found.usable == (15 if code == "secret" else 14)


def test_a_switched_off_setting_is_named_as_the_fix():
    found = audit_rows(with_more(make_row("Is it open?", "Mock response")), drop_placeholders=False)
    assert "set data.drop_placeholders to true" in finding(found, "placeholder").fix
    assert found.usable == 15


def test_repeats_and_conflicts_are_distinguished():
    rows = with_more(
        good_rows()[0],
        make_row("How long is it open?", "All day."),
        make_row("How long is it open?", "Two hours only."),
        make_row("What would I pay for the drum, say, 3 times?", "Some 21 coins for the drum."),
    )
    found = audit_rows(rows, near=[(17, 3)])
    assert [str(o) for o in finding(found, "duplicate").rows] == ["log.jsonl:15"]
    assert "log.jsonl:1:" in finding(found, "duplicate").examples[0].excerpt
    assert [o.line for o in finding(found, "near_duplicate").rows] == [18]
    assert [o.line for o in finding(found, "conflicting_answers").rows] == [16, 17]
    assert found.fit_to_train
    assert [(c.kind, c.size, [o.line for o in c.rows]) for c in found.clusters] == [
        ("conflicting_answers", 2, [16, 17]),
        ("near_duplicate", 2, [4, 18]),
        ("duplicate", 2, [1, 15]),
    ]
    assert {row.reply for row in found.clusters[0].shown} == {"All day.", "Two hours only."}


def test_conflicts_that_the_filter_ends_are_counted_next_to_those_that_stay():
    asked = "How long is it open?"
    rows = with_more(
        make_row(asked, "All day."), make_row(asked, "Two hours."), make_row(asked, "<think>Let me see")
    )
    conflict = finding(audit_rows(rows), "conflicting_answers")
    assert (conflict.severity, conflict.count) == ("warning", 2)
    assert "3 in the whole log" in conflict.title
    conflict = finding(audit_rows([rows[0], rows[14], rows[16]]), "conflicting_answers")
    assert (conflict.severity, conflict.count) == ("info", 2)


def test_rows_that_a_random_split_would_leak_are_named():
    ask = "Where do I find the oak psaltery{}"
    twins = [make_row(ask.format(end), f"In room {n}.") for n, end in enumerate(["?", "? ", "!"])]
    found = audit_rows(with_more(*twins), test=0.5, validation=0.1)
    assert {o.line for o in finding(found, "split_leak").rows} == {15, 16, 17}
    assert finding(found, "split_leak").severity == "warning"


@pytest.mark.parametrize("named_by", ["split", "file"])
def test_a_question_on_both_sides_of_a_split_blocks(named_by):
    train, test = ("train", "test") if named_by == "split" else (None, None)
    files = ("a.jsonl", "a.jsonl") if named_by == "split" else ("x_train.jsonl", "x_test.jsonl")
    rows = [row.model_copy(update={"split": train}) for row in good_rows(file=files[0])]
    rows += [
        make_row(rows[2].question, "Another answer.", line=90, file=files[1], split=test),
        make_row("Is anything new?", "No.", line=91, file=files[1], split=test),
    ]
    found = audit_rows(rows, conflicts="keep_all")
    leak = finding(found, "split_leak")
    assert (leak.severity, [str(o) for o in leak.rows]) == ("blocker", [f"{files[1]}:90"])
    assert leak.title == "1 of 2 held-out rows ask what a training row asks"
    assert f"{files[0]}:3" in leak.examples[0].excerpt
    assert not found.fit_to_train


def test_questions_that_only_ask_alike_leak_too():
    rows = [
        make_row("How far is the harbour?", "Two miles.", line=1, split="train"),
        make_row("To the harbour, how far?", "Two miles.", line=2, split="test"),
    ]
    found = audit_rows(rows, assignment=Dealing(np.array([0, 0])))
    assert finding(found, "split_leak").count == 1
    assert "split_leak" not in codes(audit_rows(rows, assignment=Dealing(np.array([0, 1]))))


def test_rows_are_unreadable_for_many_reasons_and_each_is_counted():
    def fault(line, message, code="parse_error"):
        return Fault(Origin(file="log.jsonl", line=line), code, message)

    deep = [fault(line, "the row is nested too deeply") for line in range(15, 18)]
    long = [fault(line, f"the row has {line} MiB, and one row may have 32 MiB") for line in range(20, 120)]
    unread = finding(audit_rows(good_rows(), faults=deep + long), "parse_error")
    assert "JSON" not in unread.title
    assert unread.reasons["the row is nested too deeply"] == 3
    assert unread.reasons[OTHER_REASONS] == 103 - 3 - (MOST_REASONS - 1)
    assert sum(unread.reasons.values()) == unread.count


def test_only_a_shape_that_is_not_known_is_repaired_by_a_mapping():
    for message, fixed in (
        ("no known shape (keys: a, b); expected one of: x", True),
        ("the key `a` occurs twice in one object", False),
    ):
        fault = Fault(Origin(file="log.jsonl", line=15), "schema", message)
        assert ("data.mapping" in finding(audit_rows(good_rows(), faults=[fault]), "schema").fix) is fixed


def test_too_long_counts_the_rows_that_would_be_usable_otherwise():
    rows = with_more(make_row("word " * 400, "Mock response"), make_row("other " * 400, "Fine and whole."))
    found = audit_rows(rows, max_tokens=200)
    assert finding(found, "too_long").count == 2
    assert finding(found, "too_long").reasons[BUT_FOR_LENGTH] == 1


def test_tokens_are_counted_where_a_tokenizer_is_given():
    rows = with_more(make_row("a b c", "d e f " * 30), make_row("word " * 400, "Fine and whole."))
    codes = {found.code for found in audit_rows(rows, max_tokens=200).findings}
    assert "too_long" in codes

    def count(some):
        return [250 if row.reply.startswith("d e f") else 7 for row in some]

    audit = audit_rows(rows, max_tokens=200, count_tokens=count)
    long = finding(audit, "too_long")
    assert [origin.line for origin in long.rows] == [rows[-2].origin.line]
    assert long.title == "1 row is longer than 200 tokens (the longest has 250)"
    assert "removes 50 tokens" in long.effect
    assert long.reasons[BUT_FOR_LENGTH] == 1
    assert long.examples[0].excerpt.startswith("would lose 50 of 250 tokens")
    assert audit.lengths_counted


def test_rows_of_a_large_log_are_counted_next_to_the_limit_and_the_others_by_them(monkeypatch):
    rows = [make_row("word " * size, f"Reply {size}.") for size in range(10, 110)]
    monkeypatch.setattr(findings, "MOST_COUNTED", 3000)
    counted = []

    def count(some):
        counted.extend(row.reply for row in some)
        return [len(row.question.split()) for row in some]

    audit = audit_rows(rows, max_tokens=83, count_tokens=count)
    assert 0 < len(counted) < 20
    assert not audit.lengths_counted
    # One word a token, as counted: by 3.6 characters a token, far more rows would be too long.
    assert abs(finding(audit, "too_long").count - sum(size > 83 for size in range(10, 110))) <= 3
    assert "estimated" in finding(audit, "too_long").title


def test_no_finding_quotes_a_secret_or_an_address():
    rows = with_more(
        make_row(f"Is {SECRET} safe?", f"Error: {SECRET} is bad", status=f"error {SECRET}"),
        make_row("Write to ann@firm.com about it.", "TODO: ann@firm.com"),
        make_row(f"What of {SECRET}?", '{"answer": "' + SECRET),
        make_row(f"Is {SECRET} new?", "Yes.", group=f"of {SECRET}", model=f"m-{SECRET}", domain=SECRET),
        make_row(f"Is {SECRET} new?", f"No, {SECRET} is old.", group="b", model="ann@firm.com"),
        make_row(f"Is {SECRET} new?", f"No, {SECRET} is old.", group="b", model="ann@firm.com"),
    )
    for redact in (True, False):
        written = audit_rows(rows, redact=redact).to_json()
        assert SECRET not in written
        assert "ann@firm" not in written


def test_rare_and_dominant_roles_and_domains_are_named():
    rows = good_rows(group="guide", domain="music")
    rows += [
        make_row(
            f"Tell me all about {thing} history {n}", f"It began in {1500 + n}.", group="guide", domain="past"
        )
        for n, thing in enumerate(THINGS)
    ]
    rows.append(make_row("Fix my bicycle", "Bring it in.", group="shop", domain="past"))
    found = audit_rows(rows)
    assert [(f.count, f.reasons) for f in found.findings if f.code == "rare_group"] == [(1, {"shop": 1})]
    assert "guide" in finding(found, "imbalance").title
    assert found.groups == {"guide": 28, "shop": 1}
    assert found.domains == {"past": 15, "music": 14}


def test_a_reply_to_everything_is_an_imbalance():
    rows = [make_row(f"Is {n} prime, and why?", "I cannot say.", line=n) for n in range(1, 31)]
    assert "30 of 30 usable rows have the same reply" in finding(audit_rows(rows), "imbalance").title


def test_rows_of_other_models_than_the_base_are_counted_by_model():
    rows = [*good_rows(model="smol"), make_row("Who are you?", "A large one.", line=15, model="large-9")]
    foreign = finding(
        audit_rows(rows, context=AuditContext(settings=DataSettings(), base="org/Smol")), "foreign_model"
    )
    assert (foreign.severity, foreign.count, foreign.reasons) == ("info", 1, {"large-9": 1})
    assert finding(audit_rows(rows), "foreign_model").reasons == {"smol": 14, "large-9": 1}
    assert "foreign_model" not in codes(audit_rows(good_rows(model="smol")))


def test_reasoning_where_the_base_writes_none_is_a_warning():
    thinks = make_row("How many?", "<think>Two and two.</think>Four.")
    plain = AuditContext(settings=DataSettings(), base="b", base_reasons=False)
    reasons = AuditContext(settings=DataSettings(), base="b", base_reasons=True)
    assert finding(audit_rows([thinks], context=plain), "foreign_model").severity == "warning"
    assert "foreign_model" not in codes(audit_rows([thinks], context=reasons))
    # Rows that reason next to rows that do not teach neither.
    assert finding(audit_rows(with_more(thinks)), "foreign_model").count == 1


def test_too_long_rows_say_what_a_cut_costs_and_what_the_setting_does():
    rows = with_more(make_row("word " * 100, "word " * 300))
    for overlong, done in (
        ("drop", "drops these"),
        ("truncate", "oldest turns"),
        ("split_by_turn", "each turn"),
    ):
        long = finding(audit_rows(rows, max_tokens=200, overlong=overlong), "too_long")
        assert done in long.fix
        assert long.reasons == {"cut at that length, the end of the reply is lost": 1, BUT_FOR_LENGTH: 1}
        assert "356 tokens" in long.effect


def test_rows_in_another_script_than_the_rest_are_found():
    rows = [make_row(f"What costs the {t} {n}?", f"It costs {n} coins.") for n, t in enumerate(THINGS * 2)]
    rows.append(make_row("Сколько?", "Две монеты за всё."))
    found = audit_rows(rows)
    assert finding(found, "language_or_encoding").reasons == {"Cyrillic": 1}
    assert finding(found, "language_or_encoding").severity == "info"


def test_unreadable_rows_are_counted_and_do_not_stop_the_audit():
    faults = [
        Fault(Origin(file="log.jsonl", line=line), code, "why")
        for line, code in ((15, "parse_error"), (16, "schema"), (17, "encoding"))
    ]
    found = audit_rows(good_rows(), faults=faults)
    assert (found.rows, found.readable) == (17, 14)
    for code, line in (("parse_error", 15), ("schema", 16), ("language_or_encoding", 17)):
        assert [o.line for o in finding(found, code).rows] == [line]


def test_logs_without_one_usable_row_are_not_fit():
    fault = Fault(Origin(file="log.jsonl", line=1), "parse_error", "not JSON")
    for rows in ([], [make_row("Is it open?", "Mock response", line=2)]):
        found = audit_rows(rows, faults=[fault])
        assert not found.fit_to_train
        assert finding(found, "nothing_usable").count == 1 + len(rows)


def test_everything_is_in_the_json():
    rows = with_more(good_rows()[0], make_row("Is it open?", "Mock response"), group="a", model="m")
    found = audit_rows(rows)
    assert Audit.from_json(found.to_json()) == found
    written = json.loads(found.to_json())
    for key in ("clusters", "length_histograms", "length_edges", "models", "examples", "not_looked_for"):
        assert written[key], key
    for shape in written["length_histograms"]:
        assert len(shape["counts"]) == len(written["length_edges"])
    assert sum(written["length_histograms"][0]["counts"]) == len(rows)


def test_examples_do_not_depend_on_the_order_of_the_rows():
    rows = [make_row(f"What is {n} and {n}?", f"It is {2 * n}.", line=n) for n in range(1, 60)]
    forth, back = audit_rows(rows), audit_rows(rows[::-1])
    assert {row.origin for row in forth.examples} == {row.origin for row in back.examples}


def test_a_large_corpus_is_never_read_back_as_a_whole():
    rows = [make_row(f"What is it {n % 7}?", "Mock response", line=n + 1) for n in range(3000)]
    context = AuditContext(settings=DataSettings())
    corpus = MemoryCorpus(rows, context=context)
    repeats, assignment = find_equal(corpus), group_equal(corpus)
    corpus.read_places = 0
    found = audit_corpus(corpus, repeats, assignment, context=context)
    placeholder = finding(found, "placeholder")
    assert (placeholder.count, len(placeholder.rows)) == (3000, MOST_ROWS)
    assert corpus.read_places < 300


@pytest.mark.parametrize(("rows", "fit"), [(40, False), (12, True)])
def test_a_log_whose_rows_ask_alike_is_not_fit_where_a_split_would_stay_empty(rows, fit):
    asked = [make_row("Which region?", f"Region {n} of {n * 3}.", line=n + 1) for n in range(rows)]
    found = audit_rows(asked, assignment=Dealing(np.zeros(rows, dtype=np.int64)), conflicts="keep_all")
    assert found.fit_to_train == fit
    assert ("empty_split" in codes(found)) == (not fit)
