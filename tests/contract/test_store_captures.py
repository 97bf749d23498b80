import itertools

import pytest
from new_database import on_both_databases
from store_samples import WHEN, capture

from graftwork.records.dataset import ReviewDecision, ReviewItem
from graftwork.records.interaction import Capture, Feedback
from graftwork.store import captures as store_captures
from graftwork.store.captures import CaptureStore, FeedbackStore, ReviewStore
from graftwork.store.database import Database
from graftwork.store.schema import json_text


@pytest.fixture
def captures(database: Database) -> CaptureStore:
    return CaptureStore(database, project="one")


@on_both_databases
def test_captures_come_back_as_they_went_in(captures: CaptureStore):
    odd = capture("c1", question='"quoted"\n\u0000 naïve 漢字 % _', reply="\\ {}")
    assert captures.add([odd]) == 1
    assert captures.get("c1") == odd
    assert captures.get("c2") is None


def test_the_newest_come_first(captures: CaptureStore):
    captures.add([capture(f"c{n}") for n in range(5)])
    assert [c.id for c in captures.page(limit=2)] == ["c4", "c3"]


@on_both_databases
def test_a_capture_is_kept_once(captures: CaptureStore):
    assert captures.add([capture("c1", reply="first"), capture("c2")]) == 2
    assert captures.add([capture("c1", reply="second"), capture("c3"), capture("c3")]) == 1
    assert captures.count() == 3
    kept = captures.get("c1")
    assert kept is not None
    assert kept.reply == "first"


def test_adding_none_is_fine(captures: CaptureStore):
    assert captures.add([]) == 0


@on_both_databases
def test_a_text_is_found_letter_for_letter(captures: CaptureStore):
    captures.add([capture("other", question="100x aXb")])
    for number, text in enumerate(['say "please"', "line\nbreak", "漢字", "100%", "a_b", "\\n", "c7"]):
        captures.add([capture(f"t{number}", question=f"before {text} after")])
        assert [c.id for c in captures.page(text=text)] == [f"t{number}"]


def test_upper_and_lower_case_differ_and_the_reply_is_searched_too(captures: CaptureStore):
    captures.add([capture("c1", reply="Paris is right")])
    assert len(captures.page(text="Paris")) == 1
    assert captures.page(text="paris") == ()


def test_the_captures_of_a_release_can_be_selected(captures: CaptureStore):
    captures.add([capture("c1", by="r1"), capture("c2", by="r2"), capture("c3", by="r1")])
    assert (captures.count(release="r1"), captures.count(release="r9")) == (2, 0)
    assert [c.id for c in captures.export(release="r1")] == ["c1", "c3"]


def test_the_export_gives_all_in_order_over_many_pages(captures: CaptureStore):
    names = [f"c{n:05}" for n in range(1203)]
    captures.add([capture(name) for name in names])
    assert [c.id for c in captures.export()] == names


def test_new_captures_can_be_added_while_others_are_exported(captures: CaptureStore):
    captures.add([capture(f"c{n}") for n in range(501)])
    reading = captures.export()
    next(reading)
    captures.add([capture("late")])
    assert "late" in {c.id for c in reading}


@on_both_databases
def test_half_a_surrogate_pair_does_not_lose_the_batch(captures: CaptureStore):
    captures.add([capture("c1"), capture("c2", question="half \ud800 pair")])
    assert captures.count() == 2


def test_projects_do_not_see_each_others_captures(database: Database, captures: CaptureStore):
    captures.add([capture("c1")])
    other = CaptureStore(database, project="two")
    assert (other.count(), other.page(text="Where"), other.page()) == (0, (), ())
    assert other.add([capture("c1")]) == 1


def test_copies_of_live_requests_are_read_without_the_live_ones(captures: CaptureStore):
    quoting = capture("c2", by="r1", question='"shadow_of":"c9"')
    named = capture("c3", by="r1").model_copy(update={"request": {"messages": [], "shadow_of": "c9"}})
    copy = capture("c4", by="r1", shadow_of="c1")
    captures.add([capture("c1", by="r1"), quoting, named, copy, capture("c5", by="r2", shadow_of="c1")])
    assert [found for _, found in captures.read_on(releases=("r1",), copies_only=True)] == [copy]


@on_both_databases
def test_an_exchange_that_was_assigned_says_so_and_is_found_by_its_experiment(captures: CaptureStore):
    assigned = capture("c2", by="r2", dealt="r1.r2.0", arm="challenger", share=0.1)
    captures.add([capture("c1", by="r1"), assigned, capture("c3", by="r1", dealt="r1.r2.0", arm="champion")])
    captures.add([capture("c4", by="r1", dealt="r1.r3.0", arm="champion"), capture("c5", by="r3")])
    assert captures.get("c2") == assigned
    read = list(captures.read_on(releases=("r1", "r2"), experiment="r1.r2.0"))
    assert [found.id for _, found in read] == ["c2", "c3"]
    assert [found.id for _, found in captures.read_on(releases=("r1", "r2"))] == ["c1", "c2", "c3", "c4"]
    later = captures.read_on(after=read[0][0], releases=("r1", "r2"), experiment="r1.r2.0")
    assert [found.id for _, found in later] == ["c3"]
    assert captures.experiments() == ("r1.r2.0", "r1.r3.0")
    captures.add([capture("c6", by="r1", dealt="r1.r2.0", arm="champion")])
    assert captures.experiments() == ("r1.r3.0", "r1.r2.0")


