"""What a probe found and how far plans were off is shown to people and to programs."""

import json
import sys

import pytest

from graftwork.cli import plan
from graftwork.cli.main import main
from graftwork.model.probe import name_device
from graftwork.plan.probe import stored_probe
from graftwork.records.base import Figure
from graftwork.records.plan import ProbeFacts, ProductRate, Residual
from graftwork.store.database import open_database
from graftwork.store.runs import ResidualStore


@pytest.fixture
def graft(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return ended.value.code or 0, output.out

    return run


@pytest.fixture
def measured(monkeypatch):
    """A probe that is over at once."""

    def answer(job):
        return ProbeFacts(
            device=name_device(),
            memory_gib=8,
            threads=2,
            shape=job.shape,
            rank=job.rank,
            products=(ProductRate(layer="qkv", tokens=64, inputs=8, outputs=8, dtype="float32", flops=5e10),),
            copy_bytes_s=1e10,
            left_out=("the disk: there is no room",),
            seconds=1,
            at="2026-11-15T12:00:00",
        )

    monkeypatch.setattr(plan, "_run_probe", answer)


def test_a_probe_is_shown_with_ranges_and_kept(graft, measured):
    code, out = graft("plan", "probe", "--model", "smollm2-135m", "--json")
    reported = json.loads(out)
    assert code == 0
    assert reported["certainty"] == "probed"
    assert reported["figures"]["products_float32_gflops"] == {
        "value": 50,
        "low": 50,
        "high": 50,
        "unit": "GFLOPS",
    }
    assert set(reported["figures"]["memory_gb_s"]) == {"value", "low", "high", "unit"}
    assert stored_probe().shape.hidden_size == 576


def test_a_model_that_nobody_knows_is_a_mistake(graft, measured):
    code, out = graft("plan", "probe", "--model", "no-such-model", "--json")
    assert code == 2
    assert json.loads(out)["fix"]


@pytest.fixture
def project(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "graft.yaml").write_text("project: p\ndata:\n  logs: [log.jsonl]\n")
    return tmp_path


def add_runs(project, *actuals):
    (project / ".graft").mkdir(exist_ok=True)
    database = open_database(f"sqlite:///{project / '.graft' / 'state.db'}")
    for at, actual in enumerate(actuals):
        planned = Figure.about(10, down=0.9, up=1.1, unit="min")
        found = [
            Residual(name="minutes", planned=planned, actual=actual),
            Residual(name="minutes.load", planned=planned, actual=actual / 2),
        ]
        ResidualStore(database).add(f"run{at}", device="d", base="b", found=found, when="2026-11-15T12:00:00")
    database.close()


def test_past_runs_are_listed_with_the_bias_of_each_kind(graft, project):
    add_runs(project, 10.0, 12.0, 13.0)
    code, out = graft("plan", "--past", "20", "--json")
    reported = json.loads(out)
    assert code == 0
    assert [run["run_id"] for run in reported["runs"]] == ["run2", "run1", "run0"]
    bias = next(bias for bias in reported["biases"] if bias["figure"] == "minutes")
    assert bias["off"]["value"] == pytest.approx(0.2)
    assert bias["inside"]["value"] == pytest.approx(1 / 3)
    assert reported["runs"][0]["residuals"][0]["actual"]["value"] == 13.0
    assert reported["runs"][0]["residuals"][0]["inside"] is False


def test_a_project_without_runs_says_so(graft, project):
    code, out = graft("plan", "--past", "20")
    assert code == 0
    assert "no run" in out
