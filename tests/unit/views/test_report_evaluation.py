"""The page of an evaluation: complete, at rest by itself, and deaf to what models write."""

import base64
import hashlib
import json
import re
import shutil
import subprocess

import pytest
from evaluation_sample import HOSTILE, make_evaluation
from page_reader import read
from report_sample import make_page

from graftwork.records.report import JudgeTally
from graftwork.views.evaluation_page import (
    MOST_CHARACTERS,
    embed,
    list_cases,
    read_part,
    render_evaluation,
    shorten,
)
from graftwork.views.page import render_report

DATA = re.compile(r'<script type="application/json" id="case-data">(.*?)</script>', re.S)
SCRIPT = re.compile(r"<script>(.*?)</script>", re.S)


def data_of(html):
    return json.loads(DATA.search(html).group(1))


@pytest.fixture(scope="module")
def page():
    return make_evaluation()


@pytest.fixture(scope="module")
def html(page):
    return render_evaluation(page)


def test_the_page_reports_figures_pairs_parts_and_how_it_was_measured(page, html):
    seen = " ".join(read(html).text)
    assert "12 cases" in seen
    for word in ("Paired comparison", "By role", "By domain", "By length of the prompt", "planner", "seed 7"):
        assert word in seen, word
    assert page.report.power.sentence[:40] in seen.replace("\u00a0", " ")
    assert page.report.cases_hash in seen


def test_the_page_reaches_nothing_outside_itself(html):
    reader = read(html)
    assert reader.addresses == ["data:,"]
    assert reader.tags.count("script") == 2
    assert len(reader.ids) == len(set(reader.ids))


def test_only_the_script_that_the_policy_names_can_run(html):
    script = SCRIPT.search(html).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_text_of_a_model_is_escaped_everywhere():
    hostile = make_evaluation(adapter=lambda i: HOSTILE)
    html = render_evaluation(hostile)
    reader = read(html)
    assert reader.tags.count("script") == 2
    assert "img" not in reader.tags
    right = data_of(html)["cases"][0]["answers"][1]["text"]
    assert right == HOSTILE
    html.encode()


def test_names_of_subjects_and_parts_are_escaped_too(page):
    renamed = json.loads(page.to_json().replace('"planner"', '"<img onerror=alert(1)>"'))
    reader = read(render_evaluation(type(page).model_validate(renamed)))
    assert "img" not in reader.tags


def test_the_same_evaluation_gives_the_same_bytes(page, html):
    assert render_evaluation(type(page).from_json(page.to_json())) == html


def test_every_case_is_in_the_page_with_all_answers_and_grades(page, html):
    data = data_of(html)
    assert [case["id"] for case in data["cases"]] == [case.id for case in page.cases]
    assert data["subjects"] == ["base", "adapter", "log"]
    first = data["cases"][0]
    assert [answer["text"] for answer in first["answers"]][:2] == [
        "It closes at six.",
        "It closes at six, please come.",
    ]
    names = [metric["name"] for metric in data["metrics"]]
    assert first["scores"][names.index("polite")] == [0.0, 1.0, 1.0]
    assert first["parts"]["group"] == "planner"
    assert set(data["cuts"]) == {"group", "domain", "length"}


def test_imported_results_without_answers_have_no_browser(page):
    html = render_evaluation(page.model_copy(update={"answers": {}, "cases": ()}))
    assert "script" not in read(html).tags


def test_a_worn_test_set_is_reported():
    html = render_evaluation(make_evaluation(looks=14, candidates=14))
    seen = " ".join(read(html).text).replace("\u00a0", " ")
    assert "looked at 14 times" in seen
    assert "worn out: hold out new rows" in seen


def test_verdicts_of_a_judge_are_shown_with_its_self_agreement(page):
    tally = JudgeTally(
        model="judge-1",
        baseline="base",
        candidate="adapter",
        pairs=12,
        wins=7,
        losses=2,
        ties=1,
        inconsistent=2,
        agreement=10 / 12,
        agreement_low=0.52,
        agreement_high=0.98,
        first_place_share=0.6,
        position_bias_p=0.5,
    )
    judged = page.model_copy(update={"report": page.report.model_copy(update={"judged": (tally,)})})
    seen = " ".join(" ".join(read(render_evaluation(judged)).text).split())
    assert "judge-1 preferred adapter to base in 7 of 12 pairs, the other way round in 2" in seen
    assert "Both orders agreed in 83.3 % of the pairs (52 % to 98 %)" in seen


