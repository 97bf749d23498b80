"""How fast the models of a project learn, from the losses of its own runs.

In: the project's finished runs with their journals. Out: reference hours until half of what a run could gain
was gained, by the name of the model. Models without a run whose losses show it are left out.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from graftwork.pipeline.open_project import OpenProject, use_project
from graftwork.pipeline.reporter import NullReporter
from graftwork.plan.week.curves import FittedCurve, bin_losses, combine, fit_curve
from graftwork.project.load import ProjectFolder
from graftwork.records.run import TrainStep
from graftwork.store.runs import RunEntry
from graftwork.train.run_folder import read_steps

Clock = Callable[[Sequence[TrainStep]], list[float]]
"""Reference hours at the end of each step."""


def fit_project_curves(project: ProjectFolder, clock: Clock) -> dict[str, float]:
    """Nothing is created: a project that never ran has no curves."""
    if not (project.state / "runs").is_dir():
        return {}
    curves: dict[str, list[FittedCurve]] = defaultdict(list)
    with use_project(project, NullReporter()) as work:
        names = _models_by_dataset(work)
        for run in work.runs.list():
            model = names.get(_dataset_of(run))
            made = _fit(run, clock) if run.state == "done" and model is not None else None
            if made is not None and model is not None:
                curves[model].append(made)
    found = {model: combine(made) for model, made in curves.items()}
    return {model: hours for model, hours in found.items() if hours is not None}


def hours_by_tokens(tokens_per_hour: float) -> Clock:
    """What the reference place would have taken for the tokens of the steps."""

    def clock(steps: Sequence[TrainStep]) -> list[float]:
        return _sums(step.tokens / tokens_per_hour for step in steps)

    return clock


def hours_as_run(steps: Sequence[TrainStep]) -> list[float]:
    """The run's own hours, where it is not known how fast the reference place is."""
    return _sums(step.seconds / 3600 for step in steps)


def _sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(values))


def _fit(run: RunEntry, clock: Clock) -> FittedCurve | None:
    steps = read_steps(Path(run.folder))
    return fit_curve(bin_losses(clock(steps), [step.loss for step in steps]))


def _models_by_dataset(work: OpenProject) -> dict[str, str]:
    entry = work.ledger.get("prepare")
    folders = (entry.output or {}).get("folders", {}) if entry is not None else {}
    return {Path(folder).name: model for model, folder in folders.items()}


def _dataset_of(run: RunEntry) -> str:
    try:
        job = json.loads((Path(run.folder) / "job.json").read_text())
    except (OSError, ValueError):
        return ""
    return Path(str(job.get("dataset_folder", ""))).name
