"""`graft eval export` and `graft eval import`, from the command line, on an evaluation that lies there."""

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.evaluate.cases import write_cases
from graftwork.evaluate.commands import last_evaluation
from graftwork.evaluate.project import Evaluated, put_page
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import GraftError
from graftwork.views.terminal import show

sys.path.insert(0, str(Path(__file__).parents[1] / "views"))
from evaluation_sample import make_evaluation

INSPECT = Path(__file__).parents[1] / "evaluate" / "exchange_files" / "inspect_log.json"
PROJECT = """
project: corner-shop
data: {logs: [log.jsonl]}
evaluate:
  metrics: [token_f1]
  checks: [{name: says_six, contains: six}, {name: polite, contains: please}]
gate:
  rules: [{metric: says_six, over: 0.5}]
"""


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    monkeypatch.delenv("GRAFT_DATABASE_URL", raising=False)
    (tmp_path / "graft.yaml").write_text(PROJECT)
    made = make_evaluation()
    with use_project(open_project(tmp_path), NullReporter()) as work:
        folder = work.project.evaluations
        folder.mkdir(parents=True)
        write_cases(folder / "cases.jsonl", cases=made.cases)
        for name, answers in made.answers.items():
            (folder / name).mkdir()
            lines = [json.dumps(answer.model_dump(mode="json")) + "\n" for answer in answers]
            (folder / name / "answers.jsonl").write_text("".join(lines))
        record = Evaluated(
            cases_file=str(folder / "cases.jsonl"),
            folders={name: str(folder / name) for name in made.answers},
            report=made.report,
        )
        work.ledger.put(
            "evaluate", fingerprint="f", output=record.model_dump(mode="json"), finished_at="t", seconds=1
        )
    return tmp_path


def call(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", ["inspect", "lm-eval"])
def test_exported_results_come_back_paired_and_graded_by_our_metrics(evaluated, form):
    out = evaluated / "out"
    wrote = call("eval", "export", "--format", form, "-o", out, "-C", evaluated, "--json")
    assert wrote["subjects"] == ["base", "adapter", "log"]
    files = [path for path in wrote["files"] if "samples_" not in path]
    assert [Path(path).is_file() for path in files] == [True] * 3
    read = call("eval", "import", *files[:2], "-C", evaluated, "--json")
    assert read["same_cases"]
    pair = next(
        comparison for comparison in read["report"]["comparisons"] if comparison["metric"] == "says_six"
    )
    with use_project(open_project(evaluated), NullReporter()) as work:
        ours = next(c for c in last_evaluation(work).report.comparisons if c.metric == "says_six")
    assert (pair["wins"], pair["losses"], pair["n"]) == (ours.wins, ours.losses, ours.n)
    page = Path(read["page"]).read_text()
    assert "case-data" in page
    assert "imported from" in page
    assert list((evaluated / ".graft" / "evaluations").glob("imported-*.json"))


def test_other_cases_are_shown_and_the_reason_why_they_are_not_gated_too(evaluated):
    done = CliRunner().invoke(app, ["eval", "import", str(INSPECT), "-C", str(evaluated)])
    reported = " ".join(done.stdout.split())
    assert "imported from inspect-ai" in reported
    assert "Not gated: 0 of this project's 12 cases are among the 2 imported ones" in reported


def test_importing_results_on_this_projects_cases_counts_as_an_evaluation(evaluated):
    wrote = call("eval", "export", "--format", "inspect", "-o", evaluated / "out", "-C", evaluated, "--json")
    base, adapter, _ = wrote["files"]
    for looks, (files, candidates) in enumerate([((adapter,), 1), ((base,), 2), ((adapter,), 2)], 1):
        read = call("eval", "import", *files, "-C", evaluated, "--json")
        assert (read["report"]["looks"], read["report"]["wear"]["candidates"]) == (looks, candidates)
    call("eval", "import", INSPECT, "-C", evaluated, "--json")
    with use_project(open_project(evaluated), NullReporter()) as work:
        assert work.looks.count(read["report"]["cases_hash"]) == 3


def test_one_subject_can_be_exported_alone_and_an_unknown_one_is_refused(evaluated):
    out = evaluated / "out"
    wrote = call(
        *("eval", "export", "--format", "inspect", "--subject", "adapter"),
        *("-o", out, "-C", evaluated, "--json"),
    )
    assert len(wrote["files"]) == 1
    with pytest.raises(GraftError, match="no subject nobody"):
        call("eval", "export", "--format", "inspect", "--subject", "nobody", "-C", evaluated, "--json")


def test_without_an_evaluation_there_is_nothing_to_export(tmp_path, monkeypatch):
    monkeypatch.delenv("GRAFT_DATABASE_URL", raising=False)
    (tmp_path / "graft.yaml").write_text(PROJECT)
    with pytest.raises(GraftError, match="no evaluation to export") as caught:
        call("eval", "export", "--format", "lm-eval", "-C", tmp_path, "--json")
    assert "graft eval" in caught.value.fix


def test_the_page_of_an_evaluation_is_next_to_the_project_and_is_named(evaluated):
    with use_project(open_project(evaluated), NullReporter()) as work:
        shown = put_page(work, last_evaluation(work))
        asked = put_page(work, last_evaluation(work), separate=True)
    assert shown.page == str(evaluated / "evaluation.html")
    assert asked.page == str(evaluated / "evaluation-asked.html")
    assert "case-data" in Path(shown.page).read_text()
    console = Console(file=StringIO(), width=200)
    show(console, shown)
    assert shown.page in console.file.getvalue()
