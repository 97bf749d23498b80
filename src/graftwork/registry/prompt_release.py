"""A prompt on the base as a release: `prompt.json` with the report and verdict behind it, without weights.

In: a prompt, its dataset, report and verdict. Out: the manifest and its files, named by content like every
other release. Pure but for reading a prompt back.
"""

import json
from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from graftwork.records.dataset import Dataset
from graftwork.records.errors import Damaged
from graftwork.records.release import PROMPT_FILE, PromptVariant, Release
from graftwork.records.report import Report, Verdict
from graftwork.registry.manifest import ReleaseContext, content_id
from graftwork.registry.peft import FULL_FILES, WEIGHTS, describe_text

PROMPT_RUN = "prompt"
"""What a prompt's release has in place of a training run."""
LARGEST_PROMPT = 4 << 20


def is_prompt(names: Collection[str]) -> bool:
    """Whether a release with these files is a prompt without weights."""
    return PROMPT_FILE in names and WEIGHTS not in names and FULL_FILES[1] not in names


def require_prompt(source: Path | bytes, *, where: Path) -> PromptVariant:
    """The prompt, or an error where the file is none."""
    try:
        if isinstance(source, Path):
            with source.open("rb") as handle:
                source = handle.read(LARGEST_PROMPT)
        return PromptVariant.from_json(source)
    except (OSError, ValidationError) as error:
        raise Damaged(
            f"{PROMPT_FILE} does not read as a prompt",
            why=str(error).splitlines()[0],
            fix="get the release again from where it was made",
            where=str(where),
        ) from error


def describe_prompt(
    prompt: PromptVariant, *, dataset: Dataset, report: Report, verdict: Verdict, context: ReleaseContext
) -> tuple[Release, dict[str, Path | bytes]]:
    """The manifest, and its files by name."""
    texts = {
        PROMPT_FILE: prompt.to_json(),
        "README.md": _card(prompt, report=report, verdict=verdict, context=context),
        "dataset.json": dataset.to_json(),
        "report.json": report.to_json(),
        "verdict.json": verdict.to_json(),
    }
    nameless = Release(
        id="",
        project=context.project,
        base=context.base,
        base_fingerprint=context.base_fingerprint,
        template_fingerprint=context.template_fingerprint,
        adapter_hash=prompt.fingerprint(),
        dataset_hash=dataset.content_hash,
        plan_hash="",
        report_hash=report.fingerprint(),
        verdict_hash=verdict.fingerprint(),
        decision=verdict.decision,
        run_id=PROMPT_RUN,
        parent=context.parent,
        created_at=context.created_at,
        files=tuple(sorted((describe_text(n, t) for n, t in texts.items()), key=lambda file: file.path)),
        settings=dict(context.settings),
        versions=dict(context.versions),
        model=dataset.model,
        tokenizer_fingerprint=dataset.tokenizer_fingerprint,
        licence=context.licence,
    )
    release = nameless.model_copy(update={"id": content_id(nameless)})
    return release, {name: text.encode() for name, text in texts.items()}


def _card(prompt: PromptVariant, *, report: Report, verdict: Verdict, context: ReleaseContext) -> str:
    shown = len(prompt.rows)
    rules = "\n".join(f"- {rule.outcome}: {rule.sentence}" for rule in verdict.rules)
    return (
        f"---\nbase_model: {json.dumps(context.base)}\ntags:\n- graftwork\n- prompt\n---\n\n"
        f"# {context.project}: a prompt for {context.base}\n\n"
        f"Made by Graftwork. `{PROMPT_FILE}` holds {shown} worked examples"
        f"{' and an instruction' if prompt.instruction is not None else ''} that go before every request. "
        "There are no weights: the base answers.\n\n"
        f"## May it be served?\n\n**{verdict.decision.replace('_', ' ')}**: {verdict.reason}\n\n{rules}\n\n"
        f"Measured on {report.cases} held-out cases; see `report.json`.\n"
    )
