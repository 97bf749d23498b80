"""Labels that mean nothing are not deployed by the rules that `graft init` writes, whatever learned them."""

import json
import random
from collections import Counter
from functools import cache

import pytest
import yaml

from graftwork.data.ingest.read import read
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.report import make_report, score
from graftwork.grading.answers import shared_words, words_of
from graftwork.model import probe
from graftwork.pipeline.table import run_pipeline
from graftwork.project.folder import open_project
from graftwork.project.init import start_project
from graftwork.project.load import load_settings
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.report import Answer, Case, Generation, Verdict
from tickets import write_tickets

SEEDS = range(20)


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr("graftwork.project.init.probe_device", probe.describe_device)


def start(folder, *, seed, shuffled):
    log = folder / "logs" / "tickets.jsonl"
    write_tickets(log, seed=seed, shuffled=shuffled)
    start_project(folder, [str(log)], base="smollm2-135m-instruct")
    return load_settings(folder / "graft.yaml")


def split(folder, settings, *, seed):
    """Rows to learn from and cases to be asked, as many as init proposes to hold out."""
    rows = list(read(settings.data.logs, root=folder))
    random.Random(seed).shuffle(rows)
    held_out = round(settings.data.test * len(rows))
    cases = [
        Case(id=row.id, origin=row.origin, messages=row.messages, reference=row.reply)
        for row in rows[:held_out]
    ]
    return rows[held_out:], cases


def always_the_commonest(rows, _chance):
    (commonest, _), *_ = Counter(row.reply for row in rows).most_common(1)
    return lambda _question: commonest


def commonest_of_each_field(rows, _chance):
    documents = [json.loads(row.reply) for row in rows]
    best = {
        key: Counter(document[key] for document in documents).most_common(1)[0][0] for key in documents[0]
    }
    return lambda _question: json.dumps(best)


def at_random_as_often_as_logged(rows, chance):
    return lambda _question: chance.choice(rows).reply


def as_the_most_similar_row(rows, _chance):
    """The strongest: whatever words say about labels, it finds."""
    known = [(words_of(row.question), row.reply) for row in rows]

    def answer(question):
        asked = words_of(question)
        near = sorted(known, key=lambda pair: -shared_words(asked, pair[0]))[:9]
        documents = [json.loads(reply) for _, reply in near]
        voted = {
            key: Counter(document[key] for document in documents).most_common(1)[0][0] for key in documents[0]
        }
        return json.dumps(voted)

    return answer


LEARNERS = (
    always_the_commonest,
    commonest_of_each_field,
    at_random_as_often_as_logged,
    as_the_most_similar_row,
)


@pytest.fixture(scope="module")
def project_of(tmp_path_factory):
    """Settings, rows and cases of a seed, made once for all learners."""

    @cache
    def make(seed, shuffled):
        folder = tmp_path_factory.mktemp("tickets")
        settings = start(folder, seed=seed, shuffled=shuffled)
        return settings, *split(folder, settings, seed=seed)

    return make


def judge(project, *, seed, learner):
    """The verdict of init's own rules on what a learner says, next to a base that is never right."""
    settings, rows, cases = project
    learned = learner(rows, random.Random(seed))
    reports = []
    for subject, say in (("base", lambda _question: "Hello!"), ("adapter", learned)):
        answers = [
            Answer(
                case_id=case.id,
                text=say(case.messages[-1].content),
                tokens=1,
                prompt_tokens=1,
                finish_reason="stop",
                seconds=1,
            )
            for case in cases
        ]
        generation = Generation(
            subject=subject,
            answers=len(cases),
            seconds=1,
            tokens_per_second=1,
            single_latency_seconds=(),
            peak_memory_gib=1,
            settings={},
        )
        reports.append(score(cases, answers=answers, generation=generation, settings=settings.evaluate))
    report = make_report(cases, baseline=reports[0], candidate=reports[1], settings=settings.evaluate)
    return decide(report, settings.gate)


@pytest.mark.parametrize("count", [3, pytest.param(len(SEEDS), marks=pytest.mark.slow)])
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.__name__)
def test_shuffled_labels_are_deployed_with_no_seed(project_of, learner, count):
    decisions = [judge(project_of(seed, True), seed=seed, learner=learner).decision for seed in SEEDS[:count]]
    assert decisions.count("deploy") == 0


def test_the_same_rules_deploy_what_was_learned_from_right_labels(project_of):
    learner = as_the_most_similar_row
    decisions = [judge(project_of(seed, False), seed=seed, learner=learner).decision for seed in range(3)]
    assert decisions.count("deploy") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_labels_trained_for_real_are_not_deployed(tmp_path, seed, embedded_base):
    """The whole way with the embedded model and init's own file: some minutes a seed."""
    start(tmp_path, seed=seed, shuffled=True)
    path = tmp_path / "graft.yaml"
    settings = yaml.safe_load(path.read_text())
    # Only what saves time: rules, metrics and split stay as init wrote them.
    settings["train"]["epochs"] = 1
    settings["evaluate"]["latency_cases"] = 1
    path.write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        made = run_pipeline(work)
    assert made.get("gate", Verdict).decision != "deploy"
    assert "release" not in made.outputs
