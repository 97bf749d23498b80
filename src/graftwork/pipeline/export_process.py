"""The process that merges and proves: `python -m graftwork.pipeline.export_process JOB_FILE`.

In: an ExportJob. Out: the merged folder, whole or not at all, and `merged.json` beside the job. Holds
one model at a time: first base and adapter for their logits, then the merged one for its own.
"""

import sys
from pathlib import Path
from typing import Any

from graftwork.files.dataset_folder import read_rows
from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo, EnvironmentLacks
from graftwork.records.release import Agreement, ExportJob, MergeProof
from graftwork.text.publish import hide_in_tracebacks

MERGED_FILE = "merged.json"


def export(job: ExportJob) -> None:
    from graftwork.model.agree import compare
    from graftwork.model.merge import merge_into
    from graftwork.model.threads import use_threads

    base, adapter, to = Path(job.base_folder), Path(job.adapter_folder), Path(job.to)
    use_threads(job.threads)
    with Heart(Path(job.folder)) as heart, folder_made_whole(to) as folder:
        rows, dtype = _rows(job), dtype_of(base)
        heart.beat("merging", 0, 1)
        changed = merge_into(base, adapter, folder)
        heart.beat("logits of base and adapter", 0, 1)
        unmerged = _logits(base, rows, dtype=dtype, adapter=adapter)
        heart.beat("logits of the merged model", 0, 1)
        merged = _logits(folder, rows, dtype=dtype)
        agreement = compare(unmerged, merged, dtype=dtype)
        _require(agreement)
        seen = None
        if job.four_bits:
            heart.beat("logits of the 4-bit base and adapter", 0, 1)
            seen = compare(
                _logits(base, rows, dtype=dtype, adapter=adapter, four_bits=True), merged, dtype=dtype
            )
        found = MergeProof(merged_weights=changed, agreement=agreement, to_four_bits=seen)
        write_whole(Path(job.folder) / MERGED_FILE, found.to_json())


def dtype_of(base: Path) -> str:
    """The type of the weights on disk, by the widest of them: what is written is written in it."""
    from safetensors import safe_open

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
    found: set[str] = set()
    for path in base.glob("*.safetensors"):
        handle: Any = safe_open(path, framework="pt")
        keys: list[str] = handle.keys()
        found |= {names.get(handle.get_slice(key).get_dtype(), "") for key in keys if key.endswith("weight")}
    return next((name for name in ("float32", "bfloat16", "float16") if name in found), "float32")


def _rows(job: ExportJob) -> list[Row]:
    """Rows that training has not seen; where there are none, some that it has."""
    for split in ("validation", "test", "train"):
        rows = list(read_rows(Path(job.dataset_folder), split))[: job.rows]
        if rows:
            return rows
    raise EnvironmentLacks(
        "there is no row to prove the merged model on",
        fix="prepare the dataset again: `graft data prepare`",
        where=job.dataset_folder,
    )


def _logits(
    folder: Path, rows: list[Row], *, dtype: str, adapter: Path | None = None, four_bits: bool = False
) -> Any:
    from graftwork.model.adapter import load_adapter
    from graftwork.model.agree import reply_logits
    from graftwork.model.load import load_base

    model = load_base(folder, dtype=dtype, four_bits=four_bits)
    if adapter is not None:
        load_adapter(model, adapter)
    return reply_logits(model, rows)


def _require(found: Agreement) -> None:
    if found.holds:
        return
    raise AnswerIsNo(
        "the merged model does not say what base and adapter say",
        why=f"the logits of {found.positions} reply tokens differ by up to {found.largest_difference:.4g} "
        f"(largest logit {found.largest_logit:.4g}), the first choice agrees at {found.same_first:.1%}; "
        f"allowed in {found.dtype}: {found.allowed_difference * found.largest_logit:.4g} and "
        f"{found.allowed_first:.1%}",
        fix="serve the adapter beside its base (`graft train export --format adapter`), or merge into a "
        "base in float32",
    )


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(ExportJob, lambda job: Path(job.folder), export, writes_elsewhere=True))
