"""The week: who trains when and where, over quotas, windows, sessions and a budget.

    from graftwork.week.plan import plan_week
    schedule = plan_week(problem, state, effort)

Input: a `WeekProblem` (problem.py: places with quotas, windows, session limits, prices; models with curves,
dependencies, gates), a `WeekState` (what has happened and runs: `replan.state_after` makes it from an earlier
schedule and events), an `Effort` (seconds, workers, scenario). Output: a `WeekSchedule` (records/week.py)
whose sessions keep every rule (`checker.check_week`), or `WeekImpossible` with the rules that conflict. Pure
but for the solver's time limit; needs the extra `week` (OR-tools).
"""
