"""The page of an audit: whole, self-contained, and deaf to whatever logs say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reader import read

from graftwork.records.dataset import (
    Audit,
    Cluster,
    Example,
    Finding,
    LengthHistogram,
    LengthSummary,
    NotLookedFor,
    ReadableRow,
)
from graftwork.records.interaction import Origin
from graftwork.views.audit import draw_buckets, make_audit_page

EVIL = "</pre></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}`"


def words(html):
    return " ".join(" ".join(read(html).text).split())


def make_audit(text="ordinary", *, severity="blocker", **changes):
    origin = Origin(file=f"{text}.jsonl", line=7)
    row = ReadableRow(origin=origin, question=f"asked {text}", reply=f"said {text}", group=text, model=text)
    finding = Finding(
        code="truncated",
        severity=severity,
        count=1234,
        title=f"1,234 rows are cut off {text}",
        effect="it teaches to stop",
        fix="`graft data prepare` drops these",
        rows=tuple(Origin(file=origin.file, line=line) for line in range(1, 300)),
        examples=tuple(Example(origin=origin, excerpt=f"{text} {n}") for n in range(5)),
        reasons={f"{text} one": 1000, f"{text} two": 234},
    )
    plain = {
        "files": (origin.file,),
        "rows": 2000,
        "readable": 1999,
        "usable": 700,
        "fit_to_train": severity != "blocker",
        "findings": (finding,),
        "groups": {text: 1500, "other": 499},
        "usable_groups": {text: 700},
        "models": {text: 1999},
        "domains": {text: 3},
        "prompt_length": LengthSummary(smallest=1, median=2, p95=3, largest=4),
        "reply_length": LengthSummary(smallest=1, median=2, p95=3, largest=4),
        "not_looked_for": (NotLookedFor(code="failed_status", why=f"no row states {text}"),),
        "length_edges": (0, 10, 100),
        "length_histograms": tuple(
            LengthHistogram(of=of, group=group, counts=counts)
            for of in ("prompt", "reply")
            for group, counts in ((None, (3, 5, 1)), (text, (1, 5, 0)))
        ),
        "clusters": tuple(
            Cluster(kind=kind, size=30, rows=(origin, origin), shown=(row, row))
            for kind in ("conflicting_answers", "near_duplicate", "duplicate")
        ),
        "examples": (row, row, row),
    }
    return Audit(**{**plain, **changes})


def test_the_page_is_whole_and_asks_nothing_of_the_outside():
    html = make_audit_page(make_audit())
    reader = read(html)
    assert reader.addresses == ["data:,"]
    assert not {"script", "iframe", "object", "embed", "form", "img"} & set(reader.tags)
    assert len(set(reader.ids)) == len(reader.ids)
    assert "default-src 'none'" in html
    for outside in ("http://", "https://", "url(", "@import"):
        assert outside not in html


def test_the_verdict_stands_on_top_with_its_reasons():
    text = words(make_audit_page(make_audit()))
    assert text.index("Must not be trained on as it is") < text.index("1,234 rows are cut off")
    fit = words(make_audit_page(make_audit(severity="warning")))
    assert "Fit to train on as it is" in fit
    assert "Must not" not in fit


def test_everything_that_the_audit_knows_is_on_the_page():
    text = words(make_audit_page(make_audit()))
    for output in (
        *("truncated", "it teaches to stop", "graft data prepare", "ordinary.jsonl:7", "ordinary 4"),
        *("ordinary two", "Not checked", "no row states ordinary", "700 of 1 500"),
        *("One prompt, different answers", "Nearly the same", "Models that answered", "Domains"),
        *("Examples to read", "asked ordinary", "said ordinary", "and 99 more"),
    ):
        assert output in text, output


def test_hostile_content_stays_text():
    html = make_audit_page(make_audit(EVIL))
    reader = read(html)
    assert not {"script", "img"} & set(reader.tags)
    assert "alert(1)" in " ".join(reader.text)
    assert "{{ 7*7 }}" in " ".join(reader.text)
    assert reader.addresses == ["data:,"]


@given(st.text(max_size=60))
@settings(max_examples=15, deadline=None)
def test_any_text_gives_a_whole_page(text):
    read(make_audit_page(make_audit(text)))


def test_the_same_audit_gives_the_same_bytes():
    assert make_audit_page(make_audit()) == make_audit_page(make_audit())


def test_an_audit_that_found_nothing_is_a_page_too():
    nothing = make_audit(
        findings=(),
        fit_to_train=True,
        groups={},
        usable_groups={},
        domains={},
        models={},
        clusters=(),
        examples=(),
        not_looked_for=(),
        length_histograms=(),
        length_edges=(),
        rows=0,
        readable=0,
        usable=0,
    )
    assert "Nothing." in words(make_audit_page(nothing))


@pytest.mark.parametrize("width", [340.0, 760.0])
def test_bars_stay_inside_the_drawing(width):
    drawn = draw_buckets(
        (0, 10, 100, 1000), {"a": (0, 2, 1, 0), "b": (0, 0, 9, 0)}, title="t", unit="u", width=width
    )
    assert drawn.count("<rect") == 3
    assert "12 rows between 10 and 1 000 u" in drawn.replace("\u202f", " ")
    for part in drawn.split('<rect x="')[1:]:
        assert 0 <= float(part.split('"')[0]) <= width
