"""Actions: off unless allowed, done as the command does them, logged with who and why."""

import json
import re
import urllib.error
import urllib.request
from html import unescape

import pytest
import yaml
from served_page import Visitor

from free_ports import free_port
from graftwork.api.endpoint import list_captures, read_capture, read_chat_example, read_playground
from graftwork.api.project import open_project
from graftwork.records.errors import UserError


def log_of(folder):
    path = folder / ".graft" / "web" / "actions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def aliases(folder):
    with open_project(folder).open() as work:
        return work.releases.aliases(), work.releases.alias_log("champion")


@pytest.mark.parametrize(
    "name",
    ["rollback", "promote", "verify", "stop", "run", "stop-job", "predict-escalation", "apply-reviews"],
)
def test_without_allow_actions_nothing_is_done_and_the_page_says_so(page, made_project, name):
    before = aliases(made_project)
    fields = {"reason": "x", "alias": "champion", "release": "0"}
    answer = page.visitor.post(f"/actions/{name}", **fields)
    assert answer.status == 409
    assert "--allow-actions" in answer.text
    assert aliases(made_project) == before
    assert page.visitor.post("/review/decide", action="accept", key="x").status == 409
    assert page.visitor.post("/playground", prompt="x", left="champion").status == 409
    assert page.visitor.post("/playground/rate", capture="x", score="1").status == 409
    assert page.visitor.post("/fleet/offers").status == 409
    assert not log_of(made_project)


def test_a_rollback_moves_the_alias_and_is_logged_with_who_and_why(acting):
    now, moves = aliases(acting.folder)
    visitor = Visitor(acting.base, acting.cookie + "; graft_who=ada%20l")
    answer = visitor.post("/actions/rollback", alias="champion", reason="answers nonsense")
    assert answer.status == 303
    assert answer.headers["location"].startswith("/releases?notice=")
    then, moves = aliases(acting.folder)
    assert then["champion"] != now["champion"]
    assert (moves[-1].who, moves[-1].why, moves[-1].rollback) == ("ada l", "answers nonsense", True)
    (line,) = log_of(acting.folder)
    assert (line["who"], line["why"], line["action"]) == ("ada l", "answers nonsense", "rollback")
    assert line["command"] == "graft release rollback --alias champion --reason 'answers nonsense'"
    assert "answers nonsense" in acting.visitor.get("/actions").text


def test_a_rollback_of_a_page_that_is_out_of_date_is_refused(acting):
    text = acting.visitor.get("/").text
    shown = {name: re.search(f'name="{name}" value="([^"]+)"', text)[1] for name in ("alias", "from", "to")}
    before = aliases(acting.folder)
    old = {**shown, "from": shown["to"]}
    assert acting.visitor.post("/actions/rollback", reason="x", **old).status == 409
    assert aliases(acting.folder) == before
    assert acting.visitor.post("/actions/rollback", reason="x", **shown).status == 303


def test_what_cannot_be_done_is_refused_and_changes_nothing(acting):
    before = aliases(acting.folder)
    with open_project(acting.folder).open() as work:
        ended = next(run.id for run in work.runs.list() if run.state != "running")
    for name, fields, status in (
        ("run", {f"f{n}": "x" for n in range(60)}, 400),
        ("run", {"reason": "x" * 2_000_000}, 404),
        ("format-disk", {"reason": "x"}, 404),
        ("rollback", {"alias": "champion"}, 404),
        ("rollback", {"alias": "champion", "reason": "  "}, 404),
        ("stop", {"reason": "enough", "run": ended}, 409),
    ):
        assert acting.visitor.post(f"/actions/{name}", **fields).status == status, (name, status)
    assert acting.visitor.post("/actions/rollback", alias="nobody", reason="x").status == 404
    assert log_of(acting.folder)[-1]["outcome"].startswith("refused: ")
    answer = acting.visitor.post("/actions/stop", reason="enough")
    assert "nothing+is+running" in answer.headers["location"]
    assert aliases(acting.folder) == before


def test_promote_and_verify_do_what_the_commands_do(acting):
    now, _ = aliases(acting.folder)
    answer = acting.visitor.post(
        "/actions/promote", release=now["champion"], alias="challenger", reason="canary"
    )
    assert answer.status == 303
    assert aliases(acting.folder)[0]["challenger"] == now["champion"]
    answer = acting.visitor.post("/actions/verify", release=now["champion"])
    assert "verified" in answer.headers["location"]


@pytest.fixture
def never(monkeypatch):
    """What must not be started: the list of what was."""
    from graftwork.api import fleet
    from graftwork.api.project import Project

    started = []

    def start(*_arguments, **named):
        started.append(named)
        raise UserError("started")

    monkeypatch.setattr(Project, "predict_escalation", start)
    monkeypatch.setattr(fleet, "list_offers", start)
    return started


