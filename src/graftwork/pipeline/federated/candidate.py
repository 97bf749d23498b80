"""The merged adapter of a round, as a run of the project: evaluated and gated like any other.

In: the trained runs of the places. Out: a run folder with the average of their adapters, weighted by trained
tokens, and the gate's verdict about it.
"""

from collections.abc import Sequence
from pathlib import Path

from graftwork.files.disk import folder_digest, make_folder, write_atomic
from graftwork.model.adapter_shape import AdapterShape
from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.federated.sites import SiteRun
from graftwork.pipeline.gate import note_rules
from graftwork.pipeline.merge_adapters import MergeRequest, merge_adapters
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.run_identity import note_done
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import get_step
from graftwork.process.worker import hold_lock
from graftwork.records.base import fingerprint
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.train.run_folder import ADAPTER, OUTCOME, read_steps


def trained_tokens(run: SiteRun) -> int:
    """Tokens that the place's steps were trained on, as its journal counts them."""
    return sum(step.trained_tokens for step in read_steps(run.folder))


def merge_round(work: OpenProject, runs: Sequence[SiteRun]) -> TrainOutcome:
    """Average the adapters of a round and enter the result as a run. What is there is not made again."""
    for run in runs:
        # `graft fleet fetch` or a killed process may have brought the files.
        note_done(run.work, run.run_id)
    tokens = [trained_tokens(run) for run in runs]
    run_id = fingerprint(["federated", [run.run_id for run in runs], tokens])[:12]
    folder = work.project.runs / run_id
    if (folder / OUTCOME).exists():
        return note_done(work, run_id)
    make_folder(folder)
    adapter = folder / ADAPTER
    if not adapter.exists():
        request = MergeRequest(
            tuple(f"run:{run.run_id}" for run in runs),
            adapter,
            weights=",".join(repr(count / sum(tokens)) for count in tokens),
            shape=AdapterShape.model_validate(runs[0].plan.train["adapter"]),
        )
        merge_adapters(work, request)
    outcome = _outcome(run_id, adapter, runs, tokens)
    if work.runs.get(run_id) is None:
        work.runs.create(
            run_id, folder=str(folder), plan=runs[0].plan.model_dump(mode="json"), when=timestamp()
        )
    note_rules(work, run_id, stage="trained")
    write_atomic(folder / OUTCOME, outcome.to_json())
    return note_done(work, run_id)


def _outcome(run_id: str, adapter: Path, runs: Sequence[SiteRun], tokens: Sequence[int]) -> TrainOutcome:
    """What the places' runs come to together: losses by tokens, times and rows added up."""
    parts = [run.outcome() for run in runs]
    shares = [count / sum(tokens) for count in tokens]
    known = [part.validation_loss_before for part in parts]
    return parts[0].model_copy(
        update={
            "run_id": run_id,
            "adapter_folder": str(adapter),
            "adapter_hash": folder_digest(adapter),
            "steps": sum(part.steps for part in parts),
            "first_loss": sum(s * part.first_loss for s, part in zip(shares, parts, strict=True)),
            "final_loss": sum(s * part.final_loss for s, part in zip(shares, parts, strict=True)),
            "validation_loss_before": _mean(shares, known),
            # Of each place's own adapter on its own rows: no place has all rows to measure the merged one on.
            "validation_loss_after": _mean(shares, [part.validation_loss_after for part in parts]),
            "seconds": sum(part.seconds for part in parts),
            "load_seconds": sum(part.load_seconds for part in parts),
            "rows": sum(part.rows for part in parts),
            "restarts": sum(part.restarts for part in parts),
            "residuals": (),
            "residual_parts": (),
            "drifts": (),
        }
    )


def _mean(shares: Sequence[float], values: Sequence[float | None]) -> float | None:
    known = [(share, value) for share, value in zip(shares, values, strict=True) if value is not None]
    return sum(s * v for s, v in known) / sum(s for s, _ in known) if known else None


def judge_round(work: OpenProject, made: StepOutputs, outcome: TrainOutcome) -> Verdict:
    """Evaluate the merged adapter on this project's held-out cases and ask the gate. No step is entered."""
    made = StepOutputs({**made.outputs, "train": outcome})
    with hold_lock(work.project.state / "pipeline"):
        evaluated = get_step("evaluate").do(work, made)
        assert isinstance(evaluated, Evaluated)
        verdict = get_step("gate").do(work, StepOutputs({**made.outputs, "evaluate": evaluated}))
    assert isinstance(verdict, Verdict)
    return verdict
