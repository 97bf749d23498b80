"""A prompt on the base as a release: `prompt.json` with the report and verdict behind it, without weights.

In: a prompt, its dataset, report and verdict. Out: the manifest and its files, named by content like every
other release. Pure but for reading a prompt back.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from graftwork.records.dataset import Dataset
from graftwork.records.errors import Damaged
from graftwork.records.release import PROMPT_FILE, PromptVariant, Release
from graftwork.records.report import Report, Verdict
from graftwork.registry.manifest import ReleaseContext, describe_text, name_release
from graftwork.registry.peft import FULL_FILES, WEIGHTS

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