def test_a_get_of_escalation_or_offers_starts_nothing(acting, never):
    state = acting.folder / ".graft" / "escalation.json"
    before = state.read_bytes() if state.exists() else None
    outside = "https://evil.example/v1%23m,key=HF_TOKEN"
    for path in (
        "/evaluation/escalation?go=1",
        f"/evaluation/escalation?go=1&small=base&large={outside}",
        "/fleet/offers",
        "/fleet/offers?go=1",
    ):
        assert acting.visitor.get(path).status == 200
    assert acting.visitor.get("/actions/predict-escalation").status == 405
    assert not never
    assert (state.read_bytes() if state.exists() else None) == before
    assert not log_of(acting.folder)


def test_escalation_refuses_urls_and_folders_that_graft_yaml_does_not_name(acting, never):
    name_subject(acting.folder, "https://named.example/v1#m,key=NAMED_KEY")
    for subject in (
        "https://evil.example/v1#m,key=HF_TOKEN",
        "http://127.0.0.1:9/v1#m",
        " https://named.example/v1#m,key=HF_TOKEN",
        "adapter:/tmp/anything",
        "engine:llamacpp@adapter:/tmp/anything",
    ):
        for fields in ({"large": subject}, {"small": subject}):
            answer = acting.visitor.post("/actions/predict-escalation", **fields)
            assert answer.status == 409
            assert "evaluate.subjects" in answer.text
        assert not never
        assert log_of(acting.folder)[-1]["outcome"].startswith("refused: ")


def test_escalation_asks_what_graft_yaml_names_and_is_logged(acting, never):
    named = "https://named.example/v1#m,key=NAMED_KEY"
    name_subject(acting.folder, named)
    acting.visitor.post("/actions/predict-escalation", large=named, small="base")
    assert never == [{"large": named, "small": "base"}]
    (line,) = log_of(acting.folder)
    assert line["action"] == "predict-escalation"
    assert line["command"] == f"graft eval escalation --small base --large '{named}'"


def name_subject(folder, subject):
    settings = yaml.safe_load((folder / "graft.yaml").read_text())
    settings.setdefault("evaluate", {})["subjects"] = ["base", subject]
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))


def test_offers_are_asked_for_by_a_post_and_logged(acting, monkeypatch):
    from graftwork.api import fleet
    from graftwork.fleet.jobs import RunOffers

    monkeypatch.setattr(
        fleet, "list_offers", lambda _work: RunOffers(planned_hours=2, quotes=(), notes=("a note",))
    )
    answer = acting.visitor.post("/fleet/offers")
    assert answer.status == 200
    assert "a note" in answer.text
    assert log_of(acting.folder)[-1]["command"] == "graft fleet offers --run"


def key_of(text):
    return re.search(r'name="key" value="([^"]+)"', text)[1]


def test_a_review_shows_the_next_row_by_itself_and_no_row_twice(acting):
    seen = []
    for _ in range(4):
        key = key_of(acting.visitor.get("/review").text)
        assert key not in seen
        seen.append(key)
        assert acting.visitor.post("/review/decide", key=key, action="accept").status == 303
    last = acting.visitor.post("/review/decide", action="undo")
    assert "taken+back" in last.headers["location"]
    assert key_of(acting.visitor.get("/review").text) == seen[-1]


def test_an_edit_must_change_the_answer_and_becomes_a_pair_when_applied(acting):
    text = acting.visitor.get("/review").text
    key = key_of(text)
    assert "becomes a training row" in text
    reply = re.search(r"<textarea[^>]*>([^<]*)</textarea>", text)[1]
    assert acting.visitor.post("/review/decide", key=key, action="edit", reply=reply).status == 404
    answer = acting.visitor.post("/review/decide", key=key, action="edit", reply="x" * 100_001)
    assert answer.status == 404
    assert "too long" in answer.text
    assert key_of(acting.visitor.get("/review").text) == key
    answer = acting.visitor.post("/review/decide", key=key, action="edit", reply="By the pond, since 1903.")
    assert answer.status == 303
    answer = acting.visitor.post("/actions/apply-reviews")
    assert answer.status == 303
    corrected = [given.corrected for given in open_project(acting.folder).corrections().corrections]
    reviewed = list((acting.folder / "logs").glob("reviewed.jsonl"))
    assert "By the pond, since 1903." in corrected or reviewed


def test_two_reviewers_at_once_are_shown_different_rows_and_decide_each_once(acting):
    ada, bob = (Visitor(acting.base, f"{acting.cookie}; graft_who={name}") for name in ("ada", "bob"))
    first, second = key_of(ada.get("/review").text), key_of(bob.get("/review").text)
    assert first != second
    assert key_of(ada.get("/review").text) == first
    assert key_of(bob.get("/review").text) == second
    assert "accepted" in ada.post("/review/decide", key=first, action="accept").headers["location"]
    assert key_of(ada.get("/review").text) not in (first, second)
    assert "another+reviewer" in bob.post("/review/decide", key=first, action="reject").headers["location"]


def test_a_row_that_a_reviewer_left_is_shown_to_others_after_a_while(acting, monkeypatch):
    from graftwork.api import datasets

    ada, bob = (Visitor(acting.base, f"{acting.cookie}; graft_who={name}") for name in ("ada", "bob"))
    first = key_of(ada.get("/review").text)
    assert key_of(bob.get("/review").text) != first
    monkeypatch.setattr(datasets, "HOLD_SECONDS", 0.0)
    assert key_of(bob.get("/review").text) == first


