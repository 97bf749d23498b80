"""The events of a run: all that its files hold, by time, each reported once."""

import json

from graftwork.files.disk import Journal
from graftwork.train.runs import Events


def write(folder, name, *lines):
    for line in lines:
        Journal(folder / name).append(line)


def step(number, at):
    return {"step": number, "loss": 1.0, "seconds": 1.0, "at": at}


def test_events_of_all_files_come_in_the_order_of_time(tmp_path):
    write(tmp_path, "steps.jsonl", step(1, 10.0), step(2, 20.0), step(3, 30.0))
    write(tmp_path, "messages.jsonl", {"message": "resuming", "at": 5.0}, {"message": "no time of its own"})
    write(tmp_path, "saved.jsonl", {"at": 21.0, "step": 2, "folder": "step-2"})
    write(
        tmp_path,
        "evaluations.jsonl",
        {"evaluation": {"step": 2, "metric": "loss", "value": 0.5}, "of": [2, 1.0, ""]},
    )
    write(tmp_path, "vitals.jsonl", {"at": 12.0, "memory_gib": 1.0})
    write(tmp_path, "alerts.jsonl", {"at": 25.0, "kind": "stalled", "what": "it is stuck"})
    reported = [(event.kind, event.at) for event in Events(tmp_path).new()]
    assert reported == [
        ("message", 5.0),
        ("message", 5.0),
        ("step", 10.0),
        ("machine", 12.0),
        ("step", 20.0),
        ("evaluation", 20.0),
        ("checkpoint", 21.0),
        ("alert", 25.0),
        ("step", 30.0),
    ]


def test_only_what_is_new_is_reported_and_a_line_in_the_making_waits(tmp_path):
    events = Events(tmp_path)
    assert events.new() == []
    write(tmp_path, "steps.jsonl", step(1, 1.0))
    (tmp_path / "worker.log").write_bytes(b"a whole line\nhalf a li")
    assert [event.kind for event in events.new()] == ["step", "output"]
    assert events.new() == []
    with (tmp_path / "worker.log").open("ab") as log:
        log.write(b"ne\n")
    assert [event.body for event in events.new()] == [{"text": "half a line"}]


def test_an_alert_keeps_its_own_kind_next_to_that_of_the_event(tmp_path):
    write(tmp_path, "alerts.jsonl", {"at": 1.0, "kind": "stalled", "what": "it is stuck"})
    (event,) = Events(tmp_path).new()
    output = json.loads(json.dumps(event.as_json()))
    assert (output["kind"], output["alert"]) == ("alert", "stalled")
