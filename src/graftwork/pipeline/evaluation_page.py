"""The page of an evaluation, written beside the project's file.

In: an evaluation. Out: the same, with the place of its page. Cheap, so that the page is written whenever
somebody asks for the evaluation, even where nothing had to be measured again.
"""

import re
from pathlib import Path

from graftwork.evaluate.cases import read_cases
from graftwork.evaluate.subjects.book import read_answers
from graftwork.files.disk import write_atomic
from graftwork.pipeline.evaluate_run import Evaluated
from graftwork.pipeline.open_project import OpenProject
from graftwork.report.evaluation_page import EvaluationPage, render_evaluation

PAGE = "evaluation"


def put_page(work: OpenProject, evaluated: Evaluated, *, beside: bool = False) -> Evaluated:
    """`beside` is an evaluation that the gate does not decide on: its page does not replace the other."""
    path = work.project.root / f"{page_name(work, beside=beside)}.html"
    page = EvaluationPage(
        project=work.settings.project,
        report=evaluated.report,
        cases=read_cases(Path(evaluated.cases_file)),
        answers={name: tuple(read_answers(Path(folder))) for name, folder in evaluated.folders.items()},
    )
    write_atomic(path, render_evaluation(page))
    return evaluated.model_copy(update={"page": str(path)})


def page_name(work: OpenProject, *, beside: bool = False) -> str:
    """One page a model; the main one has the short name."""
    parts = [PAGE]
    if work.model != work.settings.main_model:
        parts.append(re.sub(r"[^\w.-]+", "_", work.model))
    return "-".join([*parts, *(["asked"] if beside else [])])
