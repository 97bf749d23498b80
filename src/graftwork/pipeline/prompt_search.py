"""The optimised prompt of a project: searched once in a child process, then kept by what decides it.

In: an open project, its dataset, the worked examples. Out: the prompt. Only rows of the training and
validation splits are asked.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from graftwork.evaluate.ask.prompt_search import PromptSearchJob, require_gepa
from graftwork.evaluate.cases import choose_cases, write_cases
from graftwork.evaluate.subjects import Asking, parse_subject
from graftwork.files.dataset import read_rows
from graftwork.files.disk import make_folder
from graftwork.pipeline.evaluation_subjects import resolve_subject
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.supervise import WorkerTask, run_job
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row
from graftwork.records.release import PROMPT_FILE, TOOLS, PromptVariant

FIRST = "Answer the user's request exactly in the form that the examples show."
MOST_CASES = 50
"""Of each split: a search that reads more of them tries fewer instructions."""


def optimise_prompt(work: OpenProject, prepared: PreparedData, examples: PromptVariant) -> PromptVariant:
    """The prompt of an earlier search where nothing has changed since."""
    require_gepa()
    settings = work.settings.evaluate
    shown = set(examples.rows)
    train = [row for row in read_rows(Path(prepared.folder), "train") if row.id not in shown]
    validation = read_rows(Path(prepared.folder), "validation")
    if not train or not validation:
        return examples
    training, held = (choose_cases(rows, most=MOST_CASES) for rows in (train, validation))
    instruction = usual_instruction(train) or FIRST
    decided = [
        prepared.dataset.content_hash,
        work.base.revision,
        examples.fingerprint(),
        instruction,
        settings.model_dump(mode="json", include={"prompt", "fields", "checks", "metrics", "max_new_tokens"}),
        settings.costs.success,
    ]
    folder = work.project.evaluations / f"prompt-search-{fingerprint(decided)[:12]}"
    make_folder(folder)
    if not (folder / PROMPT_FILE).is_file():
        cases_file = folder / "cases.jsonl"
        write_cases(cases_file, cases=(*training, *held))
        asking = Asking(cases_file, example=examples.examples, timed=False)
        base = resolve_subject(work, parse_subject("base"), asking=asking, outcome=None)
        assert base.job is not None
        job = PromptSearchJob(
            folder=str(folder),
            job=base.job.model_copy(update={"folder": str(folder)}),
            training=len(training),
            instruction=instruction,
            rows=examples.rows,
            settings=settings,
            project_folder=str(work.project.root),
        )
        task = WorkerTask(
            name="optimising the prompt of the base",
            module="graftwork.evaluate.ask.prompt_search",
            job=job,
            folder=folder,
        )
        run_job(task, reporter=work.reporter, place=work.place)
    return PromptVariant.from_json((folder / PROMPT_FILE).read_bytes())


def usual_instruction(rows: Sequence[Row]) -> str:
    """The commonest system prompt, without tool definitions; empty where rows have none."""
    texts = Counter(
        turn.content
        for row in rows
        for turn in row.messages
        if turn.role == "system" and TOOLS not in turn.content
    )
    return texts.most_common(1)[0][0] if texts else ""
