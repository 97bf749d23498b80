"""What a run that has ended shows on a terminal."""

from io import StringIO

from registry_samples import outcome, write_adapter
from rich.console import Console

from graftwork.cli.progress import RichReporter
from graftwork.records.base import Figure
from graftwork.records.plan import Drift


def test_what_left_its_planned_range_is_said_once(tmp_path):
    drift = Drift(
        figure="minutes", planned=Figure(value=1, low=0.5, high=2), actual=3, says="time came to 3 min"
    )
    ended = outcome(write_adapter(tmp_path / "adapter")).model_copy(update={"drifts": (drift,)})
    console = Console(width=200, file=StringIO())
    reporter = RichReporter(console)
    reporter.started("train", "train the adapter")
    reporter.info(f"outside the planned range: {drift.says}")
    reporter.finished("train", ended, 1.0)
    assert console.file.getvalue().count("time came to 3 min") == 1
