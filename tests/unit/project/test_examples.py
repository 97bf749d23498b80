"""Every example's graft.yaml reads, and the logs that a script writes are the ones that are there."""

import runpy
from pathlib import Path

import pytest

from graftwork.project.load import load_settings

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in EXAMPLES.glob("*/graft.yaml")))
def test_the_settings_of_an_example_read(folder):
    settings = load_settings(EXAMPLES / folder / "graft.yaml")
    assert all((EXAMPLES / folder / log).exists() for log in settings.data.logs)


def test_the_sessions_of_the_seven_models_are_written_by_their_script(tmp_path):
    written = EXAMPLES / "seven_models" / "logs" / "sessions.jsonl"
    script = tmp_path / "make_log.py"
    script.write_text((EXAMPLES / "seven_models" / "make_log.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "logs" / "sessions.jsonl").read_bytes() == written.read_bytes()
