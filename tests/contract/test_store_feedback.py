import pytest
from store_samples import WHEN, capture

from graftwork.records.interaction import Feedback
from graftwork.store import captures as store_feedback
from graftwork.store.captures import CaptureStore, FeedbackStore
from graftwork.store.database import Database


@pytest.fixture
def captures(database: Database) -> CaptureStore:
    return CaptureStore(database, project="one")


@pytest.fixture
def feedback(database: Database) -> FeedbackStore:
    return FeedbackStore(database, project="one")


def make_feedback(name: str, score: float, comment: str | None = None) -> Feedback:
    return Feedback(capture=name, at=WHEN, score=score, comment=comment, who="ada")


def test_feedback_comes_back_as_it_went_in_and_none_is_overwritten(
    captures: CaptureStore, feedback: FeedbackStore
):
    captures.add([capture("c1")])
    words = [
        make_feedback("c1", 0.0, 'no "good" \u0000 漢字 half \ufffd'),
        make_feedback("c1", 1.0),
        make_feedback("c1", 0.3),
    ]
    assert [feedback.add(word) for word in words] == [True] * 3
    assert feedback.of_capture("c1") == tuple(words)
    assert feedback.count() == 3


def test_feedback_on_nothing_is_not_kept(captures: CaptureStore, feedback: FeedbackStore, database: Database):
    CaptureStore(database, project="two").add([capture("c1")])
    assert feedback.add(make_feedback("c1", 1.0)) is False
    assert feedback.count() == 0
    captures.add([capture("c1")])
    assert feedback.add(make_feedback("c1", 1.0)) is True
    assert FeedbackStore(database, project="two").count() == 0


def test_feedback_is_read_in_the_order_of_arrival_with_its_capture(
    captures: CaptureStore, feedback: FeedbackStore
):
    first = capture("c1", by="r1", dealt="r1.r2.0", arm="champion")
    captures.add([first, capture("c2", by="r2", dealt="r1.r2.0", arm="challenger"), capture("c3", by="r3")])
    captures.add([capture("c4", by="r2")])
    for name, score in (("c2", 1.0), ("c3", 0.5), ("c1", 0.0), ("c4", 0.7)):
        feedback.add(make_feedback(name, score))
    heard = list(feedback.read_on(releases=("r1", "r2"), experiment="r1.r2.0"))
    assert [(event.capture.id, event.feedback.score) for event in heard] == [("c2", 1.0), ("c1", 0.0)]
    assert heard[1].capture == first
    assert [entry.capture.id for entry in feedback.read_on(releases=("r1", "r2"))] == ["c2", "c1", "c4"]
    later = feedback.read_on(after=heard[0].place, releases=("r1", "r2"), experiment="r1.r2.0")
    assert [entry.capture.id for entry in later] == ["c1"]


def test_reading_on_gives_each_feedback_once_over_many_pages(
    captures: CaptureStore, feedback: FeedbackStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_feedback, "_PAGE", 4)
    captures.add([capture("c1", by="r1")])
    for n in range(11):
        feedback.add(make_feedback("c1", n / 10 if n < 10 else 1.0))
    heard = list(feedback.read_on(releases=("r1",)))
    assert [event.feedback.score for event in heard] == [n / 10 for n in range(11)]
    assert len({event.place for event in heard}) == 11


def test_an_exported_capture_has_the_latest_feedback(captures: CaptureStore, feedback: FeedbackStore):
    captures.add([capture("c1"), capture("c2")])
    for score in (0.0, 0.8):
        feedback.add(make_feedback("c1", score))
    assert [(capture.id, capture.feedback) for capture in captures.export()] == [("c1", 0.8), ("c2", None)]
    kept = captures.get("c1")
    assert kept is not None
    assert kept.feedback is None  # what was captured stays what it was
