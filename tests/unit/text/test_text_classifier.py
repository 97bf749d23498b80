"""A classifier of prompts: what it learns, when it is unsure, and that it always answers the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.classifier import (
    BUCKETS,
    MOST_CHARACTERS,
    Prediction,
    TextClassifier,
    hash_features,
    set_threshold,
    train_classifier,
)

SUBJECTS = {
    "storage": ["disk", "file", "archive", "folder"],
    "network": ["socket", "peer", "timeout", "packet"],
    "people": ["user", "question", "complaint", "answer"],
}


def questions(numbers):
    texts, labels = [], []
    for label, nouns in SUBJECTS.items():
        for number in numbers:
            noun = nouns[number % len(nouns)]
            texts.append(f"What do you do when the {noun} number {number} is late?")
            labels.append(label)
    return texts, labels


@pytest.fixture(scope="module")
def classifier():
    texts, labels = questions(range(40))
    held, truth = questions(range(40, 60))
    return train_classifier(texts, labels, check_texts=held, check_labels=truth)


def test_held_out_questions_get_their_label(classifier):
    texts, labels = questions(range(60, 90))
    assert [classifier.predict(text).likeliest for text in texts] == labels


def test_a_text_without_known_words_is_unsure(classifier):
    cautious = set_threshold(classifier, [], target=0.95)
    assert cautious.threshold == 1.0
    sure = set_threshold(
        classifier,
        [(classifier.predict(t), label) for t, label in zip(*questions(range(9)), strict=True)],
        target=0.95,
    )
    assert sure.predict("Quelle heure est-il?").label is None
    assert sure.predict("").label is None
    assert sure.predict("Where does the archive go, to which folder?").label == "storage"


def test_training_twice_gives_the_same_weights(classifier):
    texts, labels = questions(range(40))
    held, truth = questions(range(40, 60))
    again = train_classifier(texts, labels, check_texts=held, check_labels=truth)
    assert np.array_equal(again.weights, classifier.weights)
    assert again.scale == classifier.scale


def test_a_perfect_validation_does_not_make_it_certain(classifier):
    held, _ = questions(range(40, 60))
    assert max(classifier.predict(text).probability for text in held) < 1.0


def test_one_label_is_refused():
    with pytest.raises(ValueError, match="two labels"):
        train_classifier(["a"], ["x"], check_texts=[], check_labels=[])


@given(st.text())
def test_features_of_any_text_are_a_unit_vector_in_range(text):
    buckets, values = hash_features(text)
    assert len(buckets) == len(set(buckets.tolist())) == len(values)
    assert all(0 <= bucket < BUCKETS for bucket in buckets)
    assert not len(values) or np.linalg.norm(values) == pytest.approx(1, abs=1e-5)


def test_a_huge_text_is_read_at_both_ends_only():
    start, end = (
        hash_features("alpha " + "x" * 10 * MOST_CHARACTERS + " omega")[0],
        hash_features("alpha omega")[0],
    )
    assert set(hash_features("alpha")[0]) <= set(start)
    assert set(hash_features("omega")[0]) <= set(start) & set(end)


chances = st.floats(0.01, 1.0)


@given(st.lists(st.tuples(chances, st.booleans()), max_size=40), st.floats(0.5, 1.0))
def test_predictions_above_the_threshold_reach_the_target(drawn, target):
    empty = TextClassifier(("a", "b"), np.zeros((BUCKETS, 2), np.float32), np.zeros(2, np.float32))
    judged = [(Prediction("a", "a", chance), "a" if right else "b") for chance, right in drawn]
    threshold = set_threshold(empty, judged, target=target).threshold
    assert 0.75 <= threshold <= 1.0
    sure = [(p, truth) for p, truth in judged if p.probability >= threshold]
    reached = sum(p.likeliest == truth for p, truth in sure) >= target * len(sure)
    # Where no threshold reaches it, only predictions that state certainty are left.
    assert reached or threshold in (0.75, 1.0)