def test_reading_on_gives_each_capture_once_over_many_pages(captures: CaptureStore):
    names = [f"c{n:04}" for n in range(1100)]
    captures.add([capture(name, by="r1") for name in names])
    before = list(itertools.islice(captures.read_on(releases=("r1",)), 700))
    captures.add([capture("late", by="r1")])
    after = captures.read_on(after=before[-1][0], releases=("r1",))
    read = [found.id for _, found in (*before, *after)]
    assert read == [*names, "late"]


def test_experiments_of_another_project_are_not_reported(database: Database, captures: CaptureStore):
    captures.add([capture("c1", dealt="x.y.0", arm="champion")])
    other = CaptureStore(database, project="two")
    assert other.experiments() == ()
    assert list(other.read_on(releases=("base",))) == []


def test_a_capture_from_before_experiments_still_loads():
    old = capture("c1").model_dump(mode="json", exclude={"dealt", "arm", "share", "feedback"})
    assert Capture.model_validate(old) == capture("c1")


def test_deleted_captures_take_their_feedback_and_reviews_along(database: Database, captures: CaptureStore):
    captures.add([capture("c1"), capture("c2")])
    book = FeedbackStore(database, project="one")
    for name in ("c1", "c2"):
        assert book.add(Feedback(capture=name, at=WHEN, score=1.0))
    book_of_reviews = ReviewStore(database, project="one")
    for name in ("c1", "c2"):
        item = ReviewItem(key=name, kind="capture", messages=(), reply="x", reasons={}, capture=name)
        book_of_reviews.add(ReviewDecision(item=item, action="accept", who="ada", at=WHEN))
    assert captures.delete(["c1", "nobody"]) == (1, 1, 1)
    assert [c.id for c in captures.export()] == ["c2"]
    assert book.count() == 1
    assert book_of_reviews.decided() == {"c2"}
    assert not book.add(Feedback(capture="c1", at=WHEN, score=1.0))


def test_old_captures_are_pruned_by_age_and_size(captures: CaptureStore):
    samples = [capture(f"c{n}").model_copy(update={"at": f"2026-01-0{n + 1}T00:00:00"}) for n in range(6)]
    captures.add(samples)
    assert captures.prune(before="2026-01-03T00:00:00").captures == 2
    assert [c.id for c in captures.export()] == ["c2", "c3", "c4", "c5"]
    size = len(json_text(samples[0].model_dump(mode="json")))
    captures.prune(most_bytes=int(2.5 * size))
    assert [c.id for c in captures.export()] == ["c4", "c5"]
    assert captures.prune() == (0, 0, 0)


def test_captures_are_found_by_a_whole_value(captures: CaptureStore):
    captures.add([capture("c1", question="ada"), capture("c2", question="adam"), capture("c3")])
    assert [c.id for c in captures.holding(["ada", 'x"y'])] == ["c1"]


@pytest.fixture
def feedback(database: Database) -> FeedbackStore:
    return FeedbackStore(database, project="one")


def make_feedback(name: str, score: float, comment: str | None = None) -> Feedback:
    return Feedback(capture=name, at=WHEN, score=score, comment=comment, who="ada")


@on_both_databases
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


@on_both_databases
def test_feedback_is_read_in_the_order_of_arrival_with_its_capture(
    captures: CaptureStore, feedback: FeedbackStore
):
    first = capture("c1", by="r1", dealt="r1.r2.0", arm="champion")
    captures.add([first, capture("c2", by="r2", dealt="r1.r2.0", arm="challenger"), capture("c3", by="r3")])
    captures.add([capture("c4", by="r2")])
    for name, score in (("c2", 1.0), ("c3", 0.5), ("c1", 0.0), ("c4", 0.7)):
        feedback.add(make_feedback(name, score))
    heard = list(feedback.read_on(releases=("r1", "r2"), experiment="r1.r2.0"))
    assert [(about.id, entry.score) for _, entry, about in heard] == [("c2", 1.0), ("c1", 0.0)]
    assert heard[1][2] == first
    assert [about.id for _, _, about in feedback.read_on(releases=("r1", "r2"))] == ["c2", "c1", "c4"]
    later = feedback.read_on(after=heard[0][0], releases=("r1", "r2"), experiment="r1.r2.0")
    assert [about.id for _, _, about in later] == ["c1"]


def test_reading_on_gives_each_feedback_once_over_many_pages(
    captures: CaptureStore, feedback: FeedbackStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_captures, "_PAGE", 4)
    captures.add([capture("c1", by="r1")])
    for n in range(11):
        feedback.add(make_feedback("c1", n / 10 if n < 10 else 1.0))
    heard = list(feedback.read_on(releases=("r1",)))
    assert [entry.score for _, entry, _ in heard] == [n / 10 for n in range(11)]
    assert len({position for position, _, _ in heard}) == 11


def test_an_exported_capture_has_the_latest_feedback(captures: CaptureStore, feedback: FeedbackStore):
    captures.add([capture("c1"), capture("c2")])
    for score in (0.0, 0.8):
        feedback.add(make_feedback("c1", score))
    assert [(capture.id, capture.feedback) for capture in captures.export()] == [("c1", 0.8), ("c2", None)]
    kept = captures.get("c1")
    assert kept is not None
    assert kept.feedback is None  # what was captured stays what it was
