"""Every view answers, in a full and in an empty project, and says what is wrong where something is."""

import json
import re
import shutil
import sqlite3
import threading
from datetime import date
from typing import Any

import pytest
import typer
from served_page import serve
from web_views import list_views

from graftwork.cli.main import make_app
from graftwork.records.week import ShownSession, WeekSchedule, WhatIf
from graftwork.views.charts import draw_gantt
from graftwork.views.plan import draw_week
from graftwork.web.plan import FORMS

HOSTILE = ("<script>document", "<img src=x", "onerror=alert(1)>")
MOST_BYTES = 300_000


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_every_view_answers_small_and_with_hostile_text_as_text(page, made_project):
    for name, path in list_views(made_project).items():
        answer = page.visitor.get(path)
        assert answer.status == (404 if name == "no such page" else 200), (name, answer.text[-2000:])
        assert len(answer.text) < MOST_BYTES, name
        assert "<h1>" in answer.text, name
        for markup in HOSTILE:
            assert markup not in answer.text, name
        assert "server-timing" in answer.headers


def test_captured_markup_is_shown_letter_for_letter(page, made_project):
    text = page.visitor.get(list_views(made_project)["capture"]).text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "\u202egnp.exe" in text
    assert 'dir="auto"' in text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/", "Nothing has run yet"),
        ("/data", "graft data audit"),
        ("/runs", "graft train"),
        ("/evaluation", "Nothing was evaluated yet"),
        ("/review", "Nothing waits for a review"),
        ("/releases", "Nothing is released yet"),
        ("/captures", "graft serve"),
        ("/fleet", "No job ran at another place yet"),
        ("/week", "week"),
        ("/plan", "graft plan"),
        ("/actions", "Nothing was done from this page yet"),
        ("/playground", "Playground"),
    ],
)
def test_an_empty_project_says_what_to_run(empty_page, path, says):
    answer = empty_page.visitor.get(path)
    assert answer.status == 200
    assert says in answer.text


@pytest.fixture(scope="module")
def empty_page(empty_project):
    with serve(empty_project) as served:
        yield served


@pytest.mark.parametrize(
    "path",
    [
        "/runs/none",
        "/runs/none/events",
        "/runs/none/curve.json",
        "/runs/compare?a=none&b=nobody",
        "/releases/none",
        "/releases/none/report",
        "/releases/compare?a=none&b=other",
        "/data/sets/none",
        "/data/sets/latest/rows/none",
        "/data/sets/latest/rows?split=nothing",
        "/data/findings/none",
        "/data/trace?what=nowhere.jsonl:99",
        "/data/compare?a=none&b=none",
        "/evaluation/cases/none",
        "/captures/none",
        "/fleet/none",
        "/plan/none",
        "/static/../app.py",
        "/static/vendor/vendored.json",
        "/%00",
        "/evaluation?model=none",
    ],
)
def test_an_unknown_id_is_a_page_that_says_so(page, path):
    answer = page.visitor.get(path)
    assert answer.status == 404
    assert "What to do" in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("query", ["page=999999", "page=-1", "page=x", "left=a&metric=b", "text=%ff%00"])
def test_nonsense_in_the_address_of_cases_still_gives_a_page(page, query):
    assert page.visitor.get(f"/evaluation/cases?{query}").status == 200


def test_a_form_with_nonsense_says_which_field_is_wrong(page):
    text = text_of(page.visitor.get("/plan/fit?model=qwen2.5-7b&rows=many").text)
    assert "Rows per epoch is 'many'" in text.replace("&#39;", "'")
    assert "nonsense-1" in text_of(page.visitor.get("/plan/serve?model=nonsense-1").text)


def test_a_database_that_is_gone_is_named(shop):
    with serve(shop) as served:
        assert served.visitor.get("/").status == 200
        shutil.rmtree(shop / ".graft")
        (shop / ".graft").write_text("not a folder")
        answer = served.visitor.get("/")
    assert answer.status == 503
    assert "What to do" in answer.text
    assert "Traceback" not in answer.text


