"""Trains the router of a family from its prepared datasets: which model is each question for?

Input: an open project with several models. Output: a `TrainedRouter`. The router reads the user's turns only,
because system prompts name the role. Its questions are split as those of the models are.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from graftwork.data.project import PreparedData
from graftwork.data.settings import Keep
from graftwork.evaluate.statistics.means import bounded_mean
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.files.safetensors import router_path, write_router
from graftwork.pipeline.table import run_pipeline
from graftwork.project.open_project import OpenProject
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row, Split
from graftwork.records.errors import UserError
from graftwork.records.live import MeasuredShare, RouterCard, TrainedRouter
from graftwork.text.classifier import Prediction, TextClassifier, set_threshold, train_classifier

TARGET = 0.95
MOST_ROWS = 20_000
"""More rows teach a linear classifier little, and make it slow to train."""
UNSURE = "unsure"
_TIMED = 200

Judged = Sequence[tuple[Row, str, Prediction]]
"""Rows with their model and the router's prediction."""


def train_router(work: OpenProject, *, target: float = TARGET) -> TrainedRouter:
    """Train, calibrate and measure the router; `graft serve` uses it from then on."""
    settings = work.project.settings
    prepared = run_pipeline(work, upto="prepare").get("prepare", PreparedData)
    folders = {name: Path(folder) for name, folder in prepared.folders.items()}
    train = _read(folders, ("train", "rl"))[:MOST_ROWS]
    validation, test = _read(folders, ("validation",)), _read(folders, ("test",))
    labels = Counter(model_of(row, settings) for row in train)
    if len(labels) < 2:
        raise UserError(
            "a router needs rows of at least two models",
            why=f"all {len(train)} training rows belong to {next(iter(labels), settings.main_model)}",
            fix="give the models under `models:` their own rows with `keep`",
            where="models",
        )
    if not validation or not test:
        raise UserError(
            "a router needs held-out questions",
            why="its threshold is chosen on the validation split and its accuracy measured on the test split",
            fix="raise data.validation and data.test, or add logs",
            where="data",
        )
    work.reporter.info(f"training the router on {len(train)} questions of {len(labels)} models")
    classifier = train_classifier(
        [user_text(row) for row in train],
        [model_of(row, settings) for row in train],
        check_texts=[user_text(row) for row in validation],
        check_labels=[model_of(row, settings) for row in validation],
    )
    predictions = [(p, truth) for _, truth, p in _judge(classifier, validation, settings)]
    classifier = set_threshold(classifier, predictions, target=target)
    judged = _judge(classifier, test, settings)
    sure = [(row, truth, p) for row, truth, p in judged if p.label is not None]
    confusion: defaultdict[str, Counter[str]] = defaultdict(Counter)
    bins: defaultdict[int, list[float]] = defaultdict(list)
    for _, truth, prediction in judged:
        confusion[truth][prediction.label or UNSURE] += 1
        gap = prediction.probability - (prediction.likeliest == truth)
        bins[min(int(prediction.probability * 10), 9)].append(gap)
    card = RouterCard(
        id="",
        labels=classifier.labels,
        main=settings.main_model,
        threshold=classifier.threshold,
        target=target,
        datasets={name: read_manifest(folder).content_hash for name, folder in folders.items()},
        trained_on=len(train),
        chosen_on=len(validation),
        accuracy=_share(judged, [p.likeliest == truth for _, truth, p in judged]),
        sure_accuracy=_share(sure, [p.label == truth for _, truth, p in sure]),
        unsure=_share(judged, [p.label is None for _, _, p in judged]),
        calibration_error=sum(abs(sum(gaps)) for gaps in bins.values()) / max(len(judged), 1),
        confusion={truth: dict(sorted(counts.items())) for truth, counts in sorted(confusion.items())},
    )
    card = card.model_copy(update={"id": fingerprint(card.model_dump(mode="json", exclude={"id"}))})
    path = router_path(work.project.state)
    write_router(path, classifier, card)
    texts = [user_text(row) for row in test[:_TIMED]]
    began = time.process_time()
    for text in texts:
        classifier.predict(text)
    milliseconds = 1000 * (time.process_time() - began) / len(texts)
    return TrainedRouter(card=card, path=str(path), milliseconds=milliseconds)


def user_text(row: Row) -> str:
    return "\n".join(message.content for message in row.messages if message.role == "user")


def model_of(row: Row, settings: ProjectSettings) -> str:
    """The specialist that has the row, or the main model."""
    for name, model in settings.all_models.items():
        if name != settings.main_model and keeps(
            model.keep, group=row.group, domain=row.domain, stage=row.stage
        ):
            return name
    return settings.main_model


def keeps(keep: Keep, *, group: str | None, domain: str | None, stage: int | None = None) -> bool:
    return (
        (not keep.role or group in keep.role)
        and (not keep.domain or domain in keep.domain)
        and (not keep.stage or stage in keep.stage)
    )


def _read(folders: dict[str, Path], splits: Sequence[Split]) -> list[Row]:
    """The rows of all models, each once."""
    questions = {
        row.id: row for folder in folders.values() for split in splits for row in iterate_rows(folder, split)
    }
    return [questions[key] for key in sorted(questions)]


def _judge(classifier: TextClassifier, rows: Sequence[Row], settings: ProjectSettings) -> Judged:
    return [(row, model_of(row, settings), classifier.predict(user_text(row))) for row in rows]


def _share(judged: Judged, holds: Sequence[bool]) -> MeasuredShare:
    sessions = [row.session or row.id for row, _, _ in judged]
    low, high = bounded_mean([float(value) for value in holds], sessions)
    value = sum(holds) / len(holds) if holds else 0.0
    return MeasuredShare(value=value, low=low, high=high, n=len(holds))
