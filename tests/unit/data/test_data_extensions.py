"""Formats and exporters of installed packages, and how many modules prepare one row."""

import json
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import FeatureTask, extract_features
from graftwork.data.export.formats import load_exporter
from graftwork.data.ingest import read
from graftwork.data.ingest.files import cut_blocks
from graftwork.data.ingest.read import read_file
from graftwork.data.render.rows import RenderTask, SubsetRows, init_worker, render_block
from graftwork.data.settings import DataSettings
from graftwork.process import extensions
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.interaction import Interaction, Message

MOST_MODULES = 20


class TicketFormat:
    """A row format as another package would write it."""

    expects = "ticket and resolution"

    def fits(self, row):
        return "ticket" in row

    def read(self, row, origin):
        asked = (Message(role="user", content=row["ticket"]),)
        return [Interaction(id=str(origin), origin=origin, messages=asked, reply=row["resolution"])]


class Incomplete:
    expects = "nothing"


@pytest.fixture
def declare(monkeypatch):
    """Declare entry points as an installed package would."""

    def declare(group, **objects):
        points = metadata.EntryPoints(
            metadata.EntryPoint(name, f"{__name__}:{value}", group) for name, value in objects.items()
        )
        monkeypatch.setattr(extensions.metadata, "entry_points", points.select)
        read.load_format.cache_clear()

    yield declare
    read.load_format.cache_clear()


def test_a_format_of_an_installed_package_reads_rows(declare, tmp_path):
    declare("graftwork.formats", ticket="TicketFormat_object")
    (tmp_path / "log.jsonl").write_text('{"ticket": "It is broken.", "resolution": "Restart it."}\n')
    settings = DataSettings(format="ticket")
    (row,) = read_file("log.jsonl", root=tmp_path, settings=settings)
    assert (row.question, row.reply) == ("It is broken.", "Restart it.")


def test_a_row_that_does_not_fit_a_named_extension_says_what_was_expected(declare, tmp_path):
    declare("graftwork.formats", ticket="TicketFormat_object")
    (tmp_path / "log.jsonl").write_text('{"prompt": "a?", "completion": "b"}\n')
    (fault,) = read_file("log.jsonl", root=tmp_path, settings=DataSettings(format="ticket"))
    assert "expected ticket and resolution" in fault.message


def test_an_unknown_format_is_refused_with_the_known_names(declare):
    declare("graftwork.formats", ticket="TicketFormat_object")
    with pytest.raises(ValidationError, match=r"openai_log.*ticket"):
        DataSettings(format="tikket")


def test_an_incomplete_format_names_what_it_lacks(declare):
    declare("graftwork.formats", half="Incomplete")
    with pytest.raises(EnvironmentFailure, match="fits, read"):
        read.load_format("half")


def test_an_exporter_of_an_installed_package_is_loaded_by_its_name(declare):
    declare("graftwork.exporters", ours="EXPORTER")
    assert load_exporter("ours") is EXPORTER
    with pytest.raises(UserError, match="unknown export format: 'theirs'") as caught:
        load_exporter("theirs")
    assert "openai" in caught.value.fix
    assert "ours" in caught.value.fix


class FixedRenderer:
    def render_batch(self, conversations):
        return [SimpleNamespace(tokens=list(range(20)), trained_from=10) for _ in conversations]


def test_preparing_one_row_passes_few_modules(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "Write to a@b.example?"},
            {"role": "assistant", "content": "I did."},
        ]
    }
    (tmp_path / "log.jsonl").write_text(json.dumps(row) + "\n")
    settings = DataSettings()
    passed: set[str] = set()

    def prepare_row(name):
        (tmp_path / name).mkdir()
        (block,) = cut_blocks("log.jsonl", root=tmp_path)
        features = tmp_path / f"{name}.arrow"
        extract_features(FeatureTask(block, features, AuditContext(settings=settings)))
        subset = SubsetRows(np.zeros(1, np.uint8), np.ones(1), staged=False)
        render_block(RenderTask(features, np.array([0]), "log.jsonl", 1, {"main": subset}, tmp_path / name))

    init_worker(FixedRenderer(), settings)
    prepare_row("warm")  # imports and caches
    sys.setprofile(lambda frame, event, _: passed.add(frame.f_globals.get("__name__", "")))
    try:
        prepare_row("counted")
    finally:
        sys.setprofile(None)
    modules = sorted(name for name in passed if name.startswith("graftwork."))
    # How files and records are stored is not the data stage's.
    assert len([name for name in modules if name.split(".")[1] in ("data", "text")]) <= MOST_MODULES, modules


TicketFormat_object = TicketFormat()
EXPORTER = SimpleNamespace(check_options=None, add_row=None, finish=None)
