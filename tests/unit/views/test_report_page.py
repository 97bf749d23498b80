"""The page: whole, self-contained, and deaf to whatever logs and models say."""

import re

import pytest
from page_reader import read
from report_sample import make_answers, make_audit, make_page, make_verdict, rate

from graftwork.pipeline.table import STEPS
from graftwork.records.base import Figure
from graftwork.records.dataset import Finding
from graftwork.records.interaction import Savings
from graftwork.records.live import (
    DriftShare,
    EscalationCurve,
    EscalationForecast,
    EscalationOption,
    EscalationPoint,
    GroupDrift,
    MeasuredShare,
    PromptDrift,
)
from graftwork.records.release import Tried
from graftwork.views.page import render_report
from graftwork.views.training import find_restarts

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"


@pytest.fixture
def page():
    return make_page()


def words(html):
    return " ".join(" ".join(read(html).text).replace("\u00a0", " ").split())


def test_the_page_is_whole_and_asks_nothing_of_the_outside(page):
    html = render_report(page)
    reader = read(html)
    assert reader.addresses == ["data:,"]
    assert len(reader.ids) == len(set(reader.ids))
    assert "script" not in reader.tags
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_the_same_records_give_the_same_bytes(page):
    assert render_report(page) == render_report(make_page())


def test_the_page_says_what_was_decided_and_why(page):
    text = words(render_report(page))
    for output in (
        "Deploy",
        "All 5 rules hold.",
        "99.4 %",
        "base 44.4 %",
        "the lower bound 96.6 % is over 95 %",
        "3 min 51 s",
        "A secret in a row",
        "killed after step 27, resumed at 21",
        "with the same weights to the last bit",
        "+16.6 %",
        "From when on is the bakery's oven hot on Sundays?",
        "as the reference",
        "not JSON",
        "4c1f9be27d5a03aa",
        "(unchanged)",
    ):
        assert output in text, output


def test_nothing_from_logs_or_models_becomes_markup():
    finding = Finding(code="x", severity="info", count=1, title=EVIL, effect=EVIL, fix=EVIL)
    verdict = make_verdict()
    rule = verdict.rules[0].model_copy(update={"sentence": EVIL, "rule": EVIL})
    honest = make_page()
    html = render_report(
        make_page(
            project=EVIL,
            audit=make_audit().model_copy(update={"findings": (finding,)}),
            dataset=honest.dataset.model_copy(update={"redactions": {EVIL: 1}, "kept_after": {EVIL: 3}}),
            verdict=verdict.model_copy(update={"rules": (rule,), "reason": EVIL, "advice": (EVIL,)}),
            side_by_side=(
                Tried(
                    case_id=EVIL,
                    question=EVIL,
                    reference=EVIL[5:],
                    base_answer=EVIL,
                    release_answer=EVIL,
                    answered_by=EVIL,
                    capture_id="",
                    captured_reply="",
                    seconds=0.0,
                ),
            ),
            outcome=honest.outcome.model_copy(
                update={
                    "versions": {EVIL: EVIL},
                    "residuals": tuple(r.model_copy(update={"name": EVIL}) for r in honest.outcome.residuals),
                }
            ),
            seconds={EVIL: 1.0},
        )
    )
    reader = read(html)
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    assert "<script" not in html
    assert "{{ 7*7 }}" in "".join(reader.text)


@pytest.mark.parametrize(
    ("decision", "headline"),
    [
        ("deploy", "Deploy"),
        ("iterate", "Iterate"),
        ("abort", "Abort"),
        ("not_enough_evidence", "Not enough evidence"),
    ],
)
def test_every_decision_has_its_page(decision, headline):
    rules = tuple(
        rule.model_copy(update={"outcome": outcome})
        for rule, outcome in zip(make_verdict().rules, ("pass", "fail", "unknown"), strict=False)
    )
    verdict = make_verdict().model_copy(
        update={"decision": decision, "rules": rules, "advice": ("Add rows that refuse.",)}
    )
    text = words(render_report(make_page(verdict=verdict, release=None)))
    assert headline in text
    assert "Add rows that refuse." in text


def test_every_step_of_a_run_has_a_note_in_the_report():
    steps = [step.name for step in STEPS if step.name != "report"]
    page = render_report(make_page(seconds=dict.fromkeys(steps, 1.0)))
    notes = re.findall(r'<span class="stage">(\w+)</span>.*?<span class="soft">([^<]*)</span></li>', page)
    assert [name for name, note in notes if note.strip()] == steps


def test_a_step_that_did_not_run_is_left_out_without_an_error():
    honest = make_page()
    without_lengths = {
        name: summary.model_copy(update={"lengths": {}}) for name, summary in honest.dataset.splits.items()
    }
    bare = make_page(
        steps=(),
        side_by_side=(),
        seconds={"audit": None},
        release=None,
        outcome=honest.outcome.model_copy(
            update={
                "residuals": (),
                "restarts": 0,
                "validation_loss_before": None,
                "validation_loss_after": None,
                "versions": {},
            }
        ),
        dataset=honest.dataset.model_copy(
            update={"kept_after": {}, "redactions": {}, "splits": without_lengths}
        ),
        audit=honest.audit.model_copy(update={"findings": ()}),
    )
    text = words(render_report(bare))
    assert "unchanged" in text
    assert "nothing was recorded" in text
    assert "Side by side" not in text
    assert "Plan against reality" not in text


