"""Exports for other programs: adapters, models merged with them, GGUF, Ollama, vLLM; or adapters merged.

An export is a new folder with a `graftwork_export.json`. The adapter is checked before, the base before and
after; notes name what differs from what was evaluated. Merging into the base runs in a process of its own,
which loads one model at a time and compares the logits: `python -m graftwork.registry.export JOB_FILE`.
Adapters that were trained from one base, here or at several places, are merged into a PEFT folder that
`graft eval --subject adapter:FOLDER` evaluates.
"""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from graftwork.evaluate.project_subjects import find_weights
from graftwork.evaluate.subjects import parse_subject
from graftwork.files.dataset import read_rows
from graftwork.files.disk import atomic_folder, file_digest, folder_digest, make_folder, write_atomic
from graftwork.model.adapter_shape import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterShape,
    from_peft,
    lora_rank,
    parse_peft,
    to_peft,
)
from graftwork.model.adapters.combine import LoraPair, MergeMethod, combine, mask_source
from graftwork.model.base import BaseFolder, copy_base, find_base, verify_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.gguf import (
    ADAPTER_FILES,
    convert,
    find_converter,
    find_turn_texts,
    read_back,
    write_merged,
    write_modelfile,
)
from graftwork.model.shape import read_shape
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.project.open_project import OpenProject, name_entry, report_downloads
from graftwork.project.supervise import JOB_FILE, WorkerTask, run_job
from graftwork.records.base import Record
from graftwork.records.dataset import Row
from graftwork.records.errors import Corrupted, EnvironmentFailure, NegativeResult, UserError
from graftwork.records.release import (
    ExportedAdapter,
    ExportFormat,
    ExportJob,
    GgufPrecision,
    MergeProof,
    Release,
)
from graftwork.records.run import TrainOutcome
from graftwork.registry.index import find_release
from graftwork.registry.project import open_store
from graftwork.registry.publish import TEMPLATE_FILE
from graftwork.store.runs import RunEntry
from graftwork.text.redact import hide_in_tracebacks

PREFIX = "base_model.model."
BY_DATA, EQUAL = "data", "equal"
MERGE_FILE = "merge.json"
KINDS = ("run", "release", "model", "folder", "adapter")


class MergeParent(Record):
    name: str
    weight: float
    trained_tokens: int | None = None
    """Tokens that it learned from, where that is known."""


class MergedAdapter(Record):
    """An adapter made of others."""

    folder: str
    method: str
    rank: int
    layers: int
    kept: float
    """The lowest share of the requested change that the rank keeps, over all layers."""
    parents: tuple[MergeParent, ...]
    evaluate: str
    """The command that compares it with its first parent."""


@dataclass(frozen=True)
class MergeRequest:
    names: tuple[str, ...]
    to: Path
    method: MergeMethod = "average"
    weights: str = EQUAL
    """`equal`, `data` or numbers separated by commas."""
    rank: int | None = None
    density: float = 0.5
    seed: int = 0
    shape: AdapterShape | None = None
    """The shape of an average that training starts from; None: rank and strength of the first adapter."""


@dataclass(frozen=True)
class _Parent:
    name: str
    shape: AdapterShape
    base: str
    pairs: dict[str, LoraPair]
    trained_tokens: int | None
    config: dict[str, Any]


