"""The audit on the terminal: one screen, and no markup that came from a log."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from graftwork.cli.progress import RichReporter
from graftwork.data.audit.row_findings import BUT_FOR_LENGTH
from graftwork.records.dataset import Audit, Finding, LengthSummary, NotLookedFor
from graftwork.records.interaction import Origin
from graftwork.views.release import view_try_out
from graftwork.views.terminal import print_document, show

LENGTHS = LengthSummary(smallest=1, median=2, p95=3, largest=4)


def make_finding(
    code, severity, *, title="12 rows are cut off before the end of the reply", file="log.jsonl", reasons=None
):
    return Finding(
        code=code,
        severity=severity,
        count=12,
        title=title,
        effect="such rows teach the model to stop mid-reply",
        fix="`graft data prepare` drops these (data.drop_truncated)",
        rows=tuple(Origin(file=file, line=line) for line in range(1, 13)),
        reasons=reasons or {},
    )


def make_audit(*findings, files=("log.jsonl",), **more):
    return Audit(
        files=files,
        rows=12345,
        readable=12000,
        usable=9000,
        fit_to_train=not any(finding.severity == "blocker" for finding in findings),
        findings=findings,
        groups={},
        prompt_length=LENGTHS,
        reply_length=LENGTHS,
        **more,
    )


def printed(record, **more):
    out = io.StringIO()
    show(Console(file=out, width=100, **more), record)
    return out.getvalue()


def test_every_kind_of_fault_at_once_fits_on_one_screen():
    kinds = ["blocker"] * 6 + ["warning"] * 8 + ["info"] * 4
    lacking = [NotLookedFor(code=f"code_{n}", why="no row says") for n in range(4)]
    text = printed(
        make_audit(
            *(make_finding(f"fault_{n}", kind) for n, kind in enumerate(kinds)), not_looked_for=lacking
        )
    )
    assert len(text.splitlines()) <= 50
    for n in range(len(kinds)):
        assert f"fault_{n}" in text
    assert "code_0, code_1, code_2, code_3" in text
    assert "must not be trained on as it is" in text


def test_markup_in_a_log_is_text():
    text = printed(make_audit(make_finding("a", "warning", title="[red]x[/] [/bold] [link=x]y")))
    assert "[red]x[/] [/bold] [link=x]y" in text


@pytest.mark.parametrize("code", ["parse_error", "schema"])
def test_why_rows_could_not_be_read_is_reported_with_counts(code):
    reasons = {
        "no known shape (keys: a, b); expected one of: chat; completion": 2,
        "no known shape (keys: a, b); expected one of: chat": 5,
        "the key `x` occurs twice in one object": 3,
        "the row is nested too deeply": 1,
        "the row has 200 MiB": 1,
        "other reasons": 1,
    }
    text = printed(make_audit(make_finding(code, "warning", reasons=reasons)))
    reported = [" ".join(line.split()).replace(" ×", "") for line in text.splitlines() if "×" in line]
    assert reported == [
        "7 no known shape (keys: a, b)",
        "3 the key `x` occurs twice in one object",
        "1 the row is nested too deeply",
        "2 other reasons",
    ]


def test_usable_rows_that_are_too_long_are_reported_in_the_summary():
    long = make_finding("too_long", "warning", reasons={BUT_FOR_LENGTH: 1200, "other": 7})
    assert (
        "9,000 usable without faulty and repeated rows, of which about 1,200 are longer than data.max_tokens"
        in " ".join(printed(make_audit(long)).split())
    )
    assert "data.max_tokens" not in printed(make_audit(make_finding("a", "info")))
    counted = printed(make_audit(long, lengths_counted=True))
    assert "of which 1,200 are longer than data.max_tokens" in " ".join(counted.split())


def test_a_placeholder_is_no_emoji_and_a_terminal_obeys_nothing_of_a_log():
    title = "<REDACTED:credit_card:1> \x1b[31m\x07 \x9b2J \u202eabc"
    audit = make_audit(
        make_finding("a:smile:b", "warning", title=title, file="x:smile:\x1b[2J.jsonl"),
        make_finding("parse_error", "warning", reasons={"\x1b]0;t\x07 :smile:": 1}),
        files=("\x1b[2J:smile:.jsonl", "b"),
        not_looked_for=[NotLookedFor(code="c", why=":smile: \x1b[31m")],
    )
    text = printed(audit)
    assert "<REDACTED:credit_card:1>" in text
    assert text.count(":smile:") >= 4
    assert not set("\x1b\x07\x9b\u202e") & set(text)
    assert "␛[31m␇" in text


def test_messages_of_a_reporter_are_escaped_too():
    out = io.StringIO()
    reporter = RichReporter(Console(file=out, width=100))
    reporter.info("role: no kept row has '[red]:smile:\x1b[2J'")
    assert "[red]:smile:␛[2J" in out.getvalue()


def test_answers_of_a_model_are_text_too():
    tried = SimpleNamespace(
        question="[b]q :smile:\x1b[2J",
        base_answer="\x1b[1m:smile:",
        release_answer=":smile:",
        reference=":smile:",
        answered_by="r",
        seconds=1.0,
        capture_id="c",
    )
    out = io.StringIO()
    print_document(Console(file=out, width=100), view_try_out(SimpleNamespace(tried=(tried,))))
    text = out.getvalue()
    assert text.count(":smile:") == 4
    assert "\x1b" not in text
