"""A whole lineage in miniature: an adapter folder and the records that belong to it."""

import json
from pathlib import Path
from typing import Any

from graftwork.files.disk import folder_digest
from graftwork.records.base import Figure
from graftwork.records.dataset import Dataset, InputFile, SplitSummary
from graftwork.records.plan import DeviceFacts, Plan
from graftwork.records.release import AliasMove, Release
from graftwork.records.report import Decision, Generation, Metric, Report, RuleResult, SubjectReport, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import ReleaseIndex
from graftwork.registry.manifest import Lineage, ReleaseContext
from graftwork.registry.publish import publish
from graftwork.registry.store import ReleaseStore

LINEAGE = ("dataset", "plan", "outcome", "report", "verdict", "measured_adapter")
PROJECT = "cited-answers"
WHEN = "2025-03-01T12:00:00Z"
BASE_PRINT, TEMPLATE_PRINT = "b" * 64, "t" * 64


def write_adapter(folder: Path, *, weights: bytes = b"\x01\x02\x03\x04") -> Path:
    """An adapter with one tensor, made by hand: a safetensors header and its bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}})
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + weights
    )
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    return folder


def dataset() -> Dataset:
    summary = SplitSummary(rows=10, groups=2, tokens=1000, trained_tokens=400, longest=120)
    return Dataset(
        content_hash="d" * 64,
        base="small",
        base_fingerprint=BASE_PRINT,
        template_fingerprint=TEMPLATE_PRINT,
        tokenizer_fingerprint="k" * 64,
        inputs=(InputFile(file="logs.jsonl", sha256="i" * 64, rows=12),),
        splits={"train": summary, "validation": summary, "test": summary},
        kept_after={"read": 12},
        redactions={"email": 1},
        settings={},
    )


def plan() -> Plan:
    one = Figure.exact(1.0)
    return Plan(
        base="small",
        base_fingerprint=BASE_PRINT,
        dataset_hash="d" * 64,
        method="lora",
        dtype="float32",
        device=DeviceFacts(kind="cpu", name="a cpu", memory_gib=8, threads=2),
        certainty="computed",
        total_parameters=one,
        trainable_parameters=one,
        peak_memory_gib=one,
        disk_gib=one,
        tokens=one,
        trained_tokens=one,
        steps=one,
        tokens_per_second=one,
        minutes=one,
        fits=True,
        train={"rank": 8},
    )


def outcome(adapter: Path) -> TrainOutcome:
    return TrainOutcome(
        run_id="run-1",
        adapter_folder=str(adapter),
        adapter_hash=folder_digest(adapter),
        base_hash_before="h" * 64,
        base_hash_after="h" * 64,
        steps=10,
        epochs=1.0,
        first_loss=2.0,
        final_loss=1.0,
        validation_loss_before=2.1,
        validation_loss_after=1.1,
        seconds=60,
        load_seconds=2,
        tokens_per_second=100,
        peak_memory_gib=1.5,
        trainable_parameters=1234,
        restarts=0,
        replayed_steps=0,
        replay_identical=None,
    )


def report() -> Report:
    def subject(name: str, value: float) -> SubjectReport:
        return SubjectReport(
            subject=name,
            metrics={
                "json_valid": Metric(
                    name="json_valid", kind="rate", value=value, low=value - 0.05, high=1.0, n=120
                ),
                "latency": Metric(
                    name="latency", kind="number", value=0.5, low=0.4, high=0.6, n=20, unit="s"
                ),
            },
            generation=Generation(
                subject=name,
                answers=120,
                seconds=60,
                tokens_per_second=100,
                single_latency_seconds=(0.5,),
                peak_memory_gib=1,
                settings={},
            ),
        )

    return Report(
        cases_hash="c" * 64,
        cases=120,
        baseline=subject("base | worked example", 0.5),
        candidate=subject("adapter", 0.99),
        comparisons=(),
    )


def verdict(decision: Decision = "deploy") -> Verdict:
    rule = RuleResult(
        metric="json_valid",
        rule="> 95 %",
        outcome="pass",
        value=0.99,
        low=0.96,
        high=1.0,
        limit=0.95,
        sentence="JSON-valid rate is 99 %, surely over 95 %.",
    )
    return Verdict(
        decision=decision, reason="every rule passes", rules=(rule,), report_hash=report().fingerprint()
    )


def parts(adapter: Path, *, decision: Decision = "deploy") -> dict[str, Any]:
    """All that `publish_parts` takes besides the store and the index."""
    return {
        "project": PROJECT,
        "base": "small",
        "base_fingerprint": BASE_PRINT,
        "template_fingerprint": TEMPLATE_PRINT,
        "adapter_folder": adapter,
        "dataset": dataset(),
        "plan": plan(),
        "outcome": outcome(adapter),
        "report": report(),
        "verdict": verdict(decision),
        "measured_adapter": folder_digest(adapter),
        "parent": None,
        "created_at": WHEN,
        "settings": {"alias": "champion"},
        "versions": {"graftwork": "0"},
    }


def publish_parts(
    *, folder: Path | ReleaseStore, index: ReleaseIndex, adapter_folder: Path, **given: Any
) -> Release:
    """`publish` with the fields of its lineage and context given one by one."""
    store = folder if isinstance(folder, ReleaseStore) else ReleaseStore.open(folder)
    version = given.pop("version", None)
    lineage = Lineage(**{name: given.pop(name) for name in LINEAGE})
    return publish(
        store,
        index,
        lineage=lineage,
        context=ReleaseContext(**given),
        adapter_folder=adapter_folder,
        version=version,
    )


def alias_move(alias: str, to: str, *, previous: str | None = None, **more: Any) -> AliasMove:
    return AliasMove(
        alias=alias, release_id=to, previous=previous, **{"who": "ada", "when": WHEN, "why": "better", **more}
    )
