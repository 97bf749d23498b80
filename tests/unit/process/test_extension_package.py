"""The example package of docs/extending.md adds a format and a metric to an installed graftwork."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import graftwork
from graftwork.data.ingest.read import load_format
from graftwork.grading.metrics import find_extension, find_grader
from graftwork.process.extensions import extension_names
from graftwork.records.interaction import Origin

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "examples" / "extension_package"
PAGE = (ROOT / "docs" / "extending.md").read_text()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package as pip lays it down: its module and its dist-info, from its own pyproject.toml."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    for module in (PACKAGE / "src").glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for cached in (load_format, find_extension):
        cached.cache_clear()
    yield project
    for cached in (load_format, find_extension):
        cached.cache_clear()
    sys.modules.pop("graftwork_helpdesk", None)


def test_listing_extensions_imports_none_of_them(installed):
    assert "helpdesk" in extension_names("graftwork.formats")
    assert "polite" in extension_names("graftwork.metrics")
    assert "graftwork_helpdesk" not in sys.modules


def test_an_installed_format_reads_rows(installed):
    form = load_format("helpdesk")
    row = {"ticket": "Where is my parcel?", "resolution": "It arrives today.", "queue": "parcels"}
    assert form.fits(row)
    assert not form.fits({"prompt": "x"})
    (interaction,) = form.read(row, Origin(file="log.jsonl", line=1))
    assert (interaction.question, interaction.reply, interaction.group) == (
        "Where is my parcel?",
        "It arrives today.",
        "parcels",
    )


def test_an_audit_reads_a_log_in_an_installed_format(installed, tmp_path):
    log = tmp_path / "tickets.jsonl"
    log.write_text('{"ticket": "Where is my parcel?", "resolution": "It arrives today."}\n')
    (tmp_path / "graft.yaml").write_text("project: p\ndata: {logs: [tickets.jsonl], format: helpdesk}\n")
    audit = graftwork.open_project(tmp_path).audit()
    assert (audit.rows, audit.readable) == (1, 1)


def test_an_installed_metric_grades_an_answer(installed):
    grade = find_grader("polite")
    assert grade is not None
    assert grade(None, "Thank you for waiting.", None) == 1
    assert grade(None, "No.", None) == 0


def test_the_page_shows_the_entry_points_of_the_package_and_its_python_runs(installed, capsys):
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert tomllib.loads(shown)["project"]["entry-points"] == installed["entry-points"]
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(block, "docs/extending.md", "exec"), {})
    assert "ticket and resolution" in capsys.readouterr().out


def test_the_page_names_every_group():
    from typing import get_args

    from graftwork.process import extensions

    assert [group for group in get_args(extensions.Group) if f"`{group}`" not in PAGE] == []
