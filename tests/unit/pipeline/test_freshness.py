"""What `graft status` says of each step: fresh, stale since which change, or missing; and what comes next."""

import http.server
import json
import threading
from dataclasses import replace

import pytest
import yaml

from free_ports import free_port
from graftwork.pipeline import table
from graftwork.pipeline.status import ask_endpoint, examine_steps, project_status, require_fresh
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps import plan
from graftwork.process.worker import hold_lock
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.base import Record
from graftwork.records.errors import Stale
from graftwork.serve.settings import ServeSettings


class Result(Record):
    message: str


class Project:
    """A project of three steps that only note that they were done."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.done, self.there = folder, [], True
        self.log = "a" * 64
        prepare = PipelineStep(
            "prepare",
            "make data",
            (),
            Result,
            lambda work, _made: self._inputs(work),
            self._do("prepare"),
            still_there=lambda _work, _output: self.there,
            input_names=("data", "log file"),
        )
        train = PipelineStep(
            "train", "train", ("prepare",), Result, lambda _work, _made: None, self._do("train")
        )
        gate = PipelineStep("gate", "judge", ("train",), Result, lambda work, _made: None, self._do("gate"))
        steps = (prepare, train, gate)
        monkeypatch.setattr(table, "STEPS", steps)
        self.write()

    def write(self, **data):
        settings = {"project": "p", "base": ".", "data": {"logs": ["log.jsonl"], **data}}
        (self.folder / "graft.yaml").write_text(yaml.safe_dump(settings))

    def run(self, upto=None):
        with use_project(open_project(self.folder), NullReporter()) as work:
            table.run_pipeline(work, upto=upto)

    def states(self, upto=None):
        with use_project(open_project(self.folder), NullReporter()) as work:
            return {state.step: (state.state, state.because) for state in examine_steps(work, upto=upto)}

    def _inputs(self, work):
        return [work.settings.data.to_manifest(), {"log.jsonl": self.log}]

    def _do(self, name):
        def do(work, made):
            self.done.append(name)
            before = "".join(output.message for output in made.outputs.values())
            return Result(message=f"{name} of {work.settings.data.test} {self.log[:4]} {before}")

        return do


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.pipeline.step.is_ready", lambda _base, **_more: True)
    return Project(tmp_path, monkeypatch)


def test_before_anything_was_done_all_steps_are_missing_and_asking_does_none(project):
    assert {state for state, _ in project.states().values()} == {"missing"}
    assert project.done == []


def test_a_finished_step_is_up_to_date(project):
    project.run()
    assert set(project.states().values()) == {("fresh", ())}


def test_a_changed_setting_is_named_with_both_values_and_what_follows_is_stale_for_it(project):
    project.run()
    project.write(test=0.3)
    states = project.states()
    assert states["prepare"] == ("stale", ("data.test was 0.2 and is 0.3",))
    assert states["train"] == ("stale", ("`prepare` has to be done before it",))
    assert states["gate"] == ("stale", ("`train` has to be done before it",))
    assert project.done == ["prepare", "train", "gate"]


def test_what_another_version_stored_is_done_again(project, monkeypatch):
    project.run()

    class Renamed(Record):
        text: str

    first, *others = table.STEPS
    renamed = replace(first, makes=Renamed, do=lambda _work, _made: Renamed(text="x"), needs=())
    monkeypatch.setattr(table, "STEPS", (renamed, *others))
    assert project.states("prepare")["prepare"] == ("stale", ("it was done by another version of graftwork",))
    project.run(upto="prepare")
    assert project.states("prepare")["prepare"] == ("fresh", ())


def test_a_changed_log_file_is_named(project):
    project.run()
    project.log = "b" * 64
    assert project.states()["prepare"] == ("stale", ("log file.log.jsonl has changed",))


def test_many_changes_are_counted_and_lost_files_are_reported(project):
    project.run()
    project.write(test=0.3, validation=0.2, seed=3, max_tokens=99, redact=False)
    assert project.states()["prepare"][1][-1] == "and 2 more changes"
    project.write()
    project.there = False
    assert project.states()["prepare"] == ("stale", ("its files are gone",))


def test_another_result_of_a_step_before_is_named_once_that_is_done(project):
    project.run()
    project.write(test=0.3)
    project.run(upto="prepare")
    assert project.states()["train"] == ("stale", ("`prepare` made another result",))


def test_requiring_fresh_names_what_is_stale_and_the_command_that_updates_it(project):
    project.run()
    project.write(test=0.3)
    with use_project(open_project(project.folder), NullReporter()) as work, pytest.raises(Stale) as refused:
        require_fresh(work, upto="gate", update="graft gate --update")
    assert "data.test was 0.2 and is 0.3" in refused.value.why
    assert "`graft gate --update` does them first" in refused.value.fix
    assert len(project.done) == 3


def test_the_next_run_is_foreseen_with_its_steps_and_their_time(project):
    project.run()
    project.write(test=0.3)
    with use_project(open_project(project.folder), NullReporter()) as work:
        coming = project_status(work).next
    assert coming.steps == ("prepare", "train", "gate")
    assert coming.seconds is not None
    assert coming.seconds >= 0


def test_the_first_open_step_is_running_while_another_process_works(project):
    project.run(upto="prepare")
    with (
        hold_lock(project.folder / ".graft" / "pipeline"),
        use_project(open_project(project.folder), NullReporter()) as work,
    ):
        found = project_status(work)
    assert [(step.step, step.state) for step in found.steps] == [
        ("prepare", "fresh"),
        ("train", "running"),
        ("gate", "missing"),
    ]
    assert found.next.steps == ("gate",)


class Answer(http.server.BaseHTTPRequestHandler):
    reply: tuple[int, bytes]

    def do_GET(self):
        self.send_response(self.reply[0])
        self.end_headers()
        self.wfile.write(self.reply[1])

    def log_message(self, *_words):
        return


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (200, json.dumps({"status": "ok", "engine": {"reason": ""}, "aliases": {"champion": "r"}}), "ok"),
        (503, json.dumps({"status": "starting"}), "starting"),
        (200, "<html>", "other"),
        (404, "[]", "other"),
    ],
)
def test_the_endpoint_is_asked_how_it_is(status, body, state):
    assert ask_one_that_answers(status, body).state == state


def ask_one_that_answers(status, body):
    handler = type("Fixed", (Answer,), {"reply": (status, body.encode())})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = ask_endpoint(ServeSettings(port=server.server_port))
        thread.join()
    return found


def test_the_status_names_replicas_that_are_down_and_releases_that_are_refused():
    engine = {"reason": "", "replicas": [{"state": "ready"}, {"state": "down"}]}
    refused = {"f" * 12: "release ffffffffffff was trained with a different chat template"}
    found = ask_one_that_answers(200, json.dumps({"status": "ok", "engine": engine, "refused": refused}))
    assert found.state == "ok"
    assert found.reason == f"1 of 2 replicas answer; {refused['f' * 12]}"


def test_where_nothing_listens_the_endpoint_is_off_and_the_reason_says_how_to_start_it():
    found = ask_endpoint(ServeSettings(port=free_port()))
    assert found.state == "off"
    assert "graft serve" in found.reason
    assert ask_endpoint(ServeSettings(port=0)).state == "unknown"


def test_a_step_after_training_does_not_import_what_workers_need(project, monkeypatch):
    warmed = []
    monkeypatch.setattr(
        "graftwork.process.local_workers.LocalWorkers.warm_up", lambda _workers, **_: warmed.append(1)
    )
    project.run(upto="train")
    assert warmed
    warmed.clear()
    project.run(upto="gate")
    assert (project.done, warmed) == (["prepare", "train", "gate"], [])


def test_a_changed_reward_is_named_as_a_setting_of_training(tmp_path):
    def inputs(**reward):
        train = {"objective": "grpo", "rewards": [{"metric": "task_success", **reward}]}
        settings = {"project": "p", "base": ".", "data": {"logs": ["log.jsonl"]}, "train": train}
        (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
        with use_project(open_project(tmp_path), NullReporter()) as work:
            return plan.STEP.inputs_of(work, StepOutputs({}), {"prepare": "x"})

    changes = inputs(weight=0.5).changes_since(inputs(weight=1.0).parts)
    assert changes
    assert all(change.startswith("train.rewards") for change in changes)
