"""A mistake gets what, why and fix, the designed exit code, no traceback, and nothing is lost."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import main, make_app
from graftwork.model import probe
from graftwork.records.errors import pip_install
from tickets import write_tickets

GOOD_ROW = '{"prompt": "Where is the fern?", "completion": "By the pond."}\n'
PROJECT = "project: p\ndata:\n  logs: [log.jsonl]\n"


@pytest.fixture
def graft(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.fixture
def project(tmp_path):
    (tmp_path / "log.jsonl").write_text(GOOD_ROW)
    (tmp_path / "graft.yaml").write_text(PROJECT)
    return tmp_path


def error_of(out):
    error = json.loads(out)
    assert error["what"]
    assert error["fix"]
    return error


def test_help_lists_every_command_without_building_the_commands_of_groups(graft):
    code, out, _ = graft("--help")
    assert code == 0
    _, _, listed = out.partition("COMMAND")
    _, _, expected = CliRunner().invoke(make_app(), ["--help"]).stdout.partition("COMMAND")
    assert listed.split() == expected.split()


@pytest.mark.parametrize("name", ["nothing.jsonl", "empty.jsonl", "folder"])
def test_a_path_that_cannot_be_audited_is_reported(graft, tmp_path, name):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    code, out, _ = graft("data", "audit", tmp_path / name, "--json")
    assert code == 2
    error = error_of(out)
    assert name in error["where"] + error["what"]


@pytest.mark.parametrize(
    ("bad", "finding"),
    [
        (b"this is no JSON\n", "parse_error"),
        (b'{"prompt": 3, "completion": ["x"]}\n', "schema"),
        (b'{"prompt": "a \xff\xfe b", "completion": "c"}\n', "language_or_encoding"),
        (b'{"nothing": "known"}\n', "schema"),
    ],
)
def test_a_bad_row_is_a_finding_with_its_line_and_the_good_rows_survive(graft, tmp_path, bad, finding):
    log = tmp_path / "log.jsonl"
    log.write_bytes(GOOD_ROW.encode() + bad + GOOD_ROW.replace("fern", "moss").encode())
    code, out, _ = graft("data", "audit", log, "--json")
    audit = json.loads(out)
    found = {finding["code"]: finding for finding in audit["findings"]}
    assert finding in found
    assert [row["line"] for row in found[finding]["rows"]] == [2]
    assert audit["readable"] == 2
    assert code in (0, 1)


def test_no_project_is_reported_with_the_command_that_makes_one(graft, tmp_path):
    code, out, _ = graft("plan", "-C", tmp_path, "--json")
    assert code == 2
    assert "graft init" in error_of(out)["fix"]


@pytest.mark.parametrize(
    ("text", "what", "fix", "line"),
    [
        ("trian:\n  rank: 8\n", "unknown key 'trian'", "did you mean 'train'?", 4),
        ("train:\n  rnak: 8\n", "unknown key 'train.rnak'", "did you mean 'train.rank'?", 5),
        ("train:\n  rank: many\n", "train.rank", "Rank of the adapters.", 5),
        ("train:\n  rank: 0\n", "train.rank", "Rank of the adapters.", 5),
        ("gate:\n  rules:\n    - {metric: json_valid, ovr: 1}\n", "ovr", "over", 6),
        ("base: 3\nbase: 4\n", "occurs twice", "remove one", 5),
        ("train: [\n", "not valid YAML", "indentation", 6),
    ],
)
def test_a_mistake_in_the_project_file_is_named_with_its_line(graft, project, text, what, fix, line):
    (project / "graft.yaml").write_text(PROJECT + text)
    code, out, _ = graft("plan", "-C", project, "--json")
    error = error_of(out)
    assert code == 2
    assert what in error["what"]
    assert fix in error["fix"]
    if "YAML" not in what:
        assert error["where"].endswith(f"graft.yaml:{line}")


def test_an_empty_project_file_is_reported_as_empty(graft, project):
    (project / "graft.yaml").write_text("")
    code, out, _ = graft("status", "-C", project, "--json")
    assert code == 2
    assert "empty" in error_of(out)["what"]


def test_a_missing_model_is_reported_with_what_would_do(graft, project):
    (project / "graft.yaml").write_text(PROJECT + "base: ./models/none\n")
    code, out, _ = graft("data", "prepare", "-C", project, "--json")
    assert code == 2
    assert "there is no base model './models/none'" in error_of(out)["what"]


def test_an_argument_that_is_unknown_is_the_users_mistake(graft):
    code, _, err = graft("train", "--fast")
    assert code == 2
    assert "--fast" in err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("init --upstream http://host/v1#m --base qwen3-0.6b", "--base"),
        ("run --quick --dry-run", "--quick"),
        ("up --reason why", "--reason"),
        ("up status --as ada", "--as"),
        ("up week --reason why", "--reason"),
        ("data audit --scores --html page.html", "--html"),
        ("data audit log.jsonl --scores --format otlp", "--format"),
        ("data review --corrections --limit 3", "--limit"),
        ("eval --savings --subject base", "--savings"),
        ("plan --past 3 --model tagger", "--model"),
        ("serve --reload --port 8080", "--reload"),
        ("release export champion --to out.tar --model tagger", "--model"),
        ("release ab --traffic shadow --metric json_valid", "--metric"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(graft, project, command, named):
    code, _, err = graft(*command.split(), "-C", project)
    assert code == 2
    assert named in err


def test_for_people_an_error_is_words(graft, tmp_path):
    code, out, err = graft("data", "audit", tmp_path / "none.jsonl")
    assert code == 2
    assert out == ""
    assert "fix" in err


def test_init_writes_a_project_that_loads_and_never_overwrites(graft, tmp_path):
    code, out, _ = graft("init", tmp_path / "My Agent", "--json")
    assert code == 0
    path = tmp_path / "My Agent" / "graft.yaml"
    assert json.loads(out)["file"] == str(path)
    path.write_text("mine")
    code, out, _ = graft("init", tmp_path / "My Agent", "--json")
    assert code == 2
    assert path.read_text() == "mine"


@pytest.fixture
def quick_probe(monkeypatch):
    """The machine is not measured."""
    monkeypatch.setattr("graftwork.project.init.probe_device", probe.describe_device)


@pytest.mark.usefixtures("quick_probe")
def test_init_in_a_folder_with_logs_reads_them(graft, tmp_path):
    write_tickets(tmp_path / "desk" / "logs" / "tickets.jsonl", count=60)
    code, out, _ = graft("init", tmp_path / "desk", "--no-plan", "--json")
    assert code == 0
    assert json.loads(out)["proposal"]["kind"] == "json"
    assert "logs: [logs/*.jsonl]" in (tmp_path / "desk" / "graft.yaml").read_text()


@pytest.mark.usefixtures("quick_probe")
def test_init_of_a_log_outside_the_project_names_it_whole(graft, tmp_path):
    write_tickets(tmp_path / "tickets.jsonl", count=60)
    code, _, _ = graft("init", tmp_path / "tickets.jsonl", "-C", tmp_path / "desk", "--no-plan", "--json")
    assert code == 0
    assert f"logs: [{tmp_path / 'tickets.jsonl'}]" in (tmp_path / "desk" / "graft.yaml").read_text()


def test_init_of_a_log_that_is_not_there_is_reported(graft, tmp_path):
    code, out, _ = graft("init", tmp_path / "none.jsonl", "-C", tmp_path, "--json")
    assert code == 2
    assert "none.jsonl" in json.dumps(error_of(out))
    assert not (tmp_path / "graft.yaml").exists()


def test_the_schema_describes_every_section(graft):
    code, out, _ = graft("schema")
    assert code == 0
    assert {"project", "base", "data", "train", "gate", "serve"} <= json.loads(out)["properties"].keys()


def test_releases_of_a_fresh_project(graft, project):
    code, out, _ = graft("release", "list", "-C", project, "--json")
    assert (code, json.loads(out)) == (0, {"releases": [], "aliases": {}})
    code, out, _ = graft("release", "rollback", "-C", project, "--json")
    assert code == 2
    assert "nothing to roll champion back to" in error_of(out)["what"]
    code, out, _ = graft("release", "show", "abcdef", "-C", project, "--json")
    assert code == 2


def test_status_of_a_fresh_project_says_not_yet(graft, project):
    code, out, _ = graft("status", "-C", project, "--json")
    assert code == 0
    assert all(step["finished_at"] is None for step in json.loads(out)["steps"])


def test_doctor_finds_this_machine_fit(graft, project):
    code, out, _ = graft("doctor", "-C", project, "--json")
    assert code == 0, out
    assert {"python", "memory", "disk", "database"} <= {check["name"] for check in json.loads(out)}


def test_a_state_folder_that_cannot_be_written_is_an_environment_error(graft, project):
    (project / ".graft").write_text("a file where a folder should be")
    code, out, _ = graft("status", "-C", project, "--json")
    assert code in (2, 3)
    assert error_of(out)["where"]


@pytest.mark.parametrize(
    "verb",
    [
        ["run"], ["init"], ["data", "audit"], ["data", "prepare"], ["data", "captures"], ["plan"], ["train"],
        ["eval"], ["gate"], ["release", "list"], ["release", "show"], ["release", "promote"],
        ["release", "rollback"], ["serve"], ["status"], ["doctor"], ["schema"],
    ],
)  # fmt: skip
def test_every_verb_has_help_with_an_example(graft, verb):
    code, out, _ = graft(*verb, "--help")
    assert code == 0
    assert "Example:" in out
    assert verb == ["schema"] or "--json" in out


def test_every_misspelt_key_is_named_with_its_line_in_one_go(graft, tmp_path):
    (tmp_path / "log.jsonl").write_text(GOOD_ROW)
    (tmp_path / "graft.yaml").write_text(f"{PROJECT}  sead: 3\ntrain:\n  epocs: 1\n  rnak: 8\n")
    code, out, _ = graft("status", "-C", tmp_path, "--json")
    error = error_of(out)
    assert code == 2
    assert "data.sead" in error["what"]
    assert "train.epocs (line 6): unknown key" in error["why"]
    assert "train.rnak (line 7): unknown key" in error["why"]


def test_every_setting_of_serving_and_captures_is_described_in_the_schema(graft):
    _, out, _ = graft("schema")
    parts = json.loads(out)["$defs"]
    for name in ("ServeSettings", "SplitSettings", "CaptureSettings"):
        lacking = [key for key, value in parts[name]["properties"].items() if not value.get("description")]
        assert lacking == [], name


@pytest.mark.parametrize("verb", [["--help"], ["data", "audit", "log.jsonl"]])
def test_a_reader_that_leaves_early_is_no_error(project, verb):
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_EARLY, *verb],
        cwd=project, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Broken" not in done.stderr
    assert "Traceback" not in done.stderr


# Standard output is a pipe that nobody reads any more, as after `| head -0`.
LEAVES_EARLY = """
import os, sys
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
os.close(reading)
sys.argv[0] = "graft"
from graftwork.cli.main import main
main()
"""


def test_a_missing_part_is_installed_from_where_this_installation_came(monkeypatch):
    monkeypatch.setattr(
        metadata, "distribution", lambda _name: Installed('{"url": "file:///src/my%20graft"}')
    )
    assert pip_install("train") == 'pip install "/src/my graft[train]"'
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(None))
    assert pip_install("train") == 'pip install ".[train]" in a checkout of graftwork'


class Installed:
    def __init__(self, message):
        self.message = message

    def read_text(self, _name):
        return self.message


def test_records_of_an_array_on_one_line_are_not_named_by_one_number_many_times(graft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Question {n} of {n}?", "completion": "Mock response"} for n in range(5)]
    (tmp_path / "log.json").write_text(json.dumps(rows))
    _, out, _ = graft("data", "audit", "log.json")
    assert "1, 1" not in out
    assert "5 rows there" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--json", "catalog"], ["train", "--detach", "sweep"], ["serve", "--port", "1", "keys"]],
)
def test_an_option_before_the_command_of_a_group_is_refused_instead_of_ignored(graft, arguments):
    code, _, err = graft(*arguments)
    assert code == 2
    assert f"{arguments[1]} comes before the command" in err
