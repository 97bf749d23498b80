"""Logs to datasets: one for each model, filtered, redacted, without repeats, split, rendered, proven.

In: settings, the base model's name and fingerprint, a renderer for its template, folders to work
in. Out: manifests and folders. Memory does not grow with the logs: rows stay on disk, and only
columns of numbers are held for all of them. Knows no model, only its renderer.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import orjson

from graftwork.data.assemble import Placed, assemble, write_drops
from graftwork.data.corpus import Corpus
from graftwork.data.dealing import Dealing, find_unfit_references, group_and_deal
from graftwork.data.doubts import find_doubts, require_split_key
from graftwork.data.dropped import Outcomes, count_kept, list_dropped
from graftwork.data.gather import gather
from graftwork.data.leak import require_no_leak
from graftwork.data.memory import Memory
from graftwork.data.paraphrase import find_embedder
from graftwork.data.portions import NOT_ITS_OWN, Facts, Portion, PortionSummary, divide, portion_table
from graftwork.data.ports import Progress, Renderer
from graftwork.data.render import PORTION_SPLITS
from graftwork.data.rendering import Rendering, render_corpus
from graftwork.data.repeats import Repeats, find_repeats
from graftwork.data.rules.note import Sight
from graftwork.data.settings import DataSettings, ModelSettings
from graftwork.files.dataset import DROPS
from graftwork.records.dataset import SPLITS, Dataset
from graftwork.records.errors import AnswerIsNo
from graftwork.text.publish import publishable

SIFTED, SHARDS = "sifted", "shards"
MAIN: Mapping[str, ModelSettings] = {"main": ModelSettings()}


class Base(NamedTuple):
    """The base model that the rows are rendered for."""

    name: str
    fingerprint: str
    renderer: Renderer


class Prepared(NamedTuple):
    dataset: Dataset
    folder: Path
    summary: PortionSummary


class Preparation(NamedTuple):
    """A dataset for each model, the main one first; and what in the settings looks like a slip."""

    datasets: list[Prepared]
    doubts: list[str]


class _Kept(NamedTuple):
    """The rows that go on, by place, and what was decided for each of them."""

    places: "np.ndarray[Any, np.dtype[np.int64]]"
    facts: Facts
    portions: list[Portion]


class _Decisions(NamedTuple):
    passed: "np.ndarray[Any, Any]"
    repeats: Repeats
    dealing: Dealing
    kept: _Kept
    unfit_references: set[int]
    doubts: list[str]


def prepare(
    sight: Sight,
    *,
    base: Base,
    work: Path,
    out: Path,
    root: Path = Path(),
    models: Mapping[str, ModelSettings] = MAIN,
    on_progress: Progress | None = None,
    processes: int | None = None,
) -> Preparation:
    """Make the datasets of all models. Log files are named relative to `root`."""
    report = on_progress or _say_nothing
    corpus = gather(sight, folder=work / SIFTED, root=root, on_progress=report, processes=processes)
    decided = _decide(corpus, models=models, sight=sight, work=work, report=report)
    rendering = render_corpus(
        corpus,
        decided.kept.places,
        decided.kept.portions,
        staged={name for name, model in models.items() if model.curriculum},
        renderer=base.renderer,
        settings=sight.settings,
        folder=work / SHARDS,
        report=report,
        processes=processes,
    )
    report("write", 0, 1)
    made = _write(corpus, decided, rendering, base=base, models=models, sight=sight, work=work, out=out)
    summaries = portion_table(decided.kept.portions, decided.kept.facts)
    datasets = [Prepared(*one, summary) for one, summary in zip(made, summaries, strict=True)]
    return Preparation(datasets, decided.doubts)


def _decide(
    corpus: Corpus, *, models: Mapping[str, ModelSettings], sight: Sight, work: Path, report: Progress
) -> _Decisions:
    """Which rows go on, into which split, to which model; proven to leak nothing."""
    settings = sight.settings
    report("find repeats", 0, 1)
    repeats = find_repeats(corpus, settings=settings)
    report("group and split", 0, 1)
    passed = corpus.column("passed")
    doubts = require_split_key(corpus, passed, settings=settings)
    memory = Memory(work, corpus, settings=settings)
    embedder = find_embedder(settings)
    dealing = group_and_deal(
        corpus, settings=settings, embedder=embedder, known=memory.known, pinned=memory.pinned
    )
    unfit = find_unfit_references(corpus, dealing)
    passed_on = passed & ~_mark(unfit, corpus.rows)
    kept = _choose(corpus, repeats, dealing, passed_on, models=models, sight=sight)
    report("leak check", 0, 1)
    marked = _mark(kept.places, corpus.rows)
    require_no_leak(corpus, dealing, marked, settings=settings, embedder=embedder, known=memory.known)
    memory.keep(dealing, marked)
    doubts += find_doubts(kept.facts, settings=settings, models=models)
    corpus.forget()
    return _Decisions(passed, repeats, dealing, kept, set(unfit.tolist()), doubts)


def _write(
    corpus: Corpus,
    decided: _Decisions,
    rendering: list[Rendering],
    *,
    base: Base,
    models: Mapping[str, ModelSettings],
    sight: Sight,
    work: Path,
    out: Path,
) -> list[tuple[Dataset, Path]]:
    """The folder of each model's dataset."""
    passed, repeats, dealing, kept, unfit, _ = decided
    refused = {place: reason for block in rendering for place, reason in block.refused.items()}
    _require_some_proven(len(kept.places), refused)
    unconfirmed = int((corpus.column("unconfirmed")[kept.places] != 0).sum())
    with TemporaryDirectory(dir=work, prefix=".part-") as scratch:
        drops = Path(scratch) / DROPS
        shortened = {place: reason for block in rendering for place, reason in block.shortened.items()}
        each = Outcomes(repeats, dealing, refused, shortened, _find_unwanted(kept), unfit)
        shard, dropped = write_drops(drops, list_dropped(corpus, each))
        head = Dataset(
            content_hash="",
            base=base.name,
            base_fingerprint=base.fingerprint,
            template_fingerprint=base.renderer.template_fingerprint,
            tokenizer_fingerprint=base.renderer.tokenizer_fingerprint,
            inputs=corpus.inputs,
            splits={},
            kept_after=count_kept(
                passed=passed,
                repeats=repeats,
                dealing=dealing,
                refused=len(refused),
                unfit_references=unfit,
            ),
            dropped=dropped,
            drops=shard,
            redactions=_count_redactions(corpus, passed),
            settings=sight.settings.to_manifest(),
        )
        return [
            _assemble(
                head,
                portion,
                rendering,
                dealing,
                models=models,
                drops=drops,
                out=out,
                unconfirmed=unconfirmed,
            )
            for portion in kept.portions
        ]


