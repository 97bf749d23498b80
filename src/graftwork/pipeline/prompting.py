"""The prompted base of a project, and what becomes of the logged system prompt.

In: an open project, its dataset, its cases. Out: the prompt of the subject `base+prompt`, cases that know
the system prompt of the log, a remark on the tokens that a trained-away prompt saves.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from graftwork.evaluate.prompts import choose_examples
from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.evaluate.subjects import LOGGED_PROMPT, PROMPTED
from graftwork.files.dataset import read_rows
from graftwork.pipeline.open_project import OpenProject, load_template
from graftwork.pipeline.steps.data import PreparedData, audit_context
from graftwork.records.interaction import Origin
from graftwork.records.release import PromptVariant, replace_system
from graftwork.records.report import Case

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
    from graftwork.pipeline.prompt_search import optimise_prompt

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
