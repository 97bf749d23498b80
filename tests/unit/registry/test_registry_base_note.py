"""The recipient of a release learns which weights its base has."""

import json
from io import StringIO

from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, plan, publish_parts, write_adapter
from rich.console import Console

from graftwork.cli.progress import RichReporter
from graftwork.model.base import EMBEDDED, HUB_ID, note_on_weights
from graftwork.views.terminal import show


def card_of(folder, *, base):
    made = {**parts(write_adapter(folder / "adapter")), "base": base}
    release = publish_parts(folder=folder / "releases", index=InMemoryReleaseIndex(project=PROJECT), **made)
    return (folder / "releases" / release.id / "README.md").read_text()


def test_the_card_names_the_hub_id_and_says_that_the_weights_are_others(tmp_path):
    card = card_of(tmp_path, base=EMBEDDED)
    assert f"base_model: {json.dumps(HUB_ID)}" in card
    assert "not the official one" in card
    assert "expanded to float32" in card
    assert "graft release export --base" in card
    assert f"from_pretrained('{EMBEDDED}')" not in card


def test_the_card_of_another_base_loads_it_by_its_name(tmp_path):
    card = card_of(tmp_path, base="models/own")
    assert "not the official one" not in card
    assert "from_pretrained('models/own')" in card


def test_a_plan_on_the_embedded_base_shows_the_note():
    console = Console(file=StringIO(), width=600)
    show(console, plan().model_copy(update={"base_note": note_on_weights(EMBEDDED)}))
    assert "expanded to float32" in console.file.getvalue()


def test_a_run_that_shows_the_plan_says_the_note_once():
    out = StringIO()
    with RichReporter(Console(file=out, width=600, force_terminal=False)) as reporter:
        reporter.finished("plan", plan().model_copy(update={"base_note": note_on_weights(EMBEDDED)}), 1.0)
        reporter.info(note_on_weights(EMBEDDED))
        reporter.info("another remark")
    assert out.getvalue().count("expanded to float32") == 1
    assert "another remark" in out.getvalue()