def test_the_name_of_a_visitor_is_kept_and_the_way_back_stays_on_the_page(acting):
    answer = acting.visitor.post("/who", who="Grace <b>", back="/runs")
    assert answer.headers["location"] == "/runs"
    assert "samesite=strict" in answer.headers["set-cookie"].lower()
    for back in ("//evil.example", "/\\evil.example", "https://evil.example", ""):
        assert acting.visitor.post("/who", who="x", back=back).headers["location"] == "/"


def test_the_playground_says_that_nothing_answers(acting):
    settings = acting.folder / "graft.yaml"
    settings.write_text(settings.read_text() + f"serve: {{port: {free_port()}}}\n")
    assert "No endpoint is served at" in acting.visitor.get("/playground").text
    outside = "https://evil.example/v1#m,key=HF_TOKEN"
    answer = acting.visitor.post("/playground", prompt="hello <b>", left="nobody", right=outside)
    assert answer.status == 200
    assert answer.text.count("nothing answers as") == 2
    assert "hello &lt;b&gt;" in answer.text


def test_the_playground_offers_what_can_be_asked_and_fills_in_a_held_out_case(acting):
    settings = acting.folder / "graft.yaml"
    settings.write_text(settings.read_text() + f"serve: {{port: {free_port()}}}\n")
    project = open_project(acting.folder)
    case = read_chat_example(project, 2)
    shown = unescape(acting.visitor.get("/playground?example=2&right=base").text)
    assert case.messages[-1].content in shown
    assert '<option value="base" selected>' in shown
    choices = read_playground(project)
    assert {choice.kind for choice in choices.subjects} >= {"run", "release", "base"}
    assert choices.served is None
    for choice in choices.subjects:
        assert f'value="{choice.name}"' in shown
    assert acting.visitor.get("/playground?example=100000").status == 404


def test_a_thumb_is_feedback_on_the_capture(acting):
    project = open_project(acting.folder)
    capture = list_captures(project)[0].items[0].id
    before = len(read_capture(project, capture)[1])
    visitor = Visitor(acting.base, acting.cookie + "; graft_who=ada")
    answer = visitor.post("/playground/rate", capture=capture, score="0", note="the date is wrong")
    assert answer.headers["location"].startswith(f"/captures/{capture}")
    kept = read_capture(project, capture)[1]
    assert (len(kept), kept[-1].score, kept[-1].comment) == (before + 1, 0.0, "the date is wrong")
    assert kept[-1].who == "ada"
    line = log_of(acting.folder)[-1]
    assert (line["who"], line["action"]) == ("ada", "rate")
    assert acting.visitor.post("/playground/rate", capture="f" * 32, score="1").status == 404


def test_the_cycle_is_approved_paused_and_canceled_with_name_and_reason(acting):
    visitor = acting.visitor
    assert visitor.post("/actions/cycle-approve", cycle="3", step="promote", reason="seen").status == 409
    done = visitor.post("/actions/cycle-approve", cycle="4", step="promote", reason="seen")
    assert done.status == 303
    assert "Promote waits for your approval" not in visitor.get("/cycle").text
    assert visitor.post("/actions/cycle-pause", reason="the card is needed").status == 303
    assert "paused by" in visitor.get("/cycle").text
    assert visitor.post("/actions/cycle-resume", reason="it is free").status == 303
    assert visitor.post("/actions/cycle-cancel", cycle="4", reason="wrong data").status == 303
    assert visitor.post("/actions/cycle-cancel", cycle="4", reason="again").status == 409
    log = visitor.get("/actions").text
    assert "graft up approve promote --reason seen" in log
    assert "wrong data" in log


def test_a_release_is_exported_and_can_be_downloaded(acting):
    release = aliases(acting.folder)[0]["champion"]
    assert acting.visitor.get(f"/releases/{release}/archive").status == 404
    done = acting.visitor.post("/actions/export", release=release)
    assert done.status == 303
    assert f"/releases/{release}/archive" in acting.visitor.get(f"/releases/{release}").text
    [archive] = acting.folder.glob("*.tar")
    assert archive.stat().st_size > 1000


def test_a_refused_action_leads_back_to_the_page_it_came_from(acting):
    for referer, leads_to in (
        (f"{acting.base}/runs?state=done", "/runs?state=done"),
        ("https://elsewhere.example/x", "/"),
        (f"{acting.base}//elsewhere.example/x", "/elsewhere.example/x"),
        ("", "/"),
    ):
        headers = {"cookie": acting.cookie, "origin": acting.base, "referer": referer}
        request = urllib.request.Request(
            f"{acting.base}/actions/rollback", data=b"alias=champion&reason=", headers=headers
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=300)
        text = refused.value.read().decode()
        assert "the reason is missing" in text.lower()
        assert f'<a class="button" href="{leads_to}">' in text
