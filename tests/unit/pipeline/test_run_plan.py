"""The whole run in time, before anything is prepared."""

import json
from pathlib import Path

from graftwork.api.project import open_project

SETTINGS = "project: p\nbase: smollm2-135m-instruct\ndata:\n  logs: [log.jsonl]\n"


def plan_training(root: Path, rows: list[dict]) -> float:
    root.mkdir()
    (root / "graft.yaml").write_text(SETTINGS)
    (root / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = open_project(root).plan_run()
    return next(stage.seconds.value for stage in plan.stages if stage.stage == "train")


def test_a_rough_estimate_counts_text_and_not_ids_and_times(tmp_path):
    messages = [
        {"role": "user", "content": "where is the key of the shed kept " * 4},
        {"role": "assistant", "content": "on the hook next to the door"},
    ]
    plain = [{"messages": messages} for _ in range(60)]
    with_ids = [{"id": "0123456789abcdef" * 20, "messages": messages} for _ in range(60)]
    bare = plan_training(tmp_path / "plain", plain)
    assert abs(plan_training(tmp_path / "ids", with_ids) - bare) < 0.1 * bare