def merge_adapters(work: OpenProject, request: MergeRequest) -> MergedAdapter:
    """Combine the adapters and write the folder. Nothing is written over."""
    from safetensors.numpy import save

    if len(request.names) < 2:
        raise UserError("a merge needs two adapters", fix="specify at least two, as run:ID run:ID")
    if request.to.exists():
        raise UserError(f"{request.to} exists", fix="specify a folder that does not exist yet", where="--to")
    if not 0 < request.density <= 1:
        raise UserError(
            f"the density {request.density} is not between 0 and 1",
            why="it is the share of the weights that is kept",
            fix="pass a number such as 0.5",
            where="--density",
        )
    parents = [_read_parent(work, name) for name in request.names]
    _require_alike(parents, request.method)
    weights = _weigh(parents, request.weights)
    rank = (request.shape or parents[0].shape).rank if request.rank is None else request.rank
    if request.method != "average" and request.rank is not None:
        raise UserError(f"`{request.method}` keeps the rank of its parents", fix="leave out --rank")
    combined = combine(
        [parent.pairs for parent in parents],
        weights,
        method=request.method,
        rank=rank,
        density=request.density,
        draw=mask_source(request.density, request.seed),
    )
    merged = MergedAdapter(
        folder=str(request.to),
        method=request.method,
        rank=rank,
        layers=len(combined),
        kept=round(min(pair.kept for pair in combined.values()), 6),
        parents=tuple(
            MergeParent(name=parent.name, weight=round(weight, 6), trained_tokens=parent.trained_tokens)
            for parent, weight in zip(parents, weights, strict=True)
        ),
        evaluate=f"graft eval --subject {request.names[0]} --subject adapter:{request.to}",
    )
    plain = {"rank": rank, "alpha": float(rank), "ranks": {}, "alphas": {}, "use_rslora": False}
    shape = request.shape or parents[0].shape.model_copy(update=plain)
    tensors = {}
    for path, pair in combined.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.a
        # The combined pair has the scale 1; what reads the folder multiplies by that of its shape.
        tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.b / pair.b.dtype.type(shape.scale_of(path))
    first = parents[0]
    config = to_peft(shape, first.base, transposed=bool(first.config.get("fan_in_fan_out")))
    with atomic_folder(request.to) as temporary:
        write_atomic(temporary / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_atomic(temporary / CONFIG_FILE, json.dumps(config, indent=2))
        write_atomic(temporary / MERGE_FILE, merged.to_json())
    return merged


def _read_parent(work: OpenProject, name: str) -> _Parent:
    subject = parse_subject(name)
    if subject.kind not in KINDS:
        raise UserError(
            f"{name} is not an adapter",
            fix="use run:ID, release:ID, model:NAME or adapter:FOLDER",
            where="NAMES",
        )
    outcome = None
    if subject.kind == "adapter":
        done = work.ledger.get(name_entry(work, "train"))
        if done is None:
            raise UserError(f"the model {work.model} is not trained yet", fix="`graft train` trains it")
        outcome = TrainOutcome.model_validate(done.output)
    weights = find_weights(work, subject, outcome)
    assert weights is not None
    folder = weights.folder
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{name} has no LoRA weights",
            why="full weights and prompts cannot be merged",
            fix="specify LoRA adapters",
            where=str(folder),
        )
    config = parse_peft((folder / CONFIG_FILE).read_bytes(), where=str(folder))
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    paths = sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors})
    layers = read_shape(Path(work.base.folder)).layers
    shape = from_peft(config, layers=layers, paths=paths, where=str(folder))
    if shape.kind != "lora" or shape.experts:
        raise UserError(
            f"{name} is an adapter of the kind {'experts' if shape.experts else shape.kind}",
            why="only LoRA adapters of linear layers can be merged",
            fix="train it with `method: lora`, without `experts`",
            where=str(folder),
        )
    if unmergeable := [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise UserError(
            f"{name} has weights other than its LoRA factors",
            why=f"{unmergeable[0]} and {len(unmergeable) - 1} more"
            if len(unmergeable) > 1
            else unmergeable[0],
            fix="merge adapters without trained embeddings or other modules",
            where=str(folder),
        )
    pairs = {
        path: LoraPair(
            tensors[f"{PREFIX}{path}.lora_A.weight"],
            tensors[f"{PREFIX}{path}.lora_B.weight"],
            shape.scale_of(path),
        )
        for path in paths
    }
    base = str(config.get("base_model_name_or_path", ""))
    entry = work.runs.get(subject.which) if subject.kind == "run" else None
    learned = round(entry.plan["trained_tokens"]["value"]) if entry is not None else None
    return _Parent(name, shape, base, pairs, learned, config)


def _read_tensors(file: Path) -> dict[str, Any]:
    """In float32, whatever the file has: numpy knows no bfloat16."""
    import numpy as np
    from safetensors import SafetensorError, deserialize

    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    try:
        entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise Corrupted(
            f"{file.name} cannot be read",
            why=str(error)[:200],
            fix="get the adapter again from where it was made",
            where=str(file.parent),
        ) from error
    tensors = {}
    for key, entry in entries:
        data, kind = entry["data"], entry["dtype"]
        if kind == "BF16":
            numbers = (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif kind in kinds:
            numbers = np.frombuffer(data, dtype=kinds[kind]).astype(np.float32)
        else:
            raise UserError(
                f"{key} is of the type {kind}",
                why="only factors in 16, 32 or 64 bits can be merged",
                fix="save the adapter in float32",
                where=str(file),
            )
        tensors[key] = numbers.reshape(entry["shape"])
    return tensors


def _require_alike(parents: Sequence[_Parent], method: MergeMethod) -> None:
    first = parents[0]
    for parent in parents[1:]:
        if parent.base != first.base:
            raise UserError(
                f"{parent.name} belongs to the base {parent.base}, {first.name} to {first.base}",
                fix="merge adapters of one base",
            )
        if parent.pairs.keys() != first.pairs.keys():
            only = sorted(parent.pairs.keys() ^ first.pairs.keys())
            raise UserError(
                f"{parent.name} and {first.name} adapt different layers",
                why=f"only one of them has {only[0]} ({len(only)} differ)",
                fix="merge adapters with the same train.target_modules and train.upper_layers",
            )
    for parent in parents:
        ranks = {pair.a.shape[0] for pair in parent.pairs.values()}
        if method != "average" and ranks != {first.shape.rank}:
            rank_list = ", ".join(str(rank) for rank in sorted(ranks))
            raise UserError(
                f"layers of {parent.name} have rank {rank_list}, {first.name} states rank {first.shape.rank}",
                fix="use --method average, which takes any ranks",
            )


def _weigh(parents: Sequence[_Parent], weights_text: str) -> list[float]:
    if weights_text == EQUAL:
        return [1 / len(parents)] * len(parents)
    if weights_text == BY_DATA:
        tokens = [parent.trained_tokens or 0 for parent in parents]
        if not all(tokens):
            unknown = ", ".join(parent.name for parent in parents if not parent.trained_tokens)
            raise UserError(
                f"it is not known how many tokens {unknown} learned from",
                fix="specify runs as run:ID, or give the weights as numbers",
                where="--weights",
            )
        return [count / sum(tokens) for count in tokens]
    try:
        weights = [float(part) for part in weights_text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(parents) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(
            f"{weights_text!r} is not a list of {len(parents)} positive weights",
            fix="use equal, data, or numbers such as 0.5,0.3,0.2",
            where="--weights",
        )
    return weights


MERGED_FILE = "merged.json"


def export(job: ExportJob) -> None:
    from graftwork.model.adapters.merge import compare_logits, merge_into
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.threads import use_threads

    base, adapter, to = Path(job.base_folder), Path(job.adapter_folder), Path(job.to)
    use_threads(job.threads)
    with Heart(Path(job.folder)) as heart, atomic_folder(to) as folder:
        # Rows that training has not seen; if there are none, some that it has.
        splits = (list(read_rows(Path(job.dataset_folder), name)) for name in ("validation", "test", "train"))
        rows, dtype = next((rows for rows in splits if rows), [])[: job.rows], dtype_of(base)
        if not rows:
            raise EnvironmentFailure(
                "there is no row to check the merged model on",
                fix="prepare the dataset again: `graft data prepare`",
                where=job.dataset_folder,
            )
        heart.beat("merging", 0, 1)
        changed = merge_into(base, adapter, folder)
        if (template := ChatTemplate.from_folder(base).tool_template) is not None:
            (folder / TEMPLATE_FILE).write_text(template)
        heart.beat("logits of base and adapter", 0, 1)
        unmerged = _logits(base, rows, dtype=dtype, adapter=adapter)
        heart.beat("logits of the merged model", 0, 1)
        merged = _logits(folder, rows, dtype=dtype)
        agreement = compare_logits(unmerged, merged, dtype=dtype)
        if not agreement.holds:
            raise NegativeResult(
                "the merged model does not answer like base and adapter",
                why=f"the logits of {agreement.positions} reply tokens differ by up to "
                f"{agreement.largest_difference:.4g} (largest logit {agreement.largest_logit:.4g}), the "
                f"first choice agrees at {agreement.same_first:.1%}; allowed in {agreement.dtype}: "
                f"{agreement.allowed_difference * agreement.largest_logit:.4g} and "
                f"{agreement.allowed_first:.1%}",
                fix="serve the adapter with its base (`graft release export run --format adapter`), or merge "
                "into a base in float32",
            )
        to_four_bits = None
        if job.four_bits:
            heart.beat("logits of the 4-bit base and adapter", 0, 1)
            to_four_bits = compare_logits(
                _logits(base, rows, dtype=dtype, adapter=adapter, four_bits=True), merged, dtype=dtype
            )
        proof = MergeProof(merged_weights=changed, agreement=agreement, to_four_bits=to_four_bits)
        write_atomic(Path(job.folder) / MERGED_FILE, proof.to_json())


def dtype_of(base: Path) -> str:
    """The type of the weights on disk, by the widest of them: what is written is written in it."""
    from safetensors import safe_open

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float32"}
    dtypes: set[str] = set()
    for path in base.glob("*.safetensors"):
        handle: Any = safe_open(path, framework="pt")
        keys: list[str] = handle.keys()
        dtypes |= {names.get(handle.get_slice(key).get_dtype(), "") for key in keys if key.endswith("weight")}
    return next((name for name in ("float32", "bfloat16", "float16") if name in dtypes), "float32")


def _logits(
    folder: Path, rows: list[Row], *, dtype: str, adapter: Path | None = None, four_bits: bool = False
) -> Any:
    from graftwork.model.adapters.merge import reply_logits
    from graftwork.model.adapters.peft import load_adapter
    from graftwork.model.load import load_base

    model = load_base(folder, dtype=dtype, four_bits=four_bits)
    if adapter is not None:
        load_adapter(model, adapter)
    return reply_logits(model, rows)


EXPORT_FILE = "graftwork_export.json"


def export_run(
    work: OpenProject, *, run: str | None, to: Path, format: ExportFormat = "merged"
) -> ExportedAdapter:
    """Write the adapter of `run`, or of the last run of the model that is worked on, to `to`."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(
            f"{to} already exists",
            why="nothing is overwritten",
            fix="specify a folder that does not exist yet",
            where="--to",
        )
    if to.exists():
        to.rmdir()
    entry, outcome, base = _find_run(work, run)
    merged, gguf = None, {}
    adapter = Path(outcome.adapter_folder)
    if not adapter.is_dir() or folder_digest(adapter) != outcome.adapter_hash:
        raise Corrupted(
            "the adapter is not the one that the run saved",
            why="its files are missing or have a different hash than the run recorded",
            fix="`graft train` makes it again",
            where=str(adapter),
        )
    verify_base(base)
    if format == "adapter":
        with atomic_folder(to) as folder:
            # The bytes, not the modes: the run's are for its owner only.
            for path in adapter.iterdir():
                shutil.copyfile(path, folder / path.name)
            if folder_digest(folder) != outcome.adapter_hash:
                raise Corrupted("the copy differs from the original", fix="try another disk", where=str(to))
    elif format == "gguf":
        converter, scratch = find_converter(work.project.root), work.project.state / "exports"
        make_folder(scratch)
        name = f"{work.settings.project}-{outcome.run_id}.gguf"
        with TemporaryDirectory(dir=scratch, prefix=".merged-") as temporary, atomic_folder(to) as folder:
            model = Path(temporary) / "model"
            merged = _merge(work, entry, outcome, base, to=model)
            convert(model, folder / name, converter=converter)
            gguf = read_back(folder / name, model)
    else:
        merged = _merge(work, entry, outcome, base, to=to)
    exported = ExportedAdapter(
        run_id=outcome.run_id,
        format=format,
        folder=str(to),
        base=entry.plan["base"],
        base_fingerprint=base.revision,
        adapter_hash=outcome.adapter_hash,
        files={path.name: file_digest(path) for path in sorted(to.iterdir()) if path.is_file()},
        merged=merged,
        gguf=gguf,
        words=_notes(merged) if merged is not None else (),
    )
    verify_base(base)
    write_atomic(to / EXPORT_FILE, exported.to_json())
    return exported


def _find_run(work: OpenProject, run: str | None) -> tuple[RunEntry, TrainOutcome, BaseFolder]:
    """A run that is done, as whichever version stored it, and the base that it was trained on."""
    if run is not None:
        matches = [entry for entry in work.runs.list() if entry.id.startswith(run)]
        entry = matches[0] if len(matches) == 1 else None
    else:
        done = work.ledger.get(name_entry(work, "train"))
        entry = None if done is None else work.runs.get(str(done.output["run_id"]))
    if entry is None or entry.outcome is None:
        raise UserError(
            f"there is no trained run {run}" if run else f"the model {work.model} is not trained yet",
            fix="`graft status` names the runs" if run else "`graft train` trains it",
        )
    name, store = str(entry.plan["base"]), report_downloads(work.reporter)
    base = find_base(name, project_folder=work.project.root, weights=True, store=store)
    if base.revision != entry.plan["base_fingerprint"]:
        raise EnvironmentFailure(
            f"the base {name} is not the one that this run was trained on",
            why="an adapter fits only the base that it was trained on",
            fix="restore that base, or train again",
            where=base.folder,
        )
    return entry, TrainOutcome.model_validate(entry.outcome), base


def _merge(
    work: OpenProject, entry: RunEntry, outcome: TrainOutcome, base: BaseFolder, *, to: Path
) -> MergeProof:
    folder = work.project.state / "exports" / outcome.run_id
    job = ExportJob(
        folder=str(folder),
        base_folder=base.folder,
        adapter_folder=outcome.adapter_folder,
        dataset_folder=json.loads((Path(entry.folder) / JOB_FILE).read_bytes())["dataset_folder"],
        to=str(to),
        four_bits=entry.plan["method"] == "qlora",
        threads=work.settings.train.threads,
    )
    task = WorkerTask(
        name="the export",
        module="graftwork.registry.export",
        job=job,
        folder=folder,
        max_restarts=1,
    )
    run_job(task, reporter=work.reporter, place=work.place)
    return MergeProof.from_json((folder / MERGED_FILE).read_bytes())


def _notes(merged: MergeProof) -> tuple[str, ...]:
    if merged.to_four_bits is None:
        return ()
    far = merged.to_four_bits
    return (
        "merged into the base in its own precision, while training saw it in 4 bits: "
        f"their logits differ by up to {far.largest_difference:.3g}, {far.mean_difference:.3g} in the mean; "
        f"the first choice is the same at {far.same_first:.1%} of {far.positions} reply tokens",
    )


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(ExportJob, lambda job: Path(job.folder), export, writes_elsewhere=True))


ProgramFormat = Literal["ollama", "vllm"]


class ExportedRelease(Record):
    """What was written, and the command that uses it. `files` maps each file to its SHA-256."""

    release_id: str
    format: ProgramFormat
    folder: str
    command: str
    precision: str
    base_fingerprint: str
    adapter_hash: str
    files: dict[str, str]
    notes: tuple[str, ...] = ()


def export_for_program(
    work: OpenProject, name: str, *, format: ProgramFormat, to: Path, precision: GgufPrecision = "q8_0"
) -> ExportedRelease:
    """Write the release as `format` into the new folder `to`."""
    release = find_release(work.releases, name)
    if release.base_fingerprint != work.base.revision:
        raise UserError(
            f"release {release.id[:12]} was trained on a different base than this project has now",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="export it from a project, or with a --model, that has this base",
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(
            f"{to} is not empty", why="nothing is overwritten", fix="specify a new folder", where="--to"
        )
    if to.exists():
        to.rmdir()
    verify_base(work.base)
    with open_store(work).lease() as lease:
        lease.add(release.id)
        adapter = open_store(work).get(release.id)
        if format == "ollama":
            return _for_ollama(work, release, adapter, to, precision)
        return _for_vllm(work, release, adapter, to)


def _for_ollama(
    work: OpenProject, release: Release, adapter: Path, to: Path, precision: GgufPrecision
) -> ExportedRelease:
    base = Path(work.base.folder)
    template = ChatTemplate.from_folder(base, reasoning=work.settings.data.reasoning == "keep")
    model = f"{release.project}-{release.id[:12]}"
    notes = [
        f"the merged weights in {precision} were not evaluated: ask the held-out cases with "
        f"`graft eval --subject http://127.0.0.1:11434/v1#{model}`"
    ]
    if find_turn_texts(template) is None:
        notes.append(
            "the chat template could not be written in Ollama's language; compare a prompt before use"
        )
    with atomic_folder(to) as folder:
        write_merged(base, adapter, folder / f"{model}.gguf", precision=precision)
        write_atomic(folder / "Modelfile", write_modelfile(template, gguf=f"{model}.gguf"))
        return _finish(
            release,
            folder,
            to,
            format="ollama",
            command=f"ollama create {model} -f {shlex.quote(str(to / 'Modelfile'))}",
            precision=precision,
            notes=tuple(notes),
        )


def _for_vllm(work: OpenProject, release: Release, adapter: Path, to: Path) -> ExportedRelease:
    rank = lora_rank(adapter)
    if rank is None:
        raise UserError(
            f"release {release.id[:12]} is not an adapter that vLLM can serve",
            why="vLLM applies plain LoRA adapters only",
            fix="export the merged weights: `graft release export run --format merged`",
        )
    name = f"{release.project}-{release.id[:12]}"
    command = [
        *("vllm", "serve", "base", "--enable-lora", "--max-lora-rank", str(rank)),
        *("--lora-modules", f"{name}=adapters/{name}", "--generation-config", "vllm", "--host", "127.0.0.1"),
    ]
    with atomic_folder(to) as folder:
        copy_base(work.base, folder / "base")
        (folder / "adapters" / name).mkdir(parents=True)
        for file in ADAPTER_FILES:
            shutil.copyfile(adapter / file, folder / "adapters" / name / file)
        line = shlex.join(command)
        write_atomic(folder / "serve.sh", f'#!/bin/sh\ncd "$(dirname "$0")" && exec {line} "$@"\n')
        note = f"ask for the model {name}; vLLM halves the precision of float32 files unless --dtype is given"
        return _finish(
            release, folder, to, format="vllm", command=f"sh {to / 'serve.sh'}", precision="", notes=(note,)
        )


def _finish(
    release: Release,
    folder: Path,
    to: Path,
    *,
    format: ProgramFormat,
    command: str,
    precision: str,
    notes: tuple[str, ...],
) -> ExportedRelease:
    files = {
        str(path.relative_to(folder)): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    exported = ExportedRelease(
        release_id=release.id,
        format=format,
        folder=str(to),
        command=command,
        precision=precision,
        base_fingerprint=release.base_fingerprint,
        adapter_hash=release.adapter_hash,
        files=files,
        notes=notes,
    )
    write_atomic(folder / EXPORT_FILE, json.dumps(exported.model_dump(mode="json"), indent=2) + "\n")
    return exported