def test_a_run_that_was_never_killed_shows_no_mark(page):
    once = {step.step: step for step in page.steps}
    assert find_restarts(tuple(once.values())) == []
    assert find_restarts(page.steps) == [(27, 21)]
    assert find_restarts(()) == []


def test_a_changed_base_is_reported(page):
    outcome = page.outcome.model_copy(update={"base_hash_after": "0" * 64, "replay_identical": False})
    text = words(render_report(page.model_copy(update={"outcome": outcome})))
    assert "CHANGED" in text
    assert "with other weights than before" in text


def test_answers_keep_their_order(page):
    text = words(render_report(page))
    places = [text.index(pair.question) for pair in make_answers()]
    assert places == sorted(places)


def test_a_metric_that_graded_no_case_shows_its_reason_and_no_figure(page):
    empty = rate("answer_match", 0, 1, 0.0, 1.0).model_copy(update={"n": 0})
    why = "no reference has the field queue"
    report = page.report
    changed = report.model_copy(
        update={
            "baseline": report.baseline.model_copy(
                update={"metrics": {**report.baseline.metrics, "answer_match": empty}}
            ),
            "candidate": report.candidate.model_copy(
                update={
                    "metrics": {
                        **report.candidate.metrics,
                        "answer_match": empty.model_copy(update={"vacuous": why}),
                    }
                }
            ),
        }
    )
    shown = words(render_report(page.model_copy(update={"report": changed})))
    assert "0 of 0" not in shown
    assert why in shown


SAVINGS = Savings(
    calls_per_month=Figure.exact(1000),
    logged_usd_per_month=Figure(value=500, low=400, high=600),
    hosting=None,
    saved_usd_per_month=Figure(value=400, low=300, high=500),
    confidence=0.95,
    days=30,
    models=("large",),
    sentence="The small model saves $400 ($300 to $500) a month.",
    notes=("The range is over 30 days.", "Hosting by `graft plan serve`."),
)


def test_the_first_screen_says_what_a_month_saves(page):
    html = render_report(page.model_copy(update={"savings": SAVINGS}))
    first_screen = html[: html.index("<main>")]
    assert "saves $400 ($300 to $500) a month" in first_screen
    assert "over 30 days" in first_screen
    assert "<code>graft plan serve</code>" in first_screen


def test_savings_that_are_not_known_are_not_on_the_first_screen(page):
    why = "What large costs is not known."
    unknown = SAVINGS.model_copy(update={"saved_usd_per_month": None, "sentence": why})
    html = render_report(page.model_copy(update={"savings": unknown}))
    assert html.index("<main>") < html.index(why)
    assert "over 30 days" not in html


def test_the_page_compares_with_and_without_repaired_rows(page):
    assert "What the repaired rows changed" not in words(render_report(page))
    without = page.report.baseline.model_copy(update={"subject": "model:as_logged"})
    report = page.report.model_copy(update={"others": (without,)})
    html = render_report(page.model_copy(update={"report": report, "without_repaired": "model:as_logged"}))
    assert "What the repaired rows changed" in words(html)
    assert "The adapter against model:as_logged" in words(html)


def test_the_page_shows_how_far_live_prompts_have_moved(page):
    share = {"prompts": 40, "unlike": 20, "share": 0.5, "low": 0.34, "high": 0.66}
    drift = PromptDrift(
        all=DriftShare(**share),
        expected=0.05,
        by_group=(GroupDrift(group=EVIL, **share),),
        examples=(EVIL,),
        due=True,
        reason="a retraining is due",
    )
    html = render_report(page.model_copy(update={"drift": drift}))
    assert "20 of 40 live prompts" in words(html)
    assert "A retraining is due" in words(html)
    assert "<script>alert" not in html


def test_the_page_shows_the_forecast_of_escalation_with_its_curves(page):
    share = MeasuredShare(value=0.7, low=0.6, high=0.8, n=100)
    alone = EscalationOption(checks=(), escalated=share, quality=share, cost_per_1000=0.1)
    points = tuple(
        EscalationPoint(threshold=-t, escalated=share, quality=share, cost_per_1000=t) for t in (1.0, 2.0)
    )
    curve = EscalationCurve(
        points=points, chosen=points[0], validation_cases=40, validation_escalated=0.1,
        validation_quality=0.8, max_rate=0.2, auc=0.81, prefix_tokens=16,
    )  # fmt: skip
    forecast = EscalationForecast(
        small="adapter", large="<log>", metric="right", cases=100, chosen=alone, options=(alone,),
        large_alone=alone.model_copy(update={"cost_per_1000": 10.0}), gain_over_small=0, gain_low=0,
        gain_high=0, loss_to_large=0, loss_low=0, loss_high=0, curve=curve,
    )  # fmt: skip
    html = render_report(page.model_copy(update={"escalation": forecast}))
    assert "Small first, large when needed" in html
    assert "Chosen on 40 validation cases" in html
    assert "first 16 tokens" in html
    assert html.count('class="plot escalation"') == 2
    assert "<log>" not in html
