"""`graft spec` and `graft generate` as a user sees them: tables, JSON, exit codes, errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.records.errors import UserError

CONVERTER = Path(__file__).parents[3] / "examples" / "converter"
SPEC = str(CONVERTER / "converter.tiki")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_spec_check_shows_counts_and_exits_0_for_a_sound_file():
    done = run("spec", "check", SPEC)
    assert done.exit_code == 0
    assert "21 leaves" in " ".join(done.stdout.split())


def test_spec_check_of_a_folder_lists_what_is_refused_and_goes_on(tmp_path):
    (tmp_path / "a.tiki").write_text("id: a\nname: A\nchildren:\n  - {name: no id}\n")
    (tmp_path / "b.tiki").write_text("# only prose\n")
    done = run("spec", "check", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [Path(report["file"]).name for report in found["files"]] == ["a.tiki"]
    assert "not a specification" in found["refused"][0]["what"]


def test_spec_check_names_node_line_rule_and_fix(tmp_path):
    path = tmp_path / "a.tiki"
    path.write_text('id: a\nname: A\nchildren:\n  - {id: "1", name: One, dependencies: ["1"]}\n')
    shown = " ".join(run("spec", "check", path).stdout.split())
    assert "4 error 1 the component 1 depends on itself cycle" in shown
    assert "cycle: remove one of these dependencies" in shown
    assert "2 nodes, 1 leaf, 0 with cases, 0 of 0 requirements executable" in shown
    [finding] = [
        each
        for each in json.loads(run("spec", "check", path, "--json").stdout)["files"][0]["findings"]
        if each["code"] == "cycle"
    ]
    assert finding["fix"] == "remove one of these dependencies"


def test_spec_check_fails_for_refused_files_but_not_for_other_yaml_of_a_folder(tmp_path):
    (tmp_path / "a.tiki").write_text("id: a\nname: A\n")
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    assert run("spec", "check", tmp_path).exit_code == 0
    assert run("spec", "check", tmp_path / "a.tiki", tmp_path / "compose.yaml").exit_code == 1
    (tmp_path / "b.tiki").write_text("# only prose\n")
    assert run("spec", "check", tmp_path).exit_code == 1
    (tmp_path / "empty").mkdir()
    assert "no specification here" in str(run("spec", "check", tmp_path / "empty").exception)


def test_spec_convert_writes_the_other_dialect_and_overwrites_nothing(tmp_path):
    out = tmp_path / "converter.outline"
    assert run("spec", "convert", SPEC, "--to", "outline", "-o", out).exit_code == 0
    assert run("spec", "diff", SPEC, out).exit_code == 0
    again = run("spec", "convert", SPEC, "--to", "outline", "-o", out)
    assert isinstance(again.exception, UserError)


def test_spec_show_lists_nodes_with_types():
    nodes = json.loads(run("spec", "show", SPEC, "--json").stdout)["nodes"]
    assert {node["id"]: node["inputs"] for node in nodes}["1.5"] == {"text": "string", "width": "integer"}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--engine", "base"), "--spec is missing"),
        (("--spec", SPEC), "--engine is missing"),
        (("--spec", SPEC, "--engine", "nothing"), "'nothing' is not an engine"),
        (("--spec", SPEC, "--engine", f"recorded:{SPEC}"), "not a recorded answer"),
        (("--spec", SPEC, "--engine", "champion"), "is a model of a project"),
        (("--spec", SPEC, "--engine", "recorded:none.jsonl"), "no such file"),
        (("--spec", SPEC, "--engine", "base", "--only", "9.9"), "there is no component 9.9"),
        (("--spec", SPEC, "--engine", "base", "--stages", "2"), "names no stages"),
        (("--spec", "none.tiki", "--engine", "base"), "no such file"),
    ],
)
def test_wrong_input_is_named_before_anything_is_written(arguments, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("generate", *arguments)
    assert isinstance(done.exception, UserError)
    assert what in done.exception.what
    assert list(tmp_path.iterdir()) == []


def test_a_component_of_the_example_is_generated_verified_and_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = f"recorded:{CONVERTER / 'answers.jsonl'}"
    (tmp_path / "quick.cases.yaml").write_bytes((CONVERTER / "converter.cases.yaml").read_bytes())
    options = ("--out", "generated", "--samples", 2, "--rounds", 1, "--only", "1.5", "--stages", "1,2,4")
    done = run("generate", "--spec", SPEC, "--engine", answers, *options, "--json")
    outcome = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert outcome["built"] == ["1.5"]
    assert run("generate", "verify", "generated", "--spec", SPEC).exit_code == 0
    written = json.loads(
        run("generate", "episodes", "generated", "--spec", SPEC, "--to", "logs", "--json").stdout
    )
    assert written["pairs"] == 1
    rates = json.loads(run("generate", "report", "generated", "--against", "generated", "--json").stdout)
    assert rates["stages"][0] == {
        "stage": 1,
        "before": 0.5,
        "after": 0.5,
        "answers_before": 2,
        "answers_after": 2,
    }