def _assemble(
    head: Dataset,
    portion: Portion,
    rendering: list[Rendering],
    dealing: Dealing,
    *,
    models: Mapping[str, ModelSettings],
    drops: Path,
    out: Path,
    unconfirmed: int,
) -> tuple[Dataset, Path]:
    """The dataset of one model."""
    settings = DataSettings.model_validate(head.settings)
    placed = [one for block in rendering for one in block.placed(portion.name, dealing)]
    main = portion.name == next(iter(models))
    _require_rows(
        placed, settings, model=portion.name, after=head.kept_after, main=main, unconfirmed=unconfirmed
    )
    model = publishable(models[portion.name])
    own = head.model_copy(update={"model": portion.name, "settings": {**head.settings, "model": model}})
    length = settings.pack_tokens or settings.max_tokens
    return assemble(own, placed, drops=drops, scratch=drops.parent, out=out, pack_tokens=length)


def _choose(
    corpus: Corpus,
    repeats: Repeats,
    dealing: Dealing,
    passed: "np.ndarray[Any, Any]",
    *,
    models: Mapping[str, ModelSettings],
    sight: Sight,
) -> _Kept:
    places = np.flatnonzero(passed & (repeats.instead < 0) & (dealing.split != 255))
    roles, domains = corpus.labels("group"), corpus.labels("domain")
    facts = Facts(
        role=roles.numbers[places],
        role_names=roles.names,
        domain=domains.numbers[places],
        domain_names=domains.names,
        stage=corpus.column("stage")[places],
        split=dealing.split[places],
        # By content: a founder's place is not the same everywhere, what it asks is.
        group=corpus.column("turn")[dealing.group[places]].view(np.int64),
        key=(corpus.column("prompt") * np.uint64(31) + corpus.column("reply"))[places],
    )
    return _Kept(places, facts, divide(facts, dict(models), seed=sight.settings.seed))


def _find_unwanted(kept: _Kept) -> set[int]:
    """Rows that no model is made of."""
    wanted = np.zeros(len(kept.places), dtype=np.bool_)
    for portion in kept.portions:
        wanted |= portion.split != NOT_ITS_OWN
    return set(kept.places[~wanted].tolist())


def _mark(places: "np.ndarray[Any, Any]", rows: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    marked = np.zeros(rows, dtype=np.bool_)
    marked[places] = True
    return marked


def _count_redactions(corpus: Corpus, passed: "np.ndarray[Any, Any]") -> dict[str, int]:
    counts: Counter[str] = Counter()
    for first, segment in corpus.by_segment():
        for number, packed in enumerate(corpus.read_columns(segment, ["redactions"])["redactions"]):
            if packed and passed[first + number]:
                counts.update(orjson.loads(packed))
    return dict(sorted(counts.items()))


def _require_some_proven(rows: int, refused: Mapping[int, str]) -> None:
    """One row that the template refuses is dropped; a template that refuses all is a mistake."""
    if rows and len(refused) == rows:
        reason, count = Counter(refused.values()).most_common(1)[0]
        raise AnswerIsNo(
            "no row is left to train on",
            why=f"{count} of {rows} rows: {reason}",
            fix="raise data.max_tokens, or check the base model's template",
        )


def _require_rows(
    placed: list[Placed],
    settings: DataSettings,
    *,
    model: str,
    after: Mapping[str, int],
    main: bool,
    unconfirmed: int,
) -> None:
    """A split that was asked for and got nothing is a no, with the numbers that led there."""
    shares = {"train": 1.0, "validation": settings.validation, "test": settings.test}
    there = {one.shard.split for one in placed}
    wanted = SPLITS if main else PORTION_SPLITS[:1]
    empty = [split for split in wanted if shares[split] > 0 and split not in there]
    if not empty:
        return
    counts = ", ".join(f"{count} after {step}" for step, count in after.items())
    why = f"rows: {counts}"
    fix = (
        "run `graft data audit` to see why rows went; log more, or set the share of a split that you do "
        "not need to 0, or try another data.seed"
    )
    if unconfirmed and "train" not in empty:
        why += f"; {unconfirmed} captured replies that nobody confirmed are never held out"
        fix = (
            "add logs that no model of yours wrote, send corrections of captured replies to /v1/feedback, or "
            "set data.captures.positive_confirms"
        )
    raise AnswerIsNo(
        f"no row is left for {' and '.join(empty)} of the model {model}",
        why=why,
        fix=fix,
        where=", ".join(settings.logs),
    )


def _say_nothing(_step: str, _done: int, _total: int) -> None:
    return
