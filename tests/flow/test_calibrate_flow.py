"""`graft eval calibrate` with a stand-in judge behind HTTP, on people's scores and corrections."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from graftwork.api.project import open_project
from graftwork.data.review import gather_labels
from graftwork.evaluate.project import doubts_about_judge
from graftwork.records.dataset import ReviewDecision, ReviewItem
from graftwork.records.errors import UserError
from graftwork.records.interaction import Capture, Feedback, Message
from graftwork.store.captures import FeedbackStore, ReviewStore


@pytest.fixture
def judge():
    """Marks answers that mention a pond as good, prefers them in pairs, and counts its questions."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = body["messages"][1]["content"]
            asked.append(text)
            last = text.rpartition("Answer:")[2]
            said = {"reason": "r", "mark": 5 if "pond" in last else 1}
            if "Answer B:" in text:
                before, _, behind = text.partition("Answer B:")
                said = {
                    "reason": "r",
                    "winner": "B" if "pond" in behind else "A" if "pond" in before else "tie",
                }
            reply = {"choices": [{"message": {"content": json.dumps(said)}, "finish_reason": "stop"}]}
            data = json.dumps(reply | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()


def capture(number, reply):
    return Capture(
        id=f"c{number}",
        at="2026-11-01T00:00:00Z",
        session=f"s{number}",
        model="champion",
        release="r",
        request={"messages": [{"role": "user", "content": f"Where is plant {number}?"}]},
        reply=reply,
        finish_reason="stop",
        prompt_tokens=1,
        reply_tokens=1,
        first_token_ms=None,
        total_ms=1.0,
    )


def fill(project, count):
    """Half of the answers are good; of the others every second one was corrected."""
    with project.open() as work:
        store = FeedbackStore(work.database, project=work.settings.project)
        for number in range(count):
            good = number % 2 == 0
            # Of answers of all lengths: what length explains does not count.
            length = " as far as I know" * (number % 3)
            work.captures.add([capture(number, f"{'By the pond' if good else 'Nowhere at all'}{length}.")])
            fixed = "By the small pond." if number % 4 == 3 else None
            store.add(
                Feedback(capture=f"c{number}", at="2026-11-02T00:00:00Z", score=float(good), correction=fixed)
            )


def test_a_judge_that_agrees_with_people_counts_in_the_gate_and_is_asked_once(
    small_project, change_settings, judge, listener
):
    url, asked = judge
    settings = {"url": url, "model": "stand-in", "modes": ["pointwise", "pairwise"], "min_labels": 10}
    change_settings(
        small_project,
        evaluate={"judge": settings},
        gate={"rules": [{"metric": "judge_score", "over": 0.5}], "primary": "none"},
    )
    project = open_project(small_project, reporter=listener)
    fill(project, 80)
    with project.open() as work:
        assert "graft eval calibrate" in doubts_about_judge(work)["judge_score"]
    found = project.calibrate()
    by_mode = {made.mode: made for made in found.modes}
    # Eighty answers with feedback, and twenty corrections, each with the pair that it makes.
    assert by_mode["pointwise"].labels == 100
    assert by_mode["pointwise"].kappa.value == 1.0
    assert by_mode["pairwise"].labels == 20
    assert found.sufficient
    questions = len(asked)
    project.calibrate()
    assert len(asked) == questions
    with project.open() as work:
        assert doubts_about_judge(work) == {}
    change_settings(small_project, evaluate={"judge": settings | {"rubric": "Another one."}})
    with open_project(small_project, reporter=listener).open() as work:
        assert "judge_score" in doubts_about_judge(work)


def test_reviews_of_rows_and_each_person_who_disagrees_are_labels(
    small_project, change_settings, judge, listener
):
    url, _ = judge
    settings = {"url": url, "model": "stand-in", "modes": ["pointwise", "pairwise"], "min_labels": 2}
    change_settings(small_project, evaluate={"judge": settings})
    project = open_project(small_project, reporter=listener)
    turns = (Message(role="user", content="Where is the frog?"),)
    with project.open() as work:
        work.captures.add([capture(1, "By the pond.")])
        store = FeedbackStore(work.database, project=work.settings.project)
        for who, score, day in (("ada", 1.0, 1), ("bob", 1.0, 2), ("bob", 0.0, 3)):
            store.add(Feedback(capture="c1", at=f"2026-11-0{day}", score=score, who=who))
        reviews = ReviewStore(work.database, project=work.settings.project)
        for key, action, edited in (
            ("a", "accept", None),
            ("b", "edit", "In the pond."),
            ("c", "skip", None),
        ):
            item = ReviewItem(key=key, kind="row", messages=turns, reply=f"Away {key}.", reasons={})
            reviews.add(ReviewDecision(item=item, action=action, who="ada", at="2026-11-04", reply=edited))
        before = gather_labels(work)
    answers = {(label.case.messages[-1].content, label.text, label.good) for label in before[0]}
    assert {found for found in answers if "frog" in found[0] or "plant 1?" in found[0]} == {
        ("Where is plant 1?", "By the pond.", True),
        ("Where is plant 1?", "By the pond.", False),  # the last that bob said
        ("Where is the frog?", "Away a.", True),
        ("Where is the frog?", "Away b.", False),
        ("Where is the frog?", "In the pond.", True),
    }
    assert ("In the pond.", "Away b.") in [(pair.preferred, pair.other) for pair in before[1]]
    found = {made.mode: made for made in project.calibrate().modes}
    assert found["pointwise"].labels == len(before[0])
    assert found["pairwise"].labels == len(before[1])


def test_without_a_judge_there_is_nothing_to_calibrate(small_project, listener):
    with pytest.raises(UserError, match="does not configure a judge"):
        open_project(small_project, reporter=listener).calibrate()
