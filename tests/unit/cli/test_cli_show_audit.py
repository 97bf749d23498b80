"""The audit on the terminal: one screen, and no markup that came from a log."""

import io

from rich.console import Console

from graftwork.cli.show import show
from graftwork.records.audit import Audit, Finding, LengthSummary, NotLookedFor
from graftwork.records.interaction import Origin

LENGTHS = LengthSummary(smallest=1, median=2, p95=3, largest=4)


def make_finding(
    code, severity, *, title="12 rows are cut off before the end of the reply", file="log.jsonl"
):
    return Finding(
        code=code,
        severity=severity,
        count=12,
        title=title,
        effect="trained on, they teach the model to stop in the middle",
        fix="`graft data prepare` drops these (data.drop_truncated)",
        rows=tuple(Origin(file=file, line=line) for line in range(1, 13)),
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


def printed(audit):
    out = io.StringIO()
    show(Console(file=out, width=100), audit)
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


def test_what_is_said_of_a_fault_follows_its_weight():
    text = printed(make_audit(make_finding("a", "blocker")))
    assert "stop in the middle" in " ".join(text.split())
    assert "line 1, 2, 3, 4 …" in " ".join(text.split())
    text = printed(make_audit(make_finding("a", "info")))
    assert "stop in the middle" not in text
    assert "fit to train on as it is" in text


def test_rows_of_several_files_are_named_with_their_file():
    files = tuple(f"{n}.jsonl" for n in range(9))
    text = printed(make_audit(make_finding("a", "warning", file="7.jsonl"), files=files))
    assert "7.jsonl:1 …" in text
    assert "and 6 more files" in text


def test_markup_in_a_log_is_text():
    text = printed(make_audit(make_finding("a", "warning", title="[red]x[/] [/bold] [link=x]y")))
    assert "[red]x[/] [/bold] [link=x]y" in text
