"""Events: a change is reported, a browser that comes back misses nothing, streams end with their reader."""

import http.client
from random import Random

import pytest
from served_page import serve
from web_project import make_step

from graftwork.api.overview import mark_project
from graftwork.api.project import open_project
from graftwork.web.runs import MOST_CURVE_POINTS, to_columns


class Stream:
    """A reader of /events: of what comes after `last_event`, as a page asks, or after the server looks."""

    def __init__(self, served, last_event: str = "") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
        headers = {"cookie": served.cookie, "last-event-id": last_event}
        self.connection.request("GET", "/events", headers=headers)
        self.answer = self.connection.getresponse()

    def next_event(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while True:
            line = self.answer.fp.readline().decode().strip()
            if line.startswith(("id:", "event:", "data:")):
                name, _, value = line.partition(": ")
                found[name] = value
            elif not line and "event" in found:
                return found

    def close(self) -> None:
        self.connection.close()


def change(folder, text="a note"):
    with open_project(folder).open() as work:
        release = work.releases.entries()[0]
        work.releases.note(release.id, text, who="ada", when="2026-11-16T10:00:00+00:00")


@pytest.fixture
def watched(shop):
    with serve(shop) as served:
        served.folder = shop
        served.visitor.get("/")
        served.mark = mark_project(open_project(shop))
        yield served


def test_a_change_of_the_database_reaches_every_stream(watched):
    streams = [Stream(watched, last_event=watched.mark) for _ in range(3)]
    assert streams[0].answer.getheader("content-type").startswith("text/event-stream")
    change(watched.folder)
    events = [stream.next_event() for stream in streams]
    assert {event["event"] for event in events} == {"graft:change"}
    for stream in streams:
        stream.close()


def test_a_browser_that_comes_back_to_a_new_server_gets_what_it_missed(watched, shop):
    stream = Stream(watched, last_event=watched.mark)
    change(shop)
    seen = stream.next_event()["id"]
    stream.close()
    change(shop, "another")
    with serve(shop) as restarted:
        stream = Stream(restarted, last_event=seen)
        assert stream.next_event()["id"] != seen
        stream.close()


def test_reading_a_page_is_not_a_change(watched):
    watched_project = open_project(watched.folder)
    watched.visitor.get("/")
    before = mark_project(watched_project)
    for path in ("/", "/runs", "/releases", "/captures"):
        watched.visitor.get(path)
    assert mark_project(watched_project) == before


def test_a_step_of_a_running_job_is_a_change(shop):
    watched_project = open_project(shop)
    before = mark_project(watched_project)
    run = sorted((shop / ".graft" / "runs").iterdir(), key=lambda path: path.stat().st_mtime)[-1]
    with (run / "steps.jsonl").open("a") as journal:
        journal.write("{}\n")
    assert mark_project(watched_project) != before


def test_the_server_stops_while_streams_are_open(shop):
    with serve(shop) as served:
        streams = [Stream(served) for _ in range(5)]
    assert not served.thread.is_alive()
    for stream in streams:
        stream.close()


def test_too_many_streams_are_refused(shop, monkeypatch):
    from graftwork.web import app

    monkeypatch.setattr(app, "MOST_STREAMS", 1)
    with serve(shop) as served:
        first = Stream(served)
        first.answer.fp.readline()
        second = Stream(served)
        assert second.answer.status == 503
        first.close()
        second.close()


def test_new_steps_of_a_curve_are_those_after_the_last(page, made_project):
    import json

    with open_project(made_project).open() as work:
        run = work.runs.list(limit=1)[0]
    whole = json.loads(page.visitor.get(f"/runs/{run.id}/curve.json").text)
    rest = json.loads(page.visitor.get(f"/runs/{run.id}/curve.json?after=70").text)
    assert len(whole["step"]) == 72
    assert rest["step"] == [71, 72]
    assert rest["loss"] == whole["loss"][-2:]
    assert rest["validation"] == whole["validation"], "an evaluation may end after its step was sent"


def test_a_long_curve_keeps_its_skipped_and_its_evaluated_steps():
    random = Random(0)
    steps = [make_step(number, random, 0.0) for number in range(1, 10 * MOST_CURVE_POINTS)]
    steps[102] = steps[102].model_copy(update={"skipped": True})
    columns = to_columns(steps, keep={200})
    assert len(columns["step"]) <= 2 * MOST_CURVE_POINTS
    assert {103.0, 200.0} <= {*columns["step"]}
    assert dict(zip(columns["step"], columns["skipped"], strict=True))[103.0] == 1.0
    assert sum(columns["skipped"]) == 1
