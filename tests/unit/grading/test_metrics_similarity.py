"""Distances between texts: against a plain computation, and figures that are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.answers import shared_words, words_of
from graftwork.grading.metrics import chrf, edit_distance, edit_similarity

texts = st.text(alphabet="abcé 😀", max_size=12)


def plain_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


@given(texts, texts)
def test_the_distance_is_that_of_the_plain_table(a, b):
    assert edit_distance(a, b) == plain_distance(a, b)


@given(texts, texts, texts)
def test_the_distance_is_one(a, b, c):
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("flaw", "lawn", 2),
        ("x" * 300, "y" * 200, 300),
    ],
)
def test_edit_distances_match_known_values(a, b, distance):
    assert edit_distance(a, b) == distance
    assert edit_similarity(a, b) == 1 - distance / max(len(a), len(b))


@pytest.mark.parametrize(
    ("given_text", "expected", "score"),
    [
        # Figures of sacrebleu 2.6, sentence_chrf with its defaults.
        ("the cat sat on the mat", "the cat sat on the mat", 100.0),
        ("the cat is on the mat", "the cat sat on the mat", 61.925),
        ("opens at seven", "The oven opens at six.", 44.790),
        ("ab", "abc", 63.636),
        ("xyz", "abc", 0.0),
        ("", "abc", 0.0),
    ],
)
def test_chrf_is_that_of_sacrebleu(given_text, expected, score):
    assert 100 * chrf(given_text, expected) == pytest.approx(score, abs=0.001)


@given(texts, texts)
def test_similarities_are_between_0_and_1_and_are_1_for_the_same(a, b):
    assert 0 <= chrf(a, b) <= 1
    assert 0 <= edit_similarity(a, b) <= 1
    assert edit_similarity(a, a) == 1
    if a.strip():
        assert chrf(a, a) == pytest.approx(1)
    words_a, words_b = words_of(a), words_of(b)
    assert shared_words(words_a, words_b) == shared_words(words_b, words_a)
    assert 0 <= shared_words(words_a, words_b) <= 1
