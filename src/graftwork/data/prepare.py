"""Logs to a dataset: filtered, redacted, without repeats, rendered, split by question, proven.

In: settings, the base model's name and fingerprint, a renderer for its template, a folder. Out: the
manifest and the folder `out/<content_hash>`, which appears whole or not at all. `content_hash`
covers the manifest, and through the hashes in it every row. Knows no model, only its renderer.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from graftwork.data.leak import require_no_leak
from graftwork.data.ports import Renderer
from graftwork.data.read import ReadFault, find_files, read_file
from graftwork.data.render import render_rows, summarise
from graftwork.data.select import STEPS, Selection
from graftwork.data.settings import DataSettings
from graftwork.data.split import Dealt, deal_rows, group_rows
from graftwork.files.dataset_folder import MANIFEST, encode_rows, hash_manifest, split_file
from graftwork.files.digest import file_digest
from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.records.dataset import SPLITS, Dataset, Drop, InputFile, Split, SplitSummary
from graftwork.records.errors import AnswerIsNo
from graftwork.records.interaction import Interaction

_HINTS = {
    "read": "most rows could not be read: run `graft data audit` to see why; ",
    "filter": "most rows were filtered out: run `graft data audit` to see why; ",
    "render": "most rows are longer than data.max_tokens: raise it; ",
}

Progress = Callable[[str, int, int], None]


def prepare(
    settings: DataSettings,
    *,
    base: str,
    base_fingerprint: str,
    renderer: Renderer,
    out: Path,
    root: Path = Path(),
    on_progress: Progress | None = None,
) -> tuple[Dataset, Path]:
    """Make the dataset. Log files are named relative to `root`."""
    report = on_progress or _say_nothing
    inputs, selection = _read_all(settings, root=root, report=report)
    for place, (name, step) in enumerate(STEPS):
        report(name, place, len(STEPS))
        step(selection, settings)
    rendering = render_rows(selection.rows, settings=settings, renderer=renderer, on_progress=report)
    selection.drops += rendering.drops
    selection.kept_after["render"] = len(rendering.rows)
    report("split", 0, 1)
    # Grouped after the overlong rows went: the leak check then weighs words as the grouping did.
    groups = group_rows(rendering.kept, threshold=settings.question_similarity)
    splits = deal_rows(rendering.rows, groups, settings=settings)
    _require_rows(splits, settings, selection=selection)
    report("leak check", 0, 1)
    require_no_leak(
        {split: dealt.rows for split, dealt in splits.items()}, threshold=settings.question_similarity
    )
    encoded = {split: encode_rows(splits[split].rows) for split in SPLITS}
    unnamed = Dataset(
        content_hash="",
        base=base,
        base_fingerprint=base_fingerprint,
        template_fingerprint=renderer.template_fingerprint,
        tokenizer_fingerprint=renderer.tokenizer_fingerprint,
        inputs=tuple(inputs),
        splits={split: _summarise(splits[split], encoded[split]) for split in SPLITS},
        lengths={split: tuple(len(row.tokens) for row in splits[split].rows) for split in SPLITS},
        kept_after=selection.kept_after,
        drops=tuple(selection.drops),
        redactions=selection.redactions,
        settings=settings.model_dump(mode="json"),
    )
    dataset = unnamed.model_copy(update={"content_hash": hash_manifest(unnamed)})
    folder = out / dataset.content_hash
    _write(folder, dataset, encoded)
    report("write", 1, 1)
    return dataset, folder


def _read_all(settings: DataSettings, *, root: Path, report: Progress) -> tuple[list[InputFile], Selection]:
    """Every readable row; the others are dropped by name."""
    files = find_files(settings.logs, root=root)
    inputs: list[InputFile] = []
    rows: list[Interaction] = []
    drops: list[Drop] = []
    for place, name in enumerate(files):
        report("read", place, len(files))
        before = len(rows) + len(drops)
        for result in read_file(name, root=root):
            if isinstance(result, ReadFault):
                reason = f"{result.code}: {result.message}"
                drops.append(Drop(origin=result.origin, step="read", reason=reason))
            else:
                rows.append(result)
        count = len(rows) + len(drops) - before
        inputs.append(InputFile(file=name, sha256=file_digest(root / name), rows=count))
    return inputs, Selection(rows=rows, drops=drops, kept_after={"read": len(rows)})


def _summarise(dealt: Dealt, data: bytes) -> SplitSummary:
    return summarise(dealt.rows, groups=dealt.groups, sha256=hashlib.sha256(data).hexdigest())


def _write(folder: Path, dataset: Dataset, encoded: Mapping[Split, bytes]) -> None:
    with folder_made_whole(folder) as part:
        for split, data in encoded.items():
            write_whole(split_file(part, split), data)
        write_whole(part / MANIFEST, dataset.to_json())


def _require_rows(splits: Mapping[Split, Dealt], settings: DataSettings, *, selection: Selection) -> None:
    """A split that was asked for and got nothing is a no, with the numbers that led there."""
    shares: dict[Split, float] = {"train": 1.0, "validation": settings.validation, "test": settings.test}
    empty = [split for split in SPLITS if shares[split] > 0 and not splits[split].rows]
    if not empty:
        return
    counts = ", ".join(f"{count} after {step}" for step, count in selection.kept_after.items())
    gone = Counter(drop.step for drop in selection.drops)
    worst = gone.most_common(1)[0][0] if gone else ""
    raise AnswerIsNo(
        f"no row is left for {' and '.join(empty)}",
        why=f"rows: {counts}",
        fix=_HINTS.get(worst, "")
        + "log more, or set the share of a split that you do not need to 0, or try another data.seed",
        where=", ".join(settings.logs),
    )


def _say_nothing(_step: str, _done: int, _total: int) -> None:
    return
