"""`graft data trace, show, diff, export`: found by name, printed as text or as one JSON document."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from graftwork.cli.data import app
from graftwork.data.inspect import TokenDecoder, show_rows
from graftwork.model.base import find_base
from graftwork.records.dataset import Drop
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.interaction import Origin
from graftwork.views.dataset import view_rows
from graftwork.views.terminal import print_document

sys.path.append(str(Path(__file__).parents[1] / "data"))
from dataset_samples import row, write_dataset, write_tokenizer

LINE = b'{"prompt": "Where is the fern?", "completion": "By the pond."}'


@pytest.fixture
def data(capsys):
    """Run a verb; gives back what it printed, read as JSON where that was asked for."""

    def run(*arguments):
        app([str(argument) for argument in arguments], standalone_mode=False)
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in arguments else out

    return run


@pytest.fixture
def project(tmp_path):
    (tmp_path / "graft.yaml").write_text("project: p\nbase: base\ndata:\n  logs: [log.jsonl]\n")
    (tmp_path / "log.jsonl").write_bytes(LINE + b"\n")
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (base / name).write_text("{}")
    (base / "model.safetensors").write_bytes(b"no weights")
    write_tokenizer(base / "tokenizer.json")
    return tmp_path


@pytest.fixture
def dataset(project):
    return write_dataset(
        project / ".graft" / "datasets",
        train=[
            row("Where is the fern?", "By the pond.", raw=LINE),
            row("Und der Käse?", "Im [bold]Keller\x1b[31m.", line=2),
        ],
        test=[row("Who?", "[/] nobody", line=3)],
        drops=[
            Drop(origin=Origin(file="log.jsonl", line=4), step="duplicate", reason="the same as log.jsonl:1")
        ],
        base="base",
        base_fingerprint=find_base("base", project_folder=project).revision,
    )


@pytest.fixture
def prepared(project, dataset):
    """A project whose ledger knows its dataset."""
    from graftwork.project.folder import open_project
    from graftwork.project.open_project import timestamp, use_project
    from graftwork.project.reporter import NullReporter

    with use_project(open_project(project), NullReporter()) as work:
        work.ledger.put(
            "prepare", fingerprint="f", output={"folder": str(dataset)}, finished_at=timestamp(), seconds=1.0
        )
    return project


def test_the_latest_dataset_is_meant_when_none_is_named(data, prepared, dataset):
    found = data("trace", "log.jsonl:1", "-C", prepared, "--json")
    assert found["dataset"] == dataset.name
    assert found["rows"][0]["log"]["state"] == "same"


def test_a_dataset_is_found_by_folder_and_by_the_beginning_of_its_hash(data, project, dataset):
    for name in (dataset, dataset.name[:6]):
        found = data("trace", "train:1", "--dataset", name, "-C", project, "--json")
        assert found["rows"][0]["place"]["origin"] == {"file": "log.jsonl", "line": 2}


def test_a_folder_needs_no_project(data, dataset, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    found = data("trace", "train:0", "-d", dataset, "-C", elsewhere, "--json")
    assert found["rows"][0]["log"]["state"] == "gone"


@pytest.mark.parametrize("name", ["ffffffff-none", "", "no/such/folder"])
def test_a_dataset_that_is_not_there_is_a_mistake(data, project, dataset, name):
    with pytest.raises(UserError, match="no dataset"):
        data("trace", "train:0", "-d", name, "-C", project)


def test_a_project_without_a_dataset_is_asked_to_prepare(data, project):
    with pytest.raises(UserError) as caught:
        data("show", "-C", project)
    assert caught.value.fix == "run `graft data prepare`"


def test_an_ambiguous_hash_is_a_mistake(data, project, dataset):
    shutil.copytree(dataset, dataset.with_name(dataset.name[:8] + "0" * 56))
    with pytest.raises(UserError, match="several datasets"):
        data("trace", "train:0", "-d", dataset.name[:8], "-C", project)


def test_a_token_is_traced_even_where_the_base_model_is_gone(data, prepared):
    (prepared / "base" / "tokenizer.json").unlink()
    out = data("trace", "train:0:0", "-C", prepared, "--json")
    assert out["rows"][0]["token"]["text"] is None


def test_show_marks_what_is_trained_on(data, prepared):
    out = data("show", "-n", 1, "--plain", "-C", prepared)
    assert "<|user|>Where is the fern?<|end|><|assistant|>⟦By the pond.<|end|>⟧" in out
    assert "log.jsonl:1" in out


def test_on_a_terminal_the_trained_text_is_green_and_control_tokens_are_dim(prepared, dataset):
    decoder = TokenDecoder(prepared / "base" / "tokenizer.json")
    terminal = Console(file=StringIO(), force_terminal=True, color_system="standard", width=200)
    print_document(terminal, view_rows(show_rows(dataset, decoder=decoder, rows=1)))
    out = terminal.file.getvalue()
    assert "\x1b[1;32mBy the pond." in out
    assert "\x1b[2m<|user|>\x1b[0mWhere is the fern?" in out


def test_show_obeys_no_markup_and_no_control_characters_of_the_log(data, prepared):
    for extra in ((), ("--plain",), ("--tokens",)):
        out = data("show", "-n", 2, "-C", prepared, *extra)
        assert "\x1b[31m" not in out
        assert "[bold]Keller␛[31m." in out.replace("│", "")


def test_show_as_json_holds_pieces_with_flags(data, prepared, dataset):
    shown = data("show", "--row", "log.jsonl:3", "-C", prepared, "--json")
    (one,) = shown["rows"]
    assert (shown["dataset"], one["split"]) == (dataset.name, "test")
    assert [(piece["text"], piece["trained"]) for piece in one["pieces"] if piece["trained"]] == [
        ("[/] nobody", True),
        ("<|end|>", True),
    ]
    by_token = data("show", "--row", "log.jsonl:3", "--tokens", "-C", prepared, "--json")["rows"][0]["pieces"]
    assert len(by_token) == one["tokens"]


def test_show_refuses_a_base_model_that_is_not_the_datasets(data, prepared):
    (prepared / "base" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(EnvironmentFailure, match="another version"):
        data("show", "-C", prepared)


def test_diff_reports_what_changed(data, project, dataset):
    other = write_dataset(
        project / ".graft" / "datasets", train=[row("Who?", "[/] nobody", line=3)], settings={"seed": 1}
    )
    found = data("diff", dataset.name, other.name[:8], "-C", project, "--json")
    assert (found["rows"]["moved"], found["rows"]["removed"]) == (1, 2)
    out = data("diff", dataset, other, "-C", project)
    for word in ("seed", "1 moved", "2 removed", "duplicate", "log.jsonl:3"):
        assert word in out
    assert "the same dataset" in data("diff", dataset, dataset, "-C", project)


def test_export_writes_the_folder_and_says_which_files(data, prepared, tmp_path):
    out = data("export", "openai", "--out", tmp_path / "out", "-C", prepared)
    assert "train.jsonl" in out
    assert (tmp_path / "out" / "train.jsonl").is_file()
    made = data("export", "sagemaker", "-o", tmp_path / "sm", "--split", "test", "-C", prepared, "--json")
    assert (made["folder"], made["splits"]) == (str(tmp_path / "sm"), {"test": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "parquet", "--out", "x"),
        ("export", "openai", "--out", "x", "--split", "dev"),
        ("show", "--split", "dev"),
    ],
)
def test_an_unknown_format_or_split_is_a_mistake_with_the_known_ones(data, prepared, arguments):
    with pytest.raises(UserError) as caught:
        data(*arguments, "-C", prepared)
    assert "one of" in caught.value.fix
