"""The doctor's dry run: ten real steps, a checkpoint read back, and nothing left behind."""

from graftwork.pipeline.dry_run import STEPS, check_dry_run
from graftwork.project.doctor import examine
from graftwork.project.folder import open_project


def test_ten_steps_are_trained_and_their_checkpoint_is_read_back(small_project, listener, monkeypatch):
    # A dry run must not enter its run into the team's database, even where one is named.
    monkeypatch.setenv("GRAFT_DATABASE_URL", "sqlite:////nowhere/at/all.db")
    project = open_project(small_project)
    checks = {check.name: check for check in check_dry_run(project, listener)}
    assert {name: check.result for name, check in checks.items()} == {
        "dry run": "ok",
        "checkpoint": "ok",
        "base unchanged": "ok",
    }
    assert checks["dry run"].found.startswith(f"{STEPS} steps")
    assert f"step {STEPS}" in checks["checkpoint"].found
    assert list(project.state.iterdir()) == []


def test_a_dry_run_that_fails_is_missing_with_its_reason(small_project, listener):
    (small_project / "graft.yaml").write_text(
        (small_project / "graft.yaml").read_text() + "plan: {memory_limit_gib: 0.001}\n"
    )
    (check,) = check_dry_run(open_project(small_project), listener)
    assert (check.name, check.result) == ("dry run", "missing")
    assert check.fix


def test_no_dry_run_is_made_unless_somebody_asks(small_project):
    assert "dry run" not in {check.group for check in examine(open_project(small_project))}
