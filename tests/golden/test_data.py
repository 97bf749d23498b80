"""What every example and stored log becomes: findings of the audit, dropped lines, splits, rows of tokens."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from compare import check
from typed import type_json

from graftwork.files.dataset import iterate_drops, iterate_rows
from graftwork.records.dataset import Dataset

HERE = Path(__file__).parent
STORED = HERE / "data"
LOGS = HERE / "logs"
TRACES = HERE.parent / "data" / "traces"
EXAMPLES = HERE.parents[1] / "examples"
EXAMPLES_WITH_LOGS = sorted(path.parent.name for path in EXAMPLES.glob("*/logs"))
MAPPING = {"question": "ask.text", "reply": "say.0.text", "role": "who"}
USUAL = {"validation": 0.1, "test": 0.2}
"""The shares of a project that names none; logs of few rows leave nothing for validation."""
VARIANTS = {
    "own_keys.jsonl": {"": {"mapping": MAPPING}, "unmapped": {}},
    "chat_faults.jsonl": {
        "": USUAL,
        "unredacted": {"redact": False, "drop_placeholders": False, "drop_truncated": False},
        "by_session": {"split_by": "session", "conflicts": "drop_all", "keep_duplicate": "longest"},
    },
    "chat_tools.jsonl": {"": USUAL, "matched": {"drop_unmatched_calls": True}},
    "reasoning.jsonl": {"": {}, "dropped": {"reasoning": "drop"}},
    "turns.jsonl": {"": {}, "every": {"train_on": "every"}, "marked": {"train_on": "marked"}},
    "rated.jsonl": {"": {}, "bad_below": {"rated_bad_below": 3}, "condition": {"keep": "score >= 0.4"}},
    "captured.jsonl": {"": {}, "positive": {"captures": {"feedback": "positive"}}},
    "long.jsonl": {
        **{overlong: {"max_tokens": 256, "overlong": overlong} for overlong in ("drop", "truncate")},
        "packed": {"pack_tokens": 2048},
    },
    "conflicts.jsonl": {"": USUAL, "all": {"conflicts": "keep_all"}, "none": {"conflicts": "drop_all"}},
    "stated_splits.jsonl": {"": USUAL},
    "templates.jsonl": {"": USUAL},
}
TOGETHER = {
    "spans and events": (
        [TRACES / "genai_events.otlp.jsonl", TRACES / "genai_events.otlp_logs.jsonl"],
        {"validation": 0, "test": 0},
    ),
    "formats by file": (
        [LOGS / "own_keys.jsonl", LOGS / "sharegpt.jsonl"],
        {"formats": {"own_*": MAPPING, "sharegpt.jsonl": "sharegpt"}},
    ),
}
CASES = {
    f"{path.name} {variant}".strip(): ([path], settings)
    for path in sorted([*LOGS.iterdir(), *TRACES.glob("*.json*")])
    for variant, settings in VARIANTS.get(path.name, {"": {}}).items()
} | TOGETHER


@pytest.fixture
def project(tmp_path, embedded_base):
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_a_log_is_audited_and_prepared_as_before(name, project, update_golden):
    paths, settings = CASES[name]
    for path in paths:
        shutil.copy(path, project)
    data = {"logs": [path.name for path in paths], "validation": 0, "test": 0.3, **settings}
    document = {"project": "golden", "base": "smollm2-135m-instruct", "data": data}
    (project / "graft.yaml").write_text(yaml.safe_dump(document))
    result = {"audit": audit(project), "prepared": prepare(project, list_rows)}
    check(STORED / f"{name.replace(' ', '_')}.json", result, update_golden)


@pytest.mark.parametrize("name", EXAMPLES_WITH_LOGS)
def test_an_example_is_audited_and_prepared_as_before(name, project, update_golden):
    folder = shutil.copytree(EXAMPLES / name, project / name, ignore=shutil.ignore_patterns(".graft"))
    result = {"audit": audit(folder), "prepared": prepare(folder, digest_rows)}
    check(STORED / "examples" / f"{name}.json", result, update_golden)


def test_the_logs_are_of_every_format():
    assert len(CASES) >= 50
    assert len(EXAMPLES_WITH_LOGS) == 5


def audit(folder: Path):
    """The figures of an audit, without sentences: these are no promise."""
    typed = type_json("data", "audit", folder=folder)
    if "error" in typed.document:
        return refused(typed)
    found = typed.document
    names = ("files", "rows", "readable", "usable", "fit_to_train", "groups", "usable_groups", "domains")
    return {
        "exit_code": typed.exit_code,
        **{name: found[name] for name in (*names, "models", "prompt_length", "reply_length")},
        "findings": {
            finding["code"]: {
                "severity": finding["severity"],
                "count": finding["count"],
                "rows": join_origins(finding["rows"]),
                "reasons": finding["reasons"],
            }
            for finding in found["findings"]
        },
        "not_looked_for": [rule["code"] for rule in found["not_looked_for"]],
    }


def prepare(folder: Path, list_or_digest):
    typed = type_json("data", "prepare", folder=folder)
    if "error" in typed.document:
        return refused(typed)
    return {
        "exit_code": typed.exit_code,
        "portions": typed.document.get("portions", []),
        **{
            model: describe(Path(prepared), list_or_digest)
            for model, prepared in typed.document.get("folders", {"main": typed.document["folder"]}).items()
        },
    }


def describe(folder: Path, list_or_digest):
    dataset = Dataset.from_json((folder / "manifest.json").read_bytes())
    drops: dict[str, list[dict[str, object]]] = {}
    for drop in iterate_drops(folder):
        drops.setdefault(f"{drop.step}: {drop.reason}", []).append(drop.origin.model_dump())
    return {
        "content_hash": dataset.content_hash,
        "inputs": [shown.model_dump() for shown in dataset.inputs],
        "kept_after": dataset.kept_after,
        "dropped": dataset.dropped,
        "drops": {reason: join_origins(rows) for reason, rows in drops.items()},
        "redactions": dataset.redactions,
        "packing": dataset.packing and dataset.packing.model_dump(exclude={"sha256"}),
        "splits": {
            split: {
                **summary.model_dump(include={"rows", "groups", "tokens", "trained_tokens", "longest"}),
                "content": list_or_digest(folder, split),
            }
            for split, summary in dataset.splits.items()
        },
    }


def list_rows(folder: Path, split) -> list[str]:
    """Where each row is from, how many of its tokens are trained on, and a hash of tokens and texts."""
    return [
        f"{row.origin.file}:{row.origin.line} {len(row.tokens)} {row.trained_from} {row.weight:g} "
        f"{hash_of([row.tokens, row.model_dump(mode='json')])}"
        for row in iterate_rows(folder, split)
    ]


def digest_rows(folder: Path, split) -> str:
    return hash_of(list_rows(folder, split))


def hash_of(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def join_origins(origins) -> dict[str, str]:
    """The lines of each file, as one string: a list of one number a line is not read."""
    files: dict[str, list[str]] = {}
    for origin in origins:
        files.setdefault(origin["file"], []).append(str(origin["line"]))
    return {file: " ".join(lines) for file, lines in files.items()}


def refused(typed):
    return {"exit_code": typed.exit_code, "error": typed.document["error"]}
