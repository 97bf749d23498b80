"""Who is asked first, what is timed, and what is said of the log."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_samples import new_generation

from graftwork.data.project import PreparedData
from graftwork.evaluate import project as evaluation
from graftwork.evaluate.live import comparison as ab
from graftwork.evaluate.project import ask_everybody, remark_on_log
from graftwork.evaluate.subjects import Lineup, Subject
from graftwork.records.dataset import Dataset, Drop, InputFile
from graftwork.records.interaction import Origin
from graftwork.records.report import Endpoint, EvalJob, Metric, SubjectReport


def make_subject(root, name, **changes):
    job = EvalJob(
        subject=name,
        folder=str(root / name),
        base_folder=str(root),
        adapter_folder=None,
        cases_file=str(root / "cases.jsonl"),
        max_new_tokens=8,
        batch_size=2,
        **changes,
    )
    return Subject(name, Path(job.folder), job, name)


def test_endpoints_are_asked_first_so_that_a_wrong_address_costs_no_waiting(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(evaluation, "ask_subject", lambda _work, subject, _cases: asked.append(subject.name))
    monkeypatch.setattr(evaluation, "time_together", lambda *_, **__: None)
    away = make_subject(tmp_path, "away", endpoint=Endpoint(url="http://h/v1", model="m"))
    base, adapter = make_subject(tmp_path, "base"), make_subject(tmp_path, "adapter")
    log = Subject("log", tmp_path / "log")
    ask_everybody(None, Lineup(base, adapter, references=(away, log)), [])
    assert asked == ["away", "base", "adapter", "log"]


def test_releases_that_are_only_compared_are_not_timed(tmp_path, monkeypatch):
    seen = []

    def resolve(_work, named, *, asking, outcome):
        seen.append(asking.timed)
        return make_subject(tmp_path, named.name)

    monkeypatch.setattr(ab, "put_cases", lambda _work, _cases: tmp_path / "cases.jsonl")
    monkeypatch.setattr(ab, "open_store", lambda _work: SimpleNamespace(verify=lambda _release: None))
    monkeypatch.setattr(ab, "resolve_subject", resolve)
    pair = (SimpleNamespace(id="a" * 64), SimpleNamespace(id="b" * 64))
    assert len(ab._subjects(None, pair, [])) == 2
    assert seen == [False, False]


def make_report(name, *graded):
    made = new_generation(name, peak_memory_gib=0)
    metrics = {metric: Metric(name=metric, kind="rate", value=1, low=0, high=1, n=1) for metric in graded}
    return SubjectReport(subject=name, metrics=metrics, generation=made)


@pytest.fixture
def prepare(monkeypatch):
    def prepared(*drops, kept=91, read=302):
        steps = [step for step, _ in drops]
        listed = [Drop(origin=Origin(file="f", line=1), step=step, reason=reason) for step, reason in drops]
        monkeypatch.setattr("graftwork.evaluate.project.iterate_drops", lambda _folder: iter(listed))
        dataset = Dataset(
            content_hash="c",
            base="b",
            base_fingerprint="b",
            template_fingerprint="t",
            tokenizer_fingerprint="t",
            inputs=(InputFile(file="f", sha256="s", rows=read),),
            splits={},
            kept_after={"read": read, "filter": kept, "render": kept},
            dropped={step: steps.count(step) for step in steps},
            redactions={},
            settings={},
        )
        return PreparedData(folder="nowhere", dataset=dataset, folders={}, portions=())

    return prepared


def test_the_log_is_reported_to_show_only_the_rows_that_were_kept(prepare):
    drops = [("filter", "truncated: a code block")] * 198 + [("filter", "failed_status: it says so")] * 3
    drops += [("filter", "claims_success_but_fails: x"), ("duplicate", "truncated: not a fault of its own")]
    (output,) = remark_on_log({"log": make_report("log")}, prepared=prepare(*drops))
    assert "the 91 of 302 rows that were kept (dropped: 198 as cut off, 4 as failed)" in output
    assert "`graft data audit`" in output


def test_nothing_is_reported_where_nothing_flatters_the_log(prepare):
    log = {"log": make_report("log", "json_valid"), "base": make_report("base", "json_valid")}
    assert remark_on_log(log, prepared=prepare(("duplicate", "the same"))) == ()
    assert remark_on_log(log, prepared=None) == ()
    flattering = prepare(("filter", "truncated: x"))
    assert remark_on_log({"base": make_report("base")}, prepared=flattering) == ()


def test_metrics_not_applicable_to_the_log_are_named():
    scored = {
        "base": make_report("base", "answer_match", "json_valid"),
        "log": make_report("log", "json_valid"),
    }
    (output,) = remark_on_log(scored, prepared=None)
    assert output == "Not applicable to the log, whose answer is the reference: Answer match."


def test_the_codes_of_the_preparation_are_all_known():
    from graftwork.data.audit.row_checks import CODES
    from graftwork.evaluate.project import FAULTS

    # Captures that were not asked for, or that were made to try a release out, say nothing of its answers.
    assert FAULTS.keys() == CODES - {"captures_filter", "tried_out"}