def test_a_damaged_database_is_named(shop):
    (shop / ".graft" / "state.db").write_bytes(b"no database at all" * 100)
    for log in (shop / ".graft").glob("state.db-*"):
        log.unlink()
    with serve(shop) as served:
        answer = served.visitor.get("/runs")
    assert answer.status == 503
    assert "the state database cannot be read" in answer.text.lower()


def test_a_locked_database_is_read_all_the_same(shop):
    holder = sqlite3.connect(shop / ".graft" / "state.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with serve(shop) as served:
            assert served.visitor.get("/").status == 200
    finally:
        holder.close()


def test_a_database_of_a_newer_version_is_named(shop):
    with sqlite3.connect(shop / ".graft" / "state.db") as database:
        database.execute("INSERT INTO schema_migrations VALUES (9999, 'of the future', '99.0')")
    with serve(shop) as served:
        answer = served.visitor.get("/")
    assert answer.status == 503
    assert "What to do" in answer.text


def test_a_wrong_graft_yaml_is_shown_with_its_line(shop):
    with serve(shop) as served:
        (shop / "graft.yaml").write_text("project: x\nbase: small\nnonsense: 1\ndata: {logs: [a]}\n")
        answer = served.visitor.get("/")
        assert "unknown key" in answer.text.lower()
        assert "graft.yaml:3" in answer.text
        assert "event: graft:change" not in answer.text


def test_a_run_whose_folder_is_half_deleted_is_shown_as_far_as_it_is_there(shop):
    from graftwork.api.project import open_project

    folder = shop
    with open_project(shop).open() as work:
        run = work.runs.list(limit=1)[0]
    (folder / ".graft" / "runs" / run.id / "steps.jsonl").unlink()
    shutil.rmtree(folder / ".graft" / "runs" / run.id / "adapter")
    (folder / ".graft" / "evaluations" / "adapter" / "answers.jsonl").unlink()
    with serve(folder) as served:
        text = text_of(served.visitor.get(f"/runs/{run.id}").text)
        assert "its journal of steps is gone" in text
        assert "its adapter is gone" in text
        assert "the answers of adapter are gone" in text_of(served.visitor.get("/evaluation").text)
        shutil.rmtree(folder / ".graft" / "runs" / run.id)
        assert "is gone" in served.visitor.get(f"/runs/{run.id}").text
        shutil.rmtree(folder / ".graft" / "evaluations")
        assert served.visitor.get("/evaluation/cases").status == 404
        assert served.visitor.get("/").status == 200


def test_a_bug_shows_no_traceback(page, monkeypatch, capsys):
    from graftwork.web import runs

    def fail(*_arguments, **_options):
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(runs.runs, "list_runs", fail)
    answer = page.visitor.get("/runs")
    assert answer.status == 500
    assert "Traceback" not in answer.text
    assert "a secret detail" not in answer.text
    assert "content-security-policy" in answer.headers


def test_reload_second_tab_and_a_new_server_show_the_same(made_project, page):
    def body(visitor):
        return re.sub(r"just now|\d+ (min|h|days?) ago|graft_ui\w+", "", visitor.get("/runs").text)

    first = body(page.visitor)
    assert body(page.visitor) == first
    with serve(made_project) as another:
        assert body(another.visitor) == first


def test_many_visitors_at_once_all_get_their_page(page):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(page.visitor.get("/runs").status)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 8


def test_cases_can_be_filtered_by_outcome_part_and_text(page):
    lost = page.visitor.get("/evaluation/cases?outcome=lost").text
    assert "case-3" in lost
    assert "case-2?" not in lost
    writer = page.visitor.get("/evaluation/cases?part=group:writer").text
    assert "case-1?" in writer
    assert "case-0?" not in writer
    assert "No case matches" in page.visitor.get("/evaluation/cases?text=zebra").text


def test_a_case_leads_to_its_neighbours_under_the_same_filter(page):
    text = page.visitor.get("/evaluation/cases/case-13?outcome=won").text
    links = re.findall(r'data-key="([jk])" href="(/evaluation/cases/case-\d+\?[^"]*)"', text)
    assert {key for key, _ in links} == {"j", "k"}
    assert all("outcome=won" in link for _, link in links)


def test_a_row_is_shown_with_its_trained_tokens_marked(page, made_project):
    text = page.visitor.get(list_views(made_project)["row"]).text
    assert re.search(r'<mark class="trained">It grows by the \w+', text)
    assert "logs/interactions.jsonl:" in text


def test_comparing_shows_differences_only_unless_asked(page, made_project):
    views = list_views(made_project)
    few = page.visitor.get(views["compare runs"]).text
    every = page.visitor.get(views["compare runs"] + "&all=1").text
    assert "epochs" not in few
    assert "epochs" in every
    assert "learning rate" in few


def test_forms_show_the_command_they_stand_for(page, made_project):
    text = page.visitor.get(list_views(made_project)["plan buy"]).text
    assert "graft plan buy --option &#39;2x RTX 5060 Ti 16GB=700&#39; --model olmo-7b --rows 500" in text


def make_week(lanes):
    sessions = [
        ShownSession(
            place="kaggle",
            model=model,
            lane=lane,
            start=1920,
            end=2640,
            train=690,
            starts_at="2026-11-17T08:00:00+00:00",
            ends_at="2026-11-17T20:00:00+00:00",
            hours=11.5,
            cost_usd=0.0,
            by_hand=True,
        )
        for lane, model in enumerate(lanes)
    ]
    return WeekSchedule(
        start="2026-11-16T00:00:00+00:00",
        end="2026-11-23T00:00:00+00:00",
        now="2026-11-16T00:00:00+00:00",
        timezone="UTC",
        scenario="parallel",
        sessions=sessions,
        models=(),
        places=(),
        value=55.5,
        bound=55.5,
        gap=0.0,
        optimal=True,
        cost_usd=0.0,
        cap_usd=None,
        scenarios=(),
        what_if=(WhatIf(change="one more card", value=60.0, gain=4.5),),
    )


def test_a_planned_week_is_drawn_and_a_damaged_one_is_named(shop):
    with serve(shop) as served:
        (shop / "week.json").write_text(make_week(["main"]).to_json())
        text = served.visitor.get("/week").text
        assert "1 session at 1 place" in text
        assert "one more card" in text
        (shop / "week.json").write_text('{"start": 1}')
        assert "is not a planned week" in served.visitor.get("/week").text
        assert served.visitor.get("/").status == 200


def test_sessions_at_once_are_drawn_in_rows_of_their_own():
    week = make_week(["main", "other"])
    bars = re.findall(r'<rect[^>]*?x="([^"]+)"[^>]*?y="([^"]+)"', draw_gantt(draw_week(week)))
    assert len({x for x, _ in bars}) == 1
    assert len({y for _, y in bars}) == 2
    assert ">kaggle 2<" in draw_gantt(draw_week(week))


@pytest.mark.parametrize(
    "query",
    ["serve?model=qwen2.5-7b&users=0", "fit?epochs=inf", "fit?epochs=nan", "fit?rows=-5", "fit?ram=nan",
     "serve?model=qwen2.5-7b&limit_seconds=nan"],
)  # fmt: skip
def test_a_plan_with_a_number_that_cannot_be_is_refused_on_its_page(page, query):
    answer = page.visitor.get(f"/plan/{query}")
    assert answer.status == 200
    assert "above 0" in answer.text


def test_the_cycle_shows_its_steps_and_what_waits_for_a_person(page):
    text = page.visitor.get("/cycle").text
    assert "Promote waits for your approval" in text
    assert "graft up approve promote" in text
    assert "Train was approved by ada" in text
    assert "not promoted" in text


def test_a_generation_shows_pass_at_1_by_stage_before_and_after(page):
    listed = page.visitor.get("/components").text
    assert "components/before" in listed
    text = page.visitor.get("/components/in?folder=components/after&against=components/before").text
    assert "points" in text
    assert "graft generate report components/after --against components/before" in text
    assert "collapse_spaces" in page.visitor.get("/components/of/1.4?folder=components/after").text


@pytest.mark.parametrize(
    "path",
    ["/components/in?folder=..", "/components/in?folder=logs", "/components/in",
     "/components/of/1.4?folder=/etc", "/components/of/nothing?folder=components/after",
     "/releases/nothing/archive"],
)  # fmt: skip
def test_a_folder_without_a_generation_is_a_page_that_says_so(page, path):
    answer = page.visitor.get(path)
    assert answer.status == 404
    assert "Traceback" not in answer.text


def test_a_damaged_journal_of_a_generation_is_named_in_the_list(shop):
    journal = shop / "components" / "after" / "generation" / "journal.jsonl"
    journal.write_text(journal.read_text().replace("true", "false", 1))
    with serve(shop) as served:
        assert "the journal is damaged" in served.visitor.get("/components").text
        assert served.visitor.get("/components/in?folder=components/after").status == 503


def test_the_week_is_planned_again_under_the_terms_of_the_address(page):
    text = page.visitor.get("/week/try?try=1&spend=0&seconds=1").text
    assert "The week under these terms" in text
    assert "$0.00" in text
    assert "The week under these terms" not in page.visitor.get("/week/try").text


@pytest.mark.parametrize("query", ["spend=-1", "spend=nan", "gate=x", "seconds=inf", "hours.kaggle=-31"])
def test_terms_of_a_week_that_cannot_be_are_refused_on_their_page(page, query):
    answer = page.visitor.get(f"/week/try?try=1&{query}")
    assert answer.status == 200
    assert 'class="error"' in answer.text


def test_zero_is_a_number_in_plans(page):
    text = page.visitor.get("/plan/serve?model=qwen2.5-7b&gpu=RTX+4090&ram=64&adapters=0").text
    assert "above 0" not in text
    assert "--adapters 0" in text


@pytest.mark.parametrize("name", FORMS)
def test_a_form_shows_options_that_its_command_has(name):
    command: Any = typer.main.get_command(make_app())
    for word in ("plan", name):
        command = command.commands[word]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {field.flag for field in FORMS[name].fields} <= options


def test_the_curve_of_escalation_is_drawn_with_its_threshold(page):
    text = page.visitor.get("/evaluation/escalation").text
    assert 'class="plot escalation"' in text
    assert "threshold -0.200" in text


def test_the_overview_begins_with_the_pipeline_and_names_the_version_to_roll_back_to(page):
    text = page.visitor.get("/").text
    assert text.index('class="pipeline"') < text.index('class="cards"')
    assert "Roll back to 1.0.0" in text
    assert "graft release rollback --alias champion --reason" in text


def test_a_step_names_its_own_cause_or_the_step_that_it_needs_first(shop):
    settings = shop / "graft.yaml"
    settings.write_text(settings.read_text().replace("test: 0.3", "test: 0.4"))
    with serve(shop) as served:
        page = served.visitor.get("/?check=1").text
    causes = re.findall(r'class="because root">([^<]*)', page)
    assert set(causes) == {"data.test was 0.3 and is 0.4"}
    assert "needs prepare first" in text_of(page)
    assert "needs train and evaluate first" in text_of(page)


def test_a_trace_shows_the_line_of_the_log_redacted_and_as_text(shop):
    log = shop / "logs" / "interactions.jsonl"
    log.write_text(log.read_text().replace('"TODO"', '"<b>ask ada@example.org</b>"'))
    with serve(shop) as served:
        text = served.visitor.get("/data/trace?what=logs/interactions.jsonl:6").text
        assert "The line in the log, redacted" in text
        assert "&lt;b&gt;ask" in text
        assert "ada@example.org" not in text
        log.unlink()
        assert served.visitor.get("/data/trace?what=logs/interactions.jsonl:6").status == 200


def test_a_metric_leads_to_its_cases(page):
    text = page.visitor.get("/evaluation").text
    assert 'href="/evaluation/cases?metric=names_the_place"' in text
    assert "metric=latency" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("trained on, it fails", "Trained on, it fails"), ("qwen2.5-7b fits", "qwen2.5-7b fits"),
     ("`graft run` does it", "`graft run` does it"), ("", "")],
)  # fmt: skip
def test_sentences_begin_with_a_capital_letter_but_names_stay(text, shown):
    from graftwork.views.html import sentence

    assert sentence(text) == shown