def test_the_report_of_a_run_links_to_the_page_and_says_that_the_cases_are_worn():
    worn = make_evaluation(looks=14, candidates=14).report.wear
    plain = make_page()
    report = plain.report.model_copy(update={"wear": worn})
    linked = plain.model_copy(update={"evaluation_page": "evaluation.html", "report": report})
    reader = read(render_report(linked))
    assert "evaluation.html" in reader.addresses
    assert "worn out" in " ".join(reader.text)
    assert "evaluation.html" not in read(render_report(plain)).addresses


def test_a_very_long_text_is_shown_by_both_ends():
    text = "a" * MOST_CHARACTERS + "b" * 100
    assert shorten(text).startswith("aaa")
    assert shorten(text).endswith("b" * 100)
    assert len(shorten(text)) < len(text) + 60
    assert "100 characters left out" in shorten(text)
    assert shorten("short") == "short"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run the page's script")
class TestTheScript:
    def run(self, page, expression):
        data = list_cases(page.cases, report=page.report, answers=page.answers)
        program = f"{read_part('case_browser.js')}\nconst data = {embed(data)};\n"
        program += f"process.stdout.write(JSON.stringify({expression}));"
        done = subprocess.run(
            ["node", "-"], input=program, capture_output=True, encoding="utf-8", timeout=300, check=True
        )
        return json.loads(done.stdout)

    def filters(self, **more):
        filters = {"left": 0, "right": 1, "metric": -1, "outcome": "", "search": "", "cut": "", "part": ""}
        return json.dumps(filters | more)

    def test_losses_come_first_then_wins(self, page):
        chosen = self.run(page, f"choose(data, {self.filters()})")
        outcomes = [item["outcome"] for item in chosen["found"]]
        assert outcomes[0] == "lost"
        assert chosen["found"][0]["item"]["id"] == "case-4"
        order = ["lost", "won", "wrong", "right", "open"]
        assert outcomes == sorted(outcomes, key=order.index)
        assert chosen["counts"] == {"lost": 1, "won": 11}

    def test_one_metric_counts_as_the_report_counts_it(self, page):
        data = list_cases(page.cases, report=page.report, answers=page.answers)
        names = [metric["name"] for metric in data["metrics"]]
        for metric in ("says_six", "polite"):
            counts = self.run(page, f"choose(data, {self.filters(metric=names.index(metric))})")["counts"]
            pair = next(c for c in page.report.comparisons if c.metric == metric)
            assert (counts.get("won", 0), counts.get("lost", 0)) == (pair.wins, pair.losses)

    def test_filters_narrow_by_outcome_part_and_words(self, page):
        planners = self.run(page, f"choose(data, {self.filters(cut='group', part='planner')})")["found"]
        assert [case["item"]["parts"]["group"] for case in planners] == ["planner"] * 6
        lost = self.run(page, f"choose(data, {self.filters(outcome='lost')})")["found"]
        assert [case["item"]["id"] for case in lost] == ["case-4"]
        found = self.run(page, f"choose(data, {self.filters(search='Shop 11 ')})")["found"]
        assert [item["item"]["id"] for item in found] == ["case-11"]

    def test_any_two_subjects_can_stand_side_by_side(self, page):
        counts = self.run(page, f"choose(data, {self.filters(left=2, right=1)})")["counts"]
        assert counts == {"lost": 1, "right": 11}

    @pytest.mark.parametrize(
        ("before", "after", "marked"),
        [
            ("closes at six", "closes at seven", (["six"], ["seven"])),
            ("same", "same", ([], [])),
            ("", "new words", ([], ["new words"])),
            ("a b c", "a  b\nc", ([], [])),
            ("x one y", "y one x", (["x", "y"], ["y", "x"])),
            ("日本 one", "日本 two", (["one"], ["two"])),
        ],
    )
    def test_differences_are_marked_on_both_sides(self, page, before, after, marked):
        sides = self.run(page, f"compareTexts({json.dumps(before)}, {json.dumps(after)})")
        for pieces, text, expected in zip(sides, (before, after), marked, strict=True):
            assert "".join(piece for piece, _ in pieces) == text
            assert [piece.strip() for piece, differs in pieces if differs] == expected

    def test_very_long_texts_are_compared_at_once(self, page):
        long = json.dumps("word " * 9000), json.dumps("other " * 9000)
        before, after = self.run(page, f"compareTexts({long[0]}, {long[1]})")
        assert before[0][1] is True
        assert after[0][1] is True
