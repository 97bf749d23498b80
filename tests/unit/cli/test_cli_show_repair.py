"""What `graft data repair` prints."""

import io

import pytest
from rich.console import Console

from graftwork.data.repair.project import revise_repair
from graftwork.data.settings import RepairSettings
from graftwork.records.dataset import RepairOutcome, RepairPlan, RepairRow, TeacherSpending
from graftwork.records.errors import UserError
from graftwork.records.interaction import Origin
from graftwork.views.terminal import show


def row(line, state, *, fault="truncated", why="", group="coder"):
    return RepairRow(
        origin=Origin(file="log.jsonl", line=line),
        group=group,
        fault=fault,
        reason="cut off",
        state=state,
        why=why,
        tokens_in=70 if state == "ask" else 0,
    )


def plan(*rows, **changes):
    values = {
        "teacher": "large",
        "faults": {"truncated": len(rows)},
        "rows": rows,
        "prompts": 1,
        "requests": 1,
        "cached": 0,
        "tokens_in": 70,
        "tokens_out": 100,
        "tokens_out_at_most": 200,
        "cost": 0.0036,
        "cost_at_most": 1.5,
        "usable": 91,
    }
    return RepairPlan(**{**values, **changes})


def outcome(**changes):
    values = {
        "teacher": "large",
        "file": "repaired.jsonl",
        "rows": (row(1, "over_budget"),),
        "written": 0,
        "states": {"over_budget": 1},
        "spent": TeacherSpending(requests=24, tokens_in=2400, tokens_out=1584, cost=0.0036),
        "usable_before": 91,
        "in_logs": True,
    }
    return RepairOutcome(**{**values, **changes})


def printed(record):
    console = Console(file=io.StringIO(), width=120)
    show(console, record)
    return " ".join(console.file.getvalue().split())


def test_rows_to_ask_are_listed_first_and_states_are_words():
    done = [row(number, "cached") for number in range(1, 20)]
    text = printed(plan(*done, row(99, "ask")))
    assert "line 99 truncated coder to be asked 70" in text
    assert "answered before" in text


def test_small_sums_are_not_rounded_to_nothing():
    assert "estimated cost: $0.0036, at most $1.50" in printed(plan())
    assert "1,584 out, $0.0036" in printed(outcome())


def test_a_spent_budget_is_not_answered_with_the_same_command():
    text = printed(outcome())
    assert "1 row is not decided: raise the budget (--max-cost or --max-total-tokens)" in text
    waiting = printed(outcome(states={"unanswered": 2}))
    assert "2 rows are not decided: run the same command again" in waiting


@pytest.mark.parametrize("named", ["nonsense", "champion", "https://host/v1"])
def test_what_is_no_teacher_is_refused_as_a_teacher(named):
    with pytest.raises(UserError, match="is not a valid teacher") as refused:
        revise_repair(RepairSettings(), named, [], None, {})
    assert refused.value.where == "--teacher"