def test_two_runs_are_compared_with_both_losses_in_one_plot(page, made_project):
    text = page.visitor.get(list_views(made_project)["compare runs"]).text
    assert "Training loss of both runs" in text
    assert 'class="trend before"' in text
    assert 'class="trend after"' in text


def test_runs_without_steps_are_compared_without_a_plot(shop):
    from graftwork.api.project import open_project

    with open_project(shop).open() as work:
        first, second = (run.id for run in work.runs.list(limit=2))
    (shop / ".graft" / "runs" / first / "steps.jsonl").unlink()
    with serve(shop) as served:
        answer = served.visitor.get(f"/runs/compare?a={first}&b={second}")
    assert answer.status == 200
    assert "Training loss of both runs" not in answer.text


def sections_of(text):
    """The names in the navigation that are shown, and those that are folded away."""
    side = text.partition('<nav class="side"')[2].partition("</nav>")[0]
    shown, _, folded = side.partition("<details")
    return [re.findall(r">(\w+)</a>", part) for part in (shown, folded)]


def test_sections_that_the_project_does_not_use_yet_are_folded_away(page, empty_page):
    shown, folded = sections_of(page.visitor.get("/").text)
    assert {"Cycle", "Fleet", "Week", "Components"} <= {*shown}
    assert folded == ["Log"]
    text = empty_page.visitor.get("/").text
    shown, folded = sections_of(text)
    assert folded == ["Components", "Cycle", "Fleet", "Week", "Log"]
    assert {"Overview", "Data", "Runs", "Captures"} <= {*shown}
    assert '<details class="more">' in text
    assert '<details class="more" open>' in empty_page.visitor.get("/week").text


