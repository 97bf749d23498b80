"""The policy of what stays: the verified, the newest, the best; and nothing beyond."""

import math

from hypothesis import given
from hypothesis import strategies as st

from graftwork.train.checkpoints import SavedCheckpoint, best_of, is_better, steps_to_keep

scores = st.none() | st.floats(-10, 10) | st.just(math.nan)
saved = st.builds(SavedCheckpoint, st.integers(1, 60), scores)
found = st.lists(saved, max_size=12, unique_by=lambda item: item.step)


@given(found, st.integers(1, 60), st.integers(1, 5))
def test_the_verified_one_the_newest_and_the_best_stay(found, verified, newest):
    keep = steps_to_keep(found, verified=verified, newest=newest)
    past = sorted({verified, *(item.step for item in found if item.step <= verified)})
    assert verified in keep
    assert set(past[-newest:]) <= keep
    best = best_of([item for item in found if item.step <= verified])
    assert best is None or best.step in keep
    assert len(keep) <= newest + 1
    assert all(step <= verified for step in keep)


@given(found, st.integers(1, 5))
def test_along_a_whole_run_the_best_evaluation_is_never_let_go(found, newest):
    there: list[SavedCheckpoint] = []
    for item in sorted(found, key=lambda saved: saved.step):
        keep = steps_to_keep([*there, item], verified=item.step, newest=newest)
        there = [saved for saved in (*there, item) if saved.step in keep]
    assert best_of(there) == best_of(found)
    assert not found or max(item.step for item in found) in {saved.step for saved in there}


@given(found, scores)
def test_better_means_smaller_than_all_before(found, score):
    looked = [item.score for item in found if item.score is not None and not math.isnan(item.score)]
    expected = score is not None and not math.isnan(score) and all(score < other for other in looked)
    assert is_better(score, found) == expected


def test_of_equal_looks_the_earliest_is_the_best():
    assert best_of([SavedCheckpoint(20, 0.5), SavedCheckpoint(10, 0.5), SavedCheckpoint(30, 0.7)]).step == 10
