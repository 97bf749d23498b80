"""A trained adapter taken out of the project: as it is, merged into its base, or as a GGUF file.

In: a run, or the model whose run is meant; a folder that is not there yet. Out: the folder, with
`graftwork_export.json` in it: what it came from, what was proven, and the hash of every file. The
adapter is checked before, the base before and after.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from graftwork.files.digest import file_digest, folder_digest
from graftwork.files.private import make_folder
from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.model.base import Base, find_base, verify_base
from graftwork.model.gguf import convert, find_converter, read_back
from graftwork.pipeline.export_process import MERGED_FILE
from graftwork.pipeline.supervise import JOB_FILE, run_job
from graftwork.pipeline.workplace import Workplace
from graftwork.records.errors import Damaged, EnvironmentLacks, UserMistake
from graftwork.records.plan import Plan
from graftwork.records.release import ExportedAdapter, ExportFormat, ExportJob, MergeProof
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.store.runs import RunEntry

WORD_FILE = "graftwork_export.json"


class _Source(NamedTuple):
    outcome: TrainOutcome
    plan: Plan
    base: Base
    folder: Path


def export_run(
    work: Workplace, *, run: str | None, to: Path, format: ExportFormat = "merged"
) -> ExportedAdapter:
    """Write the adapter of `run`, or of the last run of the model that is worked on, to `to`."""
    _require_free(to)
    source = _find(work, run)
    _require_whole(source.outcome)
    verify_base(source.base)
    if format == "adapter":
        exported = _copy_adapter(source, to)
    elif format == "gguf":
        exported = _to_gguf(work, source, to)
    else:
        exported = _merged(source, to, _merge(work, source, to))
    verify_base(source.base)
    write_whole(to / WORD_FILE, exported.to_json())
    return exported


def _find(work: Workplace, run: str | None) -> _Source:
    entry = _entry(work, run)
    if entry is None or entry.outcome is None:
        raise UserMistake(
            f"there is no trained run {run}" if run else f"the model {work.model} is not trained yet",
            fix="`graft status` names the runs" if run else "`graft train` trains it",
        )
    plan = Plan.model_validate(entry.plan)
    base = find_base(plan.base, project_folder=work.project.root)
    if base.revision != plan.base_fingerprint:
        raise EnvironmentLacks(
            f"the base {plan.base} is another one than this run was trained on",
            why="an adapter fits only the base that it was trained on",
            fix="restore that base, or train again",
            where=base.folder,
        )
    return _Source(TrainOutcome.model_validate(entry.outcome), plan, base, Path(entry.folder))


def _entry(work: Workplace, run: str | None) -> RunEntry | None:
    if run is not None:
        found = [entry for entry in work.runs.list() if entry.id.startswith(run)]
        return found[0] if len(found) == 1 else None
    name = "train" if work.model == work.settings.main_model else f"train@{work.model}"
    done = work.ledger.get(name)
    return None if done is None else work.runs.get(str(done.output["run_id"]))


def _require_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserMistake(
            f"{to} is there already",
            why="nothing that you have is written over",
            fix="name a folder that does not exist yet",
            where="--to",
        )
    if to.exists():
        to.rmdir()


def _require_whole(outcome: TrainOutcome) -> None:
    folder = Path(outcome.adapter_folder)
    if not folder.is_dir() or folder_digest(folder) != outcome.adapter_hash:
        raise Damaged(
            "the adapter is not what the run left",
            why="its files are gone or have other bytes than the outcome says",
            fix="`graft train` makes it again",
            where=str(folder),
        )


def _copy_adapter(source: _Source, to: Path) -> ExportedAdapter:
    adapter = Path(source.outcome.adapter_folder)
    with folder_made_whole(to) as folder:
        # The bytes, not the modes: the run's are for its owner alone.
        for path in adapter.iterdir():
            shutil.copyfile(path, folder / path.name)
        if folder_digest(folder) != source.outcome.adapter_hash:
            raise Damaged("the copy is not what was copied", fix="try another disk", where=str(to))
    return _exported(source, "adapter", to)


def _merge(work: Workplace, source: _Source, to: Path) -> MergeProof:
    folder = work.project.state / "exports" / source.outcome.run_id
    job = ExportJob(
        folder=str(folder),
        base_folder=source.base.folder,
        adapter_folder=source.outcome.adapter_folder,
        dataset_folder=_dataset_of(source),
        to=str(to),
        four_bits=source.plan.method == "qlora",
        threads=work.settings.train.threads,
    )
    run_job(
        name="the export",
        module="graftwork.pipeline.export_process",
        job=job,
        folder=folder,
        reporter=work.reporter,
        max_restarts=1,
    )
    return MergeProof.from_json((folder / MERGED_FILE).read_bytes())


def _dataset_of(source: _Source) -> str:
    return TrainJob.from_json((source.folder / JOB_FILE).read_bytes()).dataset_folder


def _merged(source: _Source, to: Path, merged: MergeProof) -> ExportedAdapter:
    return _exported(source, "merged", to, merged=merged, words=_words(merged))


def _to_gguf(work: Workplace, source: _Source, to: Path) -> ExportedAdapter:
    converter = find_converter(work.project.root)
    scratch = work.project.state / "exports"
    make_folder(scratch)
    name = f"{work.settings.project}-{source.outcome.run_id}.gguf"
    with TemporaryDirectory(dir=scratch, prefix=".merged-") as temporary, folder_made_whole(to) as folder:
        merged = _merge(work, source, Path(temporary) / "model")
        convert(Path(temporary) / "model", folder / name, converter=converter)
        said = read_back(folder / name, Path(temporary) / "model")
    return _exported(source, "gguf", to, merged=merged, words=_words(merged), gguf=said)


def _words(merged: MergeProof) -> tuple[str, ...]:
    if merged.to_four_bits is None:
        return ()
    far = merged.to_four_bits
    return (
        "merged into the base in its own precision, while training saw it in 4 bits: "
        f"their logits differ by up to {far.largest_difference:.3g}, {far.mean_difference:.3g} in the mean; "
        f"the first choice is the same at {far.same_first:.1%} of {far.positions} reply tokens",
    )


def _exported(
    source: _Source,
    format: ExportFormat,
    to: Path,
    *,
    merged: MergeProof | None = None,
    words: tuple[str, ...] = (),
    gguf: dict[str, str | int | float] | None = None,
) -> ExportedAdapter:
    return ExportedAdapter(
        run_id=source.outcome.run_id,
        format=format,
        folder=str(to),
        base=source.plan.base,
        base_fingerprint=source.base.revision,
        adapter_hash=source.outcome.adapter_hash,
        files={path.name: file_digest(path) for path in sorted(to.iterdir()) if path.is_file()},
        merged=merged,
        gguf=gguf or {},
        words=words,
    )
