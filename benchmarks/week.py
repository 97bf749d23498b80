"""The week of examples/week: gap, first plan, replanning, and the document's own proposal.

    python benchmarks/week.py [--seconds 30]

Prints wall and processor seconds: on a shared machine, 30 seconds of two cores are 60 processor seconds.
"""

import argparse
import os
import time
from datetime import date, timedelta
from pathlib import Path

from graftwork.project.folder import open_project
from graftwork.week.plan import plan_week
from graftwork.week.problem import Effort, WeekState
from graftwork.week.project import WeekRequest, compare_proposal, week_problem
from graftwork.week.replan import WeekEvent, sessions_ahead, state_after

EXAMPLE = Path(__file__).parents[1] / "examples" / "week"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--scenario", default="auto")
    asked_for = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    project = open_project(EXAMPLE)
    for only in ((), ("kaggle", "studio-lab")):
        asked = WeekRequest(start=date(2026, 11, 21), only=only)
        problem = week_problem(project, asked)
        print(
            f"\n{', '.join(only) or 'all places'}: {len(problem.models)} models, {len(problem.places)} places"
        )
        effort = Effort(seconds=asked_for.seconds, scenario=asked_for.scenario, what_if=False)
        wall, processor = time.monotonic(), time.process_time()
        schedule = plan_week(problem, WeekState(), effort)
        wall, processor = time.monotonic() - wall, time.process_time() - processor
        print(f"planned in {wall:.1f} s, {processor:.1f} s of processor")
        for found in schedule.scenarios:
            greedy = "none" if found.greedy_value is None else f"{found.greedy_value:.2f}"
            print(
                f"  {found.scenario:10} value {found.value:6.2f}  bound {found.bound:6.2f}  "
                f"gap {100 * found.gap:4.1f} %  greedy {greedy}  first plan {found.first_seconds:.2f} s"
            )
        proposal = compare_proposal(project, asked, schedule, EXAMPLE / "proposal.json")
        print(
            f"  proposal {proposal.value:.2f}, ahead {100 * proposal.ahead:.0f} %; breaks {proposal.broken}"
        )
        now = problem.start + timedelta(days=2, hours=9)
        event = WeekEvent(kind="quota", at=now, place="kaggle", used_hours=20)
        state = state_after(problem, schedule, [event], now)
        wall, processor = time.monotonic(), time.process_time()
        short = Effort(seconds=4.0, scenario=schedule.scenario, what_if=False)
        again = plan_week(problem, state, short, sessions_ahead(schedule, state))
        print(
            f"  replanned in {time.monotonic() - wall:.1f} s, {time.process_time() - processor:.1f} s of "
            f"processor: value {again.value:.2f}, bound {again.bound:.2f}, gap {100 * again.gap:.1f} %"
        )


if __name__ == "__main__":
    main()
