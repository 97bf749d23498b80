"""A winning prompt is a result too: evaluated against the base, gated by the same rules, released and served.

Input: an open project. Output: a release with `prompt.json`, report and verdict but without weights, and its
alias moved; or an error that says which rule did not hold. Nothing is trained.
"""

import json
from dataclasses import replace
from pathlib import Path

from graftwork.data.project import PreparedData
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.project import look_for_champion, surroundings_of
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.project import doubts_about_judge, put_page
from graftwork.evaluate.project_subjects import find_champion, resolve_subject
from graftwork.evaluate.subjects import CHAMPION, LOG, PROMPTED, Lineup, Subject, parse_subject
from graftwork.files.disk import write_atomic
from graftwork.pipeline.steps.evaluate import held_out, measure_lineup, prepare_asking
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject, current_user, timestamp
from graftwork.records.dataset import Dataset
from graftwork.records.errors import NegativeResult
from graftwork.records.release import PROMPT_FILE, PROMPT_RUN, PromptVariant, Release
from graftwork.records.report import Report, Verdict
from graftwork.registry.index import Change, promote
from graftwork.registry.manifest import ReleaseContext, describe_text, name_release
from graftwork.registry.project import full_alias, open_store
from graftwork.registry.publish import find_licence
from graftwork.text.redact import publishable
from graftwork.version import __version__


def describe_prompt(
    prompt: PromptVariant, *, dataset: Dataset, report: Report, verdict: Verdict, context: ReleaseContext
) -> tuple[Release, dict[str, Path | bytes]]:
    """The manifest, and its files by name."""
    rules = "\n".join(f"- {rule.outcome}: {rule.sentence}" for rule in verdict.rules)
    card = (
        f"---\nbase_model: {json.dumps(context.base)}\ntags:\n- graftwork\n- prompt\n---\n\n"
        f"# {context.project}: a prompt for {context.base}\n\n"
        f"Made by Graftwork. `{PROMPT_FILE}` holds {len(prompt.rows)} worked examples"
        f"{' and an instruction' if prompt.instruction is not None else ''} that go before every request. "
        "There are no weights: the base answers.\n\n"
        f"## May it be served?\n\n**{verdict.decision.replace('_', ' ')}**: {verdict.reason}\n\n{rules}\n\n"
        f"Measured on {report.cases} held-out cases; see `report.json`.\n"
    )
    texts = {
        PROMPT_FILE: prompt.to_json(),
        "README.md": card,
        "dataset.json": dataset.to_json(),
        "report.json": report.to_json(),
        "verdict.json": verdict.to_json(),
    }
    hashes = {"adapter": prompt.fingerprint(), "dataset": dataset.content_hash}
    release = name_release(
        replace(context, model=dataset.model, tokenizer_fingerprint=dataset.tokenizer_fingerprint),
        files=(describe_text(name, text) for name, text in texts.items()),
        verdict=verdict,
        run_id=PROMPT_RUN,
        hashes={**hashes, "report": report.fingerprint()},
    )
    return release, {name: text.encode() for name, text in texts.items()}


def judge_prompt(work: OpenProject) -> tuple[PromptVariant, Report, Verdict, str]:
    """Measure the prompted base against the base, the champion and the log; decide by the gate's rules.

    The prompt, the report of the evaluation, the verdict and the page of both.
    """
    prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
    cases = held_out(work, prepared)
    asking = prepare_asking(work, prepared, cases, subjects=(PROMPTED,))
    assert asking.prompt is not None

    def resolved(name: str) -> Subject:
        return resolve_subject(work, parse_subject(name), asking=asking, outcome=None)

    own_hash = asking.prompt.fingerprint()
    champion = find_champion(work, unlike=own_hash)
    lineup = Lineup(
        baseline=resolved("base"),
        candidate=resolved(PROMPTED),
        champion=resolved(CHAMPION) if champion is not None else None,
        references=(resolved(LOG),),
    )
    evaluated = measure_lineup(work, lineup, cases, asking=asking, subject=own_hash, prepared=prepared)
    report = evaluated.report
    champion_now = look_for_champion(work, adapter_hash=own_hash)
    around = surroundings_of(champion_now)._replace(doubts=doubts_about_judge(work))
    verdict = decide(report, without_itself(work.settings.gate), around=around)
    write_atomic(work.project.evaluations / f"prompt-{own_hash[:12]}.json", evaluated.to_json())
    page = put_page(work, evaluated, separate=True).page
    return asking.prompt, report, verdict, page


def without_itself(settings: GateSettings) -> GateSettings:
    """The rules for the prompted base: it is not compared with itself. What beats it beats the base too."""
    changed = {
        "rules": tuple(
            rule.model_copy(update={"against": "base"}) if rule.against == "prompt" else rule
            for rule in settings.rules
        )
    }
    rules = {"primary": settings.primary_rule, "win": settings.win_rule, "abort_when": settings.abort_when}
    for name, rule in rules.items():
        if rule is not None and rule.against == "prompt":
            changed[name] = rule.model_copy(update={"against": "base"})  # type: ignore[assignment]
    return settings.model_copy(update=changed)


def release_prompt(work: OpenProject) -> Release:
    """Publish the prompt if the gate says deploy, and point the alias of the model at it."""
    prompt, report, verdict, page = judge_prompt(work)
    if verdict.decision != "deploy":
        raise NegativeResult(
            "the prompt was not released",
            why=f"the gate said {verdict.decision.replace('_', ' ')}: {verdict.reason}",
            fix=f"{page} shows every case; train an adapter (`graft run`), or change evaluate.prompt",
        )
    dataset = run_pipeline(work, upto="prepare").get("prepare", PreparedData).dataset
    alias, store = full_alias(work), open_store(work)
    with store.shared_lock():
        release, sources = describe_prompt(
            prompt,
            dataset=dataset,
            report=report,
            verdict=verdict,
            context=ReleaseContext(
                project=work.settings.project,
                base=work.base.name,
                base_fingerprint=work.base.revision,
                template_fingerprint=dataset.template_fingerprint,
                parent=work.releases.aliases().get(alias),
                created_at=timestamp(),
                settings=publishable(work.settings),
                versions={"graftwork": __version__},
                licence=find_licence(Path(work.base.folder)),
            ),
        )
        stored = store.put(release, sources=sources)
        work.releases.add(stored)
        store.verify(stored.id)
        promote(
            work.releases,
            stored,
            alias=alias,
            change=Change(current_user(), timestamp(), "the gate said deploy to the prompted base"),
        )
    return stored
