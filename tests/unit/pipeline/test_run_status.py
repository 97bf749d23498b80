"""How a run that should be working is, as far as its entry says it."""

from sample_plans import make_plan

from graftwork.pipeline.status import describe_run
from graftwork.store.runs import RunEntry


def test_a_run_that_another_version_planned_still_has_its_health(tmp_path):
    plan = make_plan().model_dump(mode="json")
    entry = RunEntry(
        id="r1",
        state="running",
        folder=str(tmp_path),
        created_at="2026-11-01",
        updated_at="2026-11-01",
        plan={**plan, "tuning": {"a_key_of_another_version": 1}},
    )
    status = describe_run(entry)
    assert status.health == "gone"
    assert status.expected_minutes == plan["minutes"]["value"]
