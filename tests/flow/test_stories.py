"""Logs as agents leave them, with what `graft init` writes: trained on, served, captured, trained on again.

With a tiny random base, which learns nothing, and in the slow tests with the embedded one, which is trained
on what was captured too. The verdict to deploy is given in place of one that says otherwise.
"""

import json
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from flows import graft_json, opened, start_graft
from openai import OpenAI
from story_logs import STORIES

from graftwork.data.project import PreparedData
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.project import Evaluated
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.files.dataset import iterate_drops, iterate_rows
from graftwork.grading.checks import grade
from graftwork.grading.interface import GradeContext
from graftwork.model.base import EMBEDDED
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.evaluate import load_cases
from graftwork.pipeline.table import dry_run, finish_run, run_pipeline
from graftwork.project.init import start_project
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.text.tool_calls import read_calls
from graftwork.train.objectives.epochs import choose_training_rows, plan_steps
from graftwork.train.run_folder import read_steps

MINUTE = 60.0
BASES = [
    pytest.param("tiny", id="tiny"),
    pytest.param("embedded", id="embedded", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


def all_rows(made: StepOutputs, *splits):
    folder = Path(made.get("prepare", PreparedData).folder)
    return [row for split in splits or ("train", "validation", "test") for row in iterate_rows(folder, split)]


def require_each_row_kept_or_named(folder: Path, made: StepOutputs) -> None:
    """Every line of the logs is in a split, or left out with its reason."""
    dataset = Path(made.get("prepare", PreparedData).folder)
    kept = [(row.origin.file, row.origin.line) for row in all_rows(made)]
    dropped = {(drop.origin.file, drop.origin.line): drop.reason for drop in iterate_drops(dataset)}
    lines = {
        (str(path.relative_to(folder)), line + 1)
        for path in (folder / "logs").iterdir()
        for line in range(len(path.read_text().splitlines()))
    }
    assert {*kept, *dropped} == lines
    assert all(dropped.values())


def require_refusals_in_each_epoch(work, made: StepOutputs, refusals) -> None:
    """Each refusal of the training split is in a good step of each epoch, by the journal of the steps."""
    settings = work.settings.train
    rows = choose_training_rows(all_rows(made, "train"), settings=settings)
    steps = plan_steps(rows, settings=settings)
    journal = read_steps(Path(made.get("train", TrainOutcome).adapter_folder).parent)
    assert [step.step for step in journal] == list(range(1, len(steps) + 1))
    assert not any(step.skipped for step in journal)
    visits = [rows[at].reply for batch in steps for at in batch]
    learned = {reply: visits.count(reply) for reply in refusals if reply in {row.reply for row in rows}}
    assert bool(learned) == bool(refusals)
    assert set(learned.values()) <= {settings.epochs}


def same_order(reference: str, answer: str) -> float:
    """All of the order equals the reference as JSON; of texts, the words."""

    def plain(value):
        if isinstance(value, str):
            return re.sub(r"\W+", " ", value.casefold()).strip()
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    try:
        return float(plain(json.loads(reference)) == plain(json.loads(answer)))
    except ValueError:
        return 0.0


def same_calls(reference: str, answer: str) -> float:
    """The same tools with the same arguments; spaces of a query and the case of `select` do not count."""

    def plain(text):
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return [json.loads(re.sub(r"\s+", " ", call).replace("select ", "SELECT ")) for call in calls]

    try:
        return float(plain(reference) == plain(answer))
    except ValueError:
        return 0.0


def same_text(reference: str, answer: str) -> float:
    return float(reference == answer)


BY_HAND = {"sql agent": same_calls, "extraction": same_order, "german chat": same_text}


def changed_answers(reference: str) -> list[str]:
    """The reference with one thing changed, each time another."""
    changes = (
        (" > ", " < "),
        ("COUNT(*)", "COUNT"),
        ("run_sql", "open_ticket"),
        ("null", '"x"'),
        ("20", "21"),
    )
    changed = [reference.replace(*change, 1) for change in changes]
    return [text for text in (*changed, "", reference[: len(reference) // 2]) if text != reference]


def require_primary_as_by_hand(work, made: StepOutputs, check) -> None:
    """The primary metric grades as a person would: what base and adapter answered, the answers of the log,
    changed ones and those of other rows."""
    evaluate, primary = work.settings.evaluate, work.settings.gate.primary
    context = GradeContext(fields=evaluate.fields, checks={check.name: check for check in evaluate.checks})
    evaluated = made.get("evaluate", Evaluated)
    cases = load_cases(evaluated)
    for subject in (evaluated.report.baseline, evaluated.report.candidate):
        scores = subject.metrics[primary].scores
        answers = {
            answer.case_id: answer for answer in read_answers(Path(evaluated.folders[subject.subject]))
        }
        for case in cases:
            if (score := scores[case.id]) is not None:
                assert (score == 1) == bool(check(case.reference, answers[case.id].text)), case.id
        assert any(score is not None for score in scores.values())
    others = [case.reference for case in cases]
    for place, case in enumerate(cases):
        for answer in (case.reference, *changed_answers(case.reference), others[place - 1]):
            given = grade(primary, case, answer, context=context)
            if given is not None:
                assert (given == 1) == bool(check(case.reference, answer)), (case.reference, answer)


def require_rules_passed_by_the_log(work) -> None:
    """Each proposed limit lies below what the log's own answers prove."""
    found = dry_run(work)
    assert not found.errors
    assert not [problem.what for problem in found.problems if "does not keep" in problem.what]
    trials = {trial.name: trial for trial in found.metrics}
    graded = [rule for rule in work.settings.gate.rules if rule.over is not None and rule.metric in trials]
    assert graded
    for rule in graded:
        trial = trials[rule.metric]
        assert clopper_pearson(round(trial.own * trial.cases), n=trial.cases).low > rule.over, rule


@contextmanager
def serving(folder: Path):
    """`graft serve`, until the block ends; gives the address."""
    with start_graft(folder, "serve", "--port", "0", "--json", stderr=None) as endpoint:
        try:
            text = ""
            while not text.endswith("\n}\n"):
                line = endpoint.stdout.readline()
                assert line, "the endpoint ended before it was ready"
                text += line
            yield json.loads(text)["url"]
        finally:
            endpoint.send_signal(signal.SIGINT)
            endpoint.stdout.read()
            endpoint.wait(MINUTE)


def ask_and_correct(url: str, requests, corrections) -> None:
    """Send the requests to the champion; a person writes the right answers."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=MINUTE) as client:
        for request, correction in zip(requests, corrections, strict=True):
            answer = client.chat.completions.create(model="champion", max_tokens=16, **request)
            feedback = {"capture": answer.id, "correction": correction}
            client.post("/feedback", body=feedback, cast_to=object)


def require_run_as_in_the_log(work, log, name: str) -> StepOutputs:
    """A run as far as its verdict, and what must hold of it."""
    require_rules_passed_by_the_log(work)
    made = run_pipeline(work)
    require_each_row_kept_or_named(work.project.root, made)
    require_refusals_in_each_epoch(work, made, log.refusals)
    require_primary_as_by_hand(work, made, BY_HAND[name])
    assert {rule.metric for rule in made.get("gate", Verdict).rules} >= {
        rule.metric for rule in work.settings.gate.rules
    }
    return made


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", STORIES)
def test_a_log_is_trained_on_served_captured_and_trained_on_again_with_what_init_writes(
    tmp_path, tiny_base, change_settings, name, base
):
    log = STORIES[name]()
    log.write(tmp_path / "logs" / "log.jsonl")
    start_project(tmp_path, [], base=str(tiny_base) if base == "tiny" else EMBEDDED)
    if base == "tiny":
        # What takes time alone: rules, metrics, fields and split stay as init wrote them.
        train = {"epochs": 1, "threads": 1}
        change_settings(tmp_path, train=train, evaluate={"max_new_tokens": 8, "latency_cases": 2})
    with opened(tmp_path) as work:
        made = require_run_as_in_the_log(work, log, name)
        if made.get("gate", Verdict).decision != "deploy":
            made.outputs["gate"] = made.get("gate", Verdict).model_copy(update={"decision": "deploy"})
            del made.outputs["report"]
            finish_run(work, made)

    with serving(tmp_path) as url:
        ask_and_correct(url, log.requests, log.corrections)
    captured = tmp_path / "logs" / "captured.jsonl"
    done = graft_json(tmp_path, "data", "captures", "--out", str(captured))
    assert done["captures"] == len(log.requests)
    with opened(tmp_path) as work:
        if base == "tiny":
            again = run_pipeline(work, upto="prepare")
            require_each_row_kept_or_named(tmp_path, again)
        else:
            again = require_run_as_in_the_log(work, log, name)
        back = [row for row in all_rows(again) if row.capture is not None]
        assert {row.reply for row in back} == set(log.corrections)
        if name == "sql agent":
            assert all(read_calls(row.reply) for row in back)
