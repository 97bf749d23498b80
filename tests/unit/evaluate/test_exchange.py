"""Results of other tools in and out. The files were written by inspect-ai 0.3.285 and lm-eval 0.4.13."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from gate_samples import new_answer, new_generation
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.commands import read_foreign
from graftwork.evaluate.foreign_runs import SubjectExport, import_runs, write_json
from graftwork.evaluate.inspect_ai import read_mark, write_inspect
from graftwork.evaluate.lm_eval import write_lm_eval
from graftwork.evaluate.report import score
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

FILES = Path(__file__).parent / "exchange_files"
RESULTS = next(FILES.glob("results_*.json"))
WHEN = "2026-01-02T03:04:05+00:00"
SETTINGS = EvaluateSettings.model_validate(
    {"metrics": ["token_f1"], "checks": [{"name": "says_six", "contains": "six"}]}
)


def make_cases(count=8):
    return tuple(
        Case(
            id=f"case-{i}",
            origin=Origin(file="logs/a.jsonl", line=i + 1),
            messages=(
                Message(role="system", content="You answer."),
                Message(role="user", content=f"When does shop {i} close?"),
                Message(role="assistant", content="I look it up."),
                Message(role="tool", content='{"closes": 18}'),
            ),
            reference="It closes at six.",
            group=("planner", "writer")[i % 2],
            domain="hours",
            session=f"s{i}",
        )
        for i in range(count)
    )


def make_export(subject="adapter", *, cases=None, says="It closes at six {i} \ud800</script>"):
    cases = cases or make_cases()
    answers = [
        new_answer(
            case.id,
            says.format(i=i) if i else "I do not know.",
            tokens=5,
            prompt_tokens=9,
            finish_reason="length" if i == 3 else "stop",
            seconds=0.5,
        )
        for i, case in enumerate(cases)
    ]
    generation = new_generation(
        subject,
        answers=len(cases),
        single_latency_seconds=(0.1,),
        settings={"temperature": 0.0, "seed": 3, "max_new_tokens": 64},
    )
    scored = score(cases, answers=answers, generation=generation, settings=SETTINGS)
    return SubjectExport("corner shop", cases, scored, answers, "hash", WHEN, "1.2.3")


def put(export, form, folder):
    if form == "inspect":
        path = folder / f"{export.subject.subject}.json"
        path.write_text(write_json(write_inspect(export)))
        return path
    files = write_lm_eval(export)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / next(name for name in files if "/results_" in name)


@pytest.mark.parametrize("name", ["inspect_log.json", "inspect_log.eval"])
def test_a_log_of_inspect_is_read_as_inspect_reads_it(name):
    run = read_foreign(FILES / name)
    assert (run.tool, run.subject, run.notes) == ("inspect-ai", "mockllm/model", ())
    assert sorted((sample.case.id, sample.answer.repeat) for sample in run.samples) == [
        ("2", 0),
        ("2", 1),
        ("a", 0),
        ("a", 1),
    ]
    asked = next(sample.case for sample in run.samples if sample.case.id == "a")
    assert [message.role for message in asked.messages] == ["system", "user"]
    assert (asked.reference, asked.group) == ("six", "planner")
    report = import_runs([run])[0].report
    # The figures that stand under `results` in the log.
    means = {name: metric.value for name, metric in report.candidate.metrics.items()}
    assert means == {"includes": 0.5, "match": 0.5, "both/first": 1.0, "both/second": 0.25}
    assert report.cases == 2


def test_results_of_lm_eval_are_read_with_their_samples():
    run = read_foreign(RESULTS)
    assert (run.tool, len(run.samples), run.notes) == ("lm-eval", 12, ())
    reported = json.loads(RESULTS.read_bytes())["results"]
    metrics = import_runs([run])[0].report.candidate.metrics
    assert metrics["shop_hours:exact_match"].value == reported["shop_hours"]["exact_match,none"]
    assert metrics["shop_choice:acc"].value == pytest.approx(reported["shop_choice"]["acc,none"])
    assert metrics["shop_choice:acc"].n == 6
    choices = [sample.answer.text for sample in run.samples if sample.case.group == "shop_choice"]
    assert set(choices) <= {"six", "seven", "eight"}
    right = [sample for sample in run.samples if sample.scores.get("shop_choice:acc") == 1.0]
    assert all(
        sample.answer.text == ("six", "seven", "eight")[int(sample.case.reference)] for sample in right
    )


def test_a_samples_file_alone_is_enough():
    run = read_foreign(next(FILES.glob("samples_shop_choice_*")))
    assert [list(sample.scores) for sample in run.samples] == [["acc"]] * 6


def test_results_without_samples_are_shown_with_an_exact_interval_and_distinguished(tmp_path):
    shutil.copy(RESULTS, tmp_path)
    imported, _, _ = import_runs([read_foreign(tmp_path / RESULTS.name)])
    metric = imported.report.candidate.metrics["shop_choice:acc"]
    assert (metric.successes, metric.n) == (2, 6)
    assert metric.low < 1 / 3 < metric.high
    assert "--log_samples" in imported.notes[0]
    assert imported.report.comparisons == ()


@pytest.mark.parametrize("form", ["inspect", "lm-eval"])
def test_out_and_in_again_gives_the_same_figures_answers_and_cases(form, tmp_path):
    export = make_export()
    imported, cases, answers_by_subject = import_runs(
        [read_foreign(put(export, form, tmp_path))], own_cases=export.cases
    )
    assert imported.same_cases
    assert cases == export.cases
    for name in ("token_f1", "says_six", "truncated"):
        ours, theirs = export.subject.metrics[name], imported.report.candidate.metrics[name]
        assert theirs.scores == ours.scores
        assert (theirs.value, theirs.n) == pytest.approx((ours.value, ours.n))
    (answers,) = answers_by_subject.values()
    assert [answer.text for answer in answers] == [
        shown.text.replace("\ud800", "\ufffd") for shown in export.answers
    ]
    assert [answer.finish_reason for answer in answers] == [a.finish_reason for a in export.answers]


@pytest.mark.parametrize("form", ["inspect", "lm-eval"])
def test_two_runs_are_compared_in_pairs(form, tmp_path):
    worse = make_export("base", says="Never, {i}.")
    runs = [read_foreign(put(export, form, tmp_path)) for export in (worse, make_export())]
    report = import_runs(runs)[0].report
    pair = next(c for c in report.comparisons if c.metric == "says_six")
    assert (pair.n, pair.wins, pair.losses) == (8, 7, 0)
    assert pair.p_value == pytest.approx(2 / 2**7)
    assert {figure.part for figure in report.slices if figure.by == "group"} == {"planner", "writer"}
    assert report.power is not None


def test_other_cases_are_not_gated_and_the_reason_is_reported():
    imported, _, _ = import_runs([read_foreign(FILES / "inspect_log.json")], own_cases=make_cases())
    assert not imported.same_cases
    assert imported.why.startswith("Not gated: 0 of this project's 8 cases are among the 2 imported ones")
    alone, _, _ = import_runs([read_foreign(FILES / "inspect_log.json")])
    assert "no evaluation yet" in alone.why


def test_one_id_with_two_prompts_is_two_cases(tmp_path):
    cases = make_cases(2)
    other = [case.model_copy(update={"reference": "at seven"}) for case in cases]
    runs = [
        read_foreign(put(make_export("base", cases=cases), "inspect", tmp_path)),
        read_foreign(put(make_export("adapter", cases=other), "inspect", tmp_path)),
    ]
    imported, _, _ = import_runs(runs)
    assert imported.report.cases == 4
    assert imported.report.comparisons == ()
    assert any("different prompts" in note for note in imported.notes)


def test_two_runs_of_one_model_keep_two_names():
    run = read_foreign(FILES / "inspect_log.json")
    report = import_runs([run, run])[0].report
    assert (report.baseline.subject, report.candidate.subject) == ("mockllm/model", "mockllm/model (2)")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.json", "{", Corrupted),
        ("a.json", "[" * 100_000, Corrupted),
        ("a.json", "{}", UserError),
        ("a.json", "[1]", UserError),
        ("a.jsonl", '{"x": 1}\n', UserError),
        ("a.eval", "no archive", Corrupted),
        ("missing.json", None, UserError),
    ],
)
def test_an_invalid_result_is_refused_with_its_position(name, content, error, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(error) as caught:
        read_foreign(path)
    assert str(path) in caught.value.where
    assert caught.value.fix


def test_a_damaged_archive_is_seen(tmp_path):
    whole = (FILES / "inspect_log.eval").read_bytes()
    with zipfile.ZipFile(FILES / "inspect_log.eval") as archive:
        member = next(m for m in archive.infolist() if m.filename.startswith("samples/"))
    place = member.header_offset + 30 + len(member.filename) + member.compress_size // 2
    torn = bytearray(whole)
    torn[place : place + 8] = bytes(value ^ 0xFF for value in torn[place : place + 8])
    path = tmp_path / "torn.eval"
    path.write_bytes(torn)
    with pytest.raises(Corrupted):
        read_foreign(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Corrupted):
        read_foreign(path)


def test_an_archive_that_unpacks_to_too_much_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.evaluate.foreign_runs.MOST_BYTES", 1000)
    with pytest.raises(UserError, match="more than"):
        read_foreign(FILES / "inspect_log.eval")


def test_an_older_archive_packed_with_deflate_is_read_too(tmp_path):
    document = json.loads((FILES / "inspect_log.json").read_bytes())
    samples = document.pop("samples")
    path = tmp_path / "old.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
        archive.writestr("header.json", json.dumps(document))
    assert len(read_foreign(path).samples) == 4


def test_a_run_that_was_cut_off_is_reported(tmp_path):
    document = json.loads((FILES / "inspect_log.json").read_bytes())
    document["status"] = "cancelled"
    document["samples"][0] |= {"error": {"message": "boom"}, "scores": None, "output": None}
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(document))
    notes = read_foreign(path).notes
    assert "ended as cancelled" in notes[0]
    assert "1 of 4 samples ended with an error" in notes[1]


@pytest.mark.parametrize(
    ("value", "mark"),
    [
        *[("C", 1), ("I", 0), ("P", 0.5), ("N", 0), (True, 1), (0.25, 0.25), ("0.5", 0.5), ("Yes", 1)],
        *[("odd", None), (float("nan"), None), (None, None), ("nan", None)],
    ],
)
def test_marks_are_read_as_inspect_reads_them(value, mark):
    assert read_mark(value) == mark


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["input", "target", "messages", "output", "scores", "metadata", "epoch", "attachments", "id"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON), JSON)
@settings(max_examples=150)
def test_odd_values_in_a_log_never_end_in_a_traceback(tmp_path_factory, odd, output):
    path = tmp_path_factory.getbasetemp() / "odd.json"
    sample = {"id": "a", "input": "?", "scores": {"x": {"value": 1}}, "output": output} | odd
    path.write_text(json.dumps({"status": "success", "eval": {"model": "m"}, "samples": [sample]}))
    run = read_foreign(path)
    assert len(run.samples) == 1


@given(st.dictionaries(st.sampled_from(["doc", "arguments", "filtered_resps", "metrics", "target"]), JSON))
@settings(max_examples=150)
def test_odd_values_in_samples_never_end_in_a_traceback(tmp_path_factory, odd):
    path = tmp_path_factory.getbasetemp() / "samples_t_2026-01-01T00-00-00.jsonl"
    path.write_text(json.dumps({"doc_id": 0, "metrics": ["acc"], "acc": 1} | odd) + "\n")
    assert len(read_foreign(path).samples) == 1
