import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.similarity import (
    NO_WEIGHTS,
    Clusters,
    Ragged,
    as_sets,
    distinct,
    measure_pairs,
    number_text,
    number_words,
    run_words,
    weigh,
)
from graftwork.text.words import words


def test_numbers_of_texts_are_the_same_in_every_process_and_never_0():
    assert number_text("harp") == 4771653749306493653
    assert number_text("") != 0
    assert number_text("\ud800") != 0


def ragged(*texts):
    found = [words(text) for text in texts]
    return Ragged(
        number_words([word for text in found for word in text]),
        np.concatenate(([0], np.cumsum([len(text) for text in found]))).astype(np.int64),
    )


def sets_of(*texts, size=1):
    """As the sets of lines: single words have even numbers."""
    runs = run_words(ragged(*texts), size=size)
    return as_sets(Ragged(runs.values << np.uint64(1), runs.offsets))


def measure(sets, one, other, **more):
    weights = more.pop("weights", NO_WEIGHTS)
    likeness, containment = measure_pairs(
        sets, np.array([one]), np.array([other]), weighed=weights.of(sets.values), **more
    )
    return float(likeness[0]), float(containment[0])


def test_a_text_shorter_than_a_run_is_one_by_itself():
    assert np.diff(run_words(ragged("two words", " ?! ", "now three of them"), size=3).offsets).tolist() == [
        1,
        0,
        2,
    ]


def test_runs_do_not_reach_over_the_end_of_a_text():
    alone = run_words(ragged("a b c d"), size=2).values
    among = run_words(ragged("x", "a b c d", "y z"), size=2)
    assert among.values[among.offsets[1] : among.offsets[2]].tolist() == alone.tolist()


def test_shared_boilerplate_weighs_less_than_what_differs():
    common = "please answer this question about the "
    sets = sets_of(*(common + name for name in ("lynx", "otter", "heron", "badger", "stoat")))
    assert measure(sets, 0, 1, weights=weigh(sets))[0] < measure(sets, 0, 1)[0] == pytest.approx(6 / 8)


def test_a_text_that_holds_another_contains_it():
    sets = sets_of("how old is it", "please look up how old is it")
    assert measure(sets, 0, 1, weights=weigh(sets))[1] == pytest.approx(1.0)


def test_two_empty_texts_say_nothing_about_each_other():
    assert measure(sets_of("", "?"), 0, 1) == (0.0, 0.0)


TEXTS = st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=8).map(" ".join), min_size=2, max_size=8)


@given(TEXTS)
def test_the_measures_are_those_of_the_book(texts):
    sets = sets_of(*texts)
    plain = [set(text.split()) for text in texts]
    counts = {word: sum(word in other for other in plain) for text in plain for word in text}
    total = sum(1 for text in plain if text)

    def weight(some):
        return math.fsum(math.log1p(total / counts[word]) for word in some)

    for first in range(len(texts)):
        for other in range(len(texts)):
            likeness, containment = measure(sets, first, other, weights=weigh(sets))
            common, either = weight(plain[first] & plain[other]), weight(plain[first] | plain[other])
            smaller = min(weight(plain[first]), weight(plain[other]))
            assert likeness == pytest.approx(common / either if either else 0)
            assert containment == pytest.approx(common / smaller if smaller else 0)
            if plain[first] and plain[first] == plain[other]:
                assert likeness == containment == 1.0


def test_the_lowest_values_are_a_fair_sample_of_large_sets():
    base = [f"word{n}" for n in range(4000)]
    sets = as_sets(
        run_words(ragged(" ".join(base[:3200]), " ".join(base[800:]), " ".join(base)), size=1), lowest=400
    )
    assert np.diff(sets.offsets).tolist() == [400, 400, 400]
    likeness = measure(sets, 0, 1, sampled=400)[0]
    assert likeness == pytest.approx(2400 / 4000, abs=0.1)
    assert measure(sets, 0, 2, sampled=400)[0] == pytest.approx(0.8, abs=0.1)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_distinct_values_are_sorted_and_occur_once(values):
    assert distinct(np.array(values, dtype=np.uint64)).tolist() == sorted(set(values))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_clusters_are_the_same_in_any_order_and_named_by_their_first(joins):
    def made(order):
        clusters = Clusters(10)
        for one, other in order:
            clusters.join(one, other)
        return clusters.names().tolist()

    names = made(joins)
    assert names == made(joins[::-1])
    assert all(names[one] == names[other] for one, other in joins)
    assert all(names[name] == name <= place for place, name in enumerate(names))
