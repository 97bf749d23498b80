"""Several runs in one process: whose crashes count, and what is left of one run when the next begins."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from graftwork.files.disk import Journal, write_atomic
from graftwork.records.errors import WorkerFailed
from graftwork.records.fleet import Moment
from graftwork.train import multi_run
from graftwork.train.multi_run import _require_patience, consecutive_crashes, train_many
from graftwork.train.run_folder import ATTEMPTS, OUTCOME, SAVED, failure_of, is_settled


@pytest.mark.parametrize(
    ("attempts", "saved", "crashes"),
    [
        ([], [], 0),
        ([10, 20, 30], [], 3),
        # Another command's, long ago.
        ([1, 2, 10], [(1.5, 4)], 1),
        # The second came further and was killed after that: its crash counts, those before do not.
        ([10, 20], [(25, 4)], 1),
        ([10, 20, 30, 40], [(15, 2), (25, 4)], 3),
        # Saving the same step again is no progress.
        ([10, 20, 30], [(15, 4), (25, 4), (35, 4)], 3),
        ([10, 20, 30], [(15, 4), (25, 4), (35, 6)], 1),
    ],
)
def test_only_crashes_since_the_newest_checkpoint_count(attempts, saved, crashes):
    assert consecutive_crashes(attempts, saved, begun=5) == crashes


def make_job(folder, *, max_restarts=1):
    plan = SimpleNamespace(train={"settings": {}})
    return SimpleNamespace(
        run_id=folder.name,
        folder=str(folder),
        base_folder="base",
        start_adapter=None,
        plan=plan,
        run={"max_restarts": max_restarts},
        crew={},
        keeping={},
        endpoint={},
    )


def when(at):
    """The moment of a journal's line by a clock that nobody sets."""
    return {"at": at, "steady": at - 5, "boot": ""}


def test_a_run_that_comes_further_each_time_is_never_given_up(tmp_path):
    job, clock = make_job(tmp_path), iter(range(10, 1000))
    for step in range(20):
        _require_patience(job, begun=Moment(at=5, steady=0, boot=""))
        Journal(tmp_path / ATTEMPTS).append({"pid": 1, **when(next(clock))})
        Journal(tmp_path / SAVED).append({**when(next(clock)), "step": step, "folder": "x"})
    _require_patience(job, begun=Moment(at=5, steady=0, boot=""))
    Journal(tmp_path / ATTEMPTS).append({"pid": 1, **when(next(clock))})
    with pytest.raises(WorkerFailed, match="killed 2 time"):
        _require_patience(job, begun=Moment(at=5, steady=0, boot=""))


class Card:
    """Stands in for torch.cuda."""

    def __init__(self):
        self.asked = []

    def is_available(self):
        return True

    is_initialized = is_available

    def empty_cache(self):
        self.asked.append("empty")

    def set_per_process_memory_fraction(self, share):
        self.asked.append(share)


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self):
        self.self = self


@pytest.fixture
def _few_objects():
    """The collector visits what a test makes, not what all before it have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_few_objects")
@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_run_is_free_when_the_next_begins(tmp_path, monkeypatch, fails):
    card, left, alive = Card(), [], []
    monkeypatch.setattr(torch, "cuda", card)
    jobs = [make_job(tmp_path / name) for name in ("one", "two")]

    def train(job, _load, _crew):
        alive.extend(ref() is not None for ref in left)
        left.append(weakref.ref(Knot()))
        if fails:
            raise ValueError("broken")
        write_atomic(tmp_path / job.run_id / OUTCOME, "{}")

    batch = SimpleNamespace(jobs=jobs, side_by_side=(), begun=Moment(at=0, steady=0, boot=""))
    train_many(batch, train)
    assert alive == [False]
    assert card.asked == ["empty", 1.0] * 2
    assert all(is_settled(job) for job in jobs)
    assert [failure_of(job) is not None for job in jobs] == [fails, fails]


@pytest.mark.usefixtures("_few_objects")
def test_without_a_card_that_was_used_none_is_touched(monkeypatch):
    card = Card()
    card.is_initialized = lambda: False
    monkeypatch.setattr(torch, "cuda", card)
    multi_run.free_memory()
    assert card.asked == []
