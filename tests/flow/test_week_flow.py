"""`graft up week` on a small project: a session here, trained to its end, judged and released."""

import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from flows import opened
from typer.testing import CliRunner

from graftwork.cli.main import make_app
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.plan import Plan
from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.week.follow import ProjectWeek, WeekData, follow_once, week_status
from graftwork.week.project import write_schedule


def schedule(model):
    now = datetime.now(tz=UTC)
    start = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    begin = int((now - start).total_seconds() // 60) - 1
    session = ShownSession(
        place="here", model=model, start=begin, end=begin + 120, train=100,
        starts_at=start + timedelta(minutes=begin), ends_at=start + timedelta(minutes=begin + 120),
        hours=1.6, cost_usd=0.0, by_hand=False,
    )  # fmt: skip
    return WeekSchedule(
        start=start, end=start + timedelta(days=7), now=now, timezone="UTC", scenario="parallel",
        sessions=(session,), models=(), places=(), value=1.0, bound=1.0, gap=0.0, optimal=True, cost_usd=0.0,
        cap_usd=None, scenarios=(),
    )  # fmt: skip


@pytest.mark.slow
def test_a_session_trains_here_and_its_model_is_judged_and_released(small_project, change_settings):
    change_settings(small_project, fleet={"places": {"here": {"place": "local", "speed": 1.0}}})
    with opened(small_project) as work:
        with pytest.raises(UserError, match="no week is planned"):
            ProjectWeek(work).load()
        write_schedule(small_project / "week.json", schedule(work.settings.main_model))
        assert [session.place for session in week_status(work).due] == ["here"]
        first = follow_once(work)
        assert len(first.started) == 1
        while not (tick := follow_once(work)).judged:
            assert not tick.started
        assert tick.judged == (f"{work.settings.main_model}: passed",)
        assert [session.state for session in ProjectWeek(work).load().sessions] == ["judged"]
        assert "champion" in work.releases.aliases()
        assert follow_once(work).next_at is None
    shown = CliRunner().invoke(
        make_app(("up",)), ["up", "week", "--dry-run", "--json", "-C", str(small_project)]
    )
    assert json.loads(shown.stdout)["sessions"][0]["state"] == "judged"


class Heard(NullReporter):
    def __init__(self):
        self.lines = []

    def info(self, text):
        self.lines.append(text)


def test_a_week_goes_on_with_the_data_that_it_began_with_and_the_next_one_takes_the_new_logs(small_project):
    heard = Heard()
    monday = datetime(2026, 11, 16, tzinfo=UTC)
    with opened(small_project, heard) as work:
        main = work.settings.main_model
        week = WeekData(work, monday, [main])
        before = week.outputs_of(main)
        log = small_project / "logs" / "log.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:-3]))
        week.report_changes()
        week.report_changes()
        assert sum("the logs have changed" in line for line in heard.lines) == 1
        assert week.outputs_of(main) == before
        # A session that runs into the next week is judged on what it was trained on.
        following = monday + timedelta(days=7)
        assert WeekData(work, following, [main], frozenset({main})).outputs_of(main) == before
        after = WeekData(work, following, [main]).outputs_of(main)
    assert after.get("plan", Plan).dataset_hash != before.get("plan", Plan).dataset_hash


def test_data_of_a_week_that_were_deleted_are_made_again(small_project):
    with opened(small_project) as work:
        main = work.settings.main_model
        week = WeekData(work, datetime(2026, 11, 16, tzinfo=UTC), [main])
        before = week.outputs_of(main)
        shutil.rmtree(work.project.datasets)
        assert week.outputs_of(main).get("plan", Plan) == before.get("plan", Plan)
        assert work.project.datasets.exists()
