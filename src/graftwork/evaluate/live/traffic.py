"""`graft release ab`: what was asked, and the comparison that answers it.

Input: an open project and an `ABRequest`. Output: an ABResult, or a ShadowSummary where no releases are
named. `comparison.py` compares on cases and on live traffic, `shadow.py` on its copies.
"""

from dataclasses import dataclass
from pathlib import Path

from graftwork.evaluate.live.ab import ABResult
from graftwork.evaluate.live.comparison import compare_live, compare_replayed, watch_live
from graftwork.evaluate.live.shadow import compare_shadow, summarize_shadow
from graftwork.project.open_project import OpenProject
from graftwork.records.errors import UserError
from graftwork.records.live import ShadowSummary


@dataclass(frozen=True, kw_only=True)
class ABRequest:
    """The request of `graft release ab`; shadow traffic needs no releases."""

    a: str | None = None
    b: str | None = None
    traffic: str = "captures"
    cases: Path | None = None
    metric: str | None = None
    experiment: str | None = None
    watch: bool = False
    every_seconds: float = 5.0


def compare(work: OpenProject, asked: ABRequest) -> ABResult | ShadowSummary:
    """Compare two releases on cases, on live traffic or on its copies; or every check of shadow traffic."""
    _require_fitting_options(asked)
    a, b, metric, experiment = asked.a, asked.b, asked.metric, asked.experiment
    if asked.traffic == "shadow" and a is None:
        summary = summarize_shadow(work)
        if summary is None:
            raise UserError(
                "no shadow traffic is set up",
                why="a challenger answers copies of live requests only if graft.yaml says so",
                fix="add `shadow: {to: challenger, models: [champion]}` under serve",
                where="serve.shadow",
            )
        return summary
    if a is None or b is None:
        raise UserError(
            "a comparison needs two releases",
            why="only `--traffic shadow` compares without naming them",
            fix="specify two releases: `graft release ab champion challenger`",
        )
    if asked.cases is not None:
        return compare_replayed(work, a, b, cases_file=asked.cases, metric=metric)
    if asked.traffic == "shadow":
        return compare_shadow(work, a, b, metric=metric)
    if asked.watch:
        return watch_live(work, a, b, metric=metric, experiment=experiment, every_seconds=asked.every_seconds)
    return compare_live(work, a, b, metric=metric, experiment=experiment)


def _require_fitting_options(asked: ABRequest) -> None:
    is_live_only = asked.watch or asked.experiment is not None
    if asked.traffic not in ("captures", "shadow"):
        raise UserError(
            f"unknown traffic {asked.traffic!r}",
            fix="use --traffic captures, --traffic shadow, or --cases FILE",
            where="--traffic",
        )
    option, others = ("--traffic shadow", "--cases, --watch or --experiment")
    is_wrong = asked.traffic == "shadow" and (asked.cases is not None or is_live_only)
    if not is_wrong and asked.cases is not None:
        option, others, is_wrong = "--cases", "--watch or --experiment", is_live_only
    if asked.traffic == "shadow" and asked.a is None and asked.metric is not None:
        option, others, is_wrong = "--metric", "--traffic shadow without two releases", True
    if is_wrong:
        raise UserError(f"{option} cannot be combined with {others}", fix="omit one of them", where=option)