@pytest.mark.parametrize("name", ["evaluation", "cases", "case"])
def test_subjects_of_an_evaluation_lead_to_their_run_and_release(page, made_project, name):
    views = list_views(made_project)
    text = page.visitor.get(views[name]).text
    assert f'<a href="{views["run"]}">run ' in text
    assert f'<a href="{views["release"]}">release ' in text


@pytest.mark.parametrize("subject", ["run:none", "release:none", "champion", "model:none"])
def test_a_subject_whose_run_or_release_is_gone_is_left_out(shop, subject):
    from graftwork.api.evaluations import trace_subjects
    from graftwork.api.project import open_project

    project = open_project(shop)
    with project.open() as work:
        entry = work.ledger.get("evaluate")
        text = json.dumps(entry.output).replace('"subject": "adapter"', f'"subject": "{subject}"')
        work.ledger.put("evaluate", fingerprint="e", output=json.loads(text), finished_at="x", seconds=1)
    assert [*trace_subjects(project)] == ([subject] if subject == "champion" else [])


def test_without_prices_or_times_of_the_log_no_figures_of_savings_are_shown(page, empty_page):
    text = page.visitor.get("/parts/savings").text
    assert "What" in text
    assert "is not known" in text
    assert "<table" not in text
    assert empty_page.visitor.get("/parts/savings").text.strip() == '<div id="savings"></div>'


def test_savings_are_dollars_a_month_with_their_range_from_the_days_of_the_log(shop):
    from graftwork.api.project import open_project
    from graftwork.records.interaction import UsageDay

    calls = {"calls": 40, "prompt_characters": 1, "reply_characters": 1, "counted": 40}
    tokens = {"unpriced_prompt_tokens": 4_000_000, "unpriced_reply_tokens": 400_000}
    days = [
        UsageDay(day=date(2026, 11, number), model="gpt-4o", **calls, **tokens).model_dump(mode="json")
        for number in (2, 3, 4)
    ]
    project = open_project(shop)
    with project.open() as work:
        entry = work.ledger.get("audit")
        work.ledger.put(
            "audit", fingerprint="a", output={**entry.output, "usage": days}, finished_at="x", seconds=1
        )
    with serve(shop) as served:
        text = text_of(served.visitor.get("/parts/savings").text)
    assert "The small model saves $" in text
    assert "a month at least at most" in text.lower()
    assert "interval of the mean over 3 days" in text
    assert "Price of gpt-4o" in text
