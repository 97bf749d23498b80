"""The cases that the pipeline evaluates on, and the prompted base that may answer them.

In: an open project, its dataset. Out: cases of the test split or of the file that `evaluate.cases` names; the
prompt of the subject `base+prompt`, cases that know the system prompt of the log, a remark on the tokens that
a trained-away prompt saves. A case whose prompt is trained on is refused.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from graftwork.data.project import PreparedData, audit_context
from graftwork.evaluate.ask.prompt_search import PromptSearchJob, require_gepa
from graftwork.evaluate.cases import choose_cases, draw_cases, read_case_file, write_cases
from graftwork.evaluate.project import price_cases
from graftwork.evaluate.project_subjects import resolve_subject
from graftwork.evaluate.prompts import choose_examples
from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.evaluate.subjects import LOGGED_PROMPT, PROMPTED, Asking, parse_subject
from graftwork.files.dataset import iterate_rows, read_rows
from graftwork.files.disk import file_digest, make_folder
from graftwork.project.open_project import OpenProject, load_template
from graftwork.project.supervise import WorkerTask, run_job
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Origin
from graftwork.records.release import PROMPT_FILE, TOOLS, PromptVariant, replace_system
from graftwork.records.report import Case
from graftwork.train.rewards import find_case_file, read_prompt_file


def read_held_out(work: OpenProject, folder: Path) -> tuple[Case, ...]:
    """As many as the settings allow; of the dataset in `folder` where no file is named."""
    settings = work.settings.evaluate
    if settings.cases is None:
        return tuple(price_cases(work, choose_cases(read_rows(folder, "test"), most=settings.max_cases)))
    cases = read_case_file(work.project.root / settings.cases, named=settings.checks)
    # The prompts of the training rows, and those that reinforcement learning answers.
    trained = {row.messages for row in iterate_rows(folder, "train")}
    train = work.settings.train
    if train.objective == "grpo" and (path := find_case_file(work)) is not None:
        trained |= {case.messages for case in read_prompt_file(path, train.rollouts)}
    elif train.objective == "grpo" and train.rollouts.source == "rl":
        trained |= {row.messages for row in iterate_rows(folder, "rl")}
    known = [case for case in cases if case.messages in trained]
    if known:
        raise UserMistake(
            f"the case {known[0].id} is a training row",
            why=f"{len(known)} of {len(cases)} cases ask what was trained on: they would measure memory",
            fix="take them out of the file, or out of data.logs and train.rollouts.source",
            where="evaluate.cases",
        )
    return draw_cases(cases, most=settings.max_cases)


def hash_case_file(work: OpenProject) -> str | None:
    """Of the file of cases; None where none is named or it is not there yet."""
    named = work.settings.evaluate.cases
    path = work.project.root / named if named is not None else None
    return file_digest(path) if path is not None and path.is_file() else None


DROPPED = "drop"


def subjects_by_settings(work: OpenProject) -> tuple[str, ...]:
    """Prompted subjects that the settings ask for, by a rule of the gate or by what was dropped."""
    needed = work.settings.gate.subjects_needed()
    named = [PROMPTED] if "prompt" in needed else []
    dropped = work.settings.data.logged_system_prompt == DROPPED
    return (*named, *([LOGGED_PROMPT] if dropped or "logged_prompt" in needed else []))


def find_prompt(work: OpenProject, prepared: PreparedData) -> PromptVariant:
    """Worked examples from the training split, and an optimised instruction where the settings want one."""
    settings = work.settings.evaluate
    prompt = choose_examples(
        read_rows(Path(prepared.folder), "train"),
        most=settings.prompt.examples,
        max_tokens=settings.prompt.max_tokens,
        fields=settings.fields,
    )
    if settings.prompt.optimizer == "none":
        return prompt
    return optimise_prompt(work, prepared, prompt)


def with_logged_prompts(work: OpenProject, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases, each with the system prompt that the log has, where that is another than its own."""
    known = find_logged_prompts(work, {case.origin for case in cases})

    def with_prompt(case: Case) -> Case:
        own = "\n\n".join(turn.content for turn in case.messages if turn.role == "system")
        logged = known.get(case.origin)
        return case if logged in (None, own) else case.model_copy(update={"logged_system": logged})

    return tuple(with_prompt(case) for case in cases)


def find_logged_prompts(work: OpenProject, origins: Collection[Origin]) -> dict[Origin, str]:
    """The system prompts that the logs have, redacted as the rows are.

    A line with several rows gives the prompt of its first. They are in no dataset: what a dataset drops or
    replaces stays out of it.
    """
    from graftwork.data.corpus.build import build_corpus
    from graftwork.data.prepare import FEATURES

    corpus = build_corpus(
        audit_context(work, template=load_template(work)),
        folder=work.project.data / FEATURES,
        root=work.project.root,
        on_progress=lambda _phase, _done, _total: None,
    )
    places = [place for place in range(corpus.rows) if corpus.origin(place) in origins]
    found: dict[Origin, str] = {}
    for _, row in corpus.rows_at(places):
        text = "\n\n".join(turn.content for turn in row.messages if turn.role == "system")
        if text:
            found.setdefault(row.origin, text)
    return found


def remark_on_prompts(work: OpenProject, cases: Sequence[Case]) -> tuple[str, ...]:
    """How many tokens a request is shorter without the logged system prompt, over the held-out cases."""
    changed = [case for case in cases if case.logged_system is not None]
    if not changed:
        return ()
    template = load_template(work)
    before = [len(template.prompt(replace_system(c.messages, c.logged_system or ""))) for c in changed]
    after = [len(template.prompt(case.messages)) for case in changed]
    saved = [float(long - short) for long, short in zip(before, after, strict=True)]
    mean = math.fsum(saved) / len(saved)
    low, high = mean, mean
    if len(set(saved)) > 1:
        low, high = bootstrap_mean(saved, confidence=work.settings.evaluate.confidence)
    spread = "" if low == high else f" ({low:,.0f} to {high:,.0f})"
    return (
        f"The logged system prompt is trained away: a request has {mean:,.0f}{spread} tokens less, "
        f"{sum(after) / len(after):,.0f} instead of {sum(before) / len(before):,.0f}, over "
        f"{len(changed)} of {len(cases)} held-out cases.",
    )


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
