"""A linear classifier over words: which model a prompt is for.

Input: texts with labels. Output: a `TextClassifier` with calibrated probabilities, which is unsure below its
threshold. Pure and deterministic; classifying a prompt takes well under a millisecond.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork.text.words import hash_terms, with_pairs

Array = npt.NDArray[np.float64]

BUCKETS = 1 << 14
"""Features are hashed into this many."""
MOST_CHARACTERS = 4000
"""Length limit: of a longer text, the first and the last half of this are read."""
PENALTIES = (1e-3, 1e-4, 1e-5)
"""Strengths of the L2 penalty that are tried."""
STEPS = 300
_WORD = re.compile(r"\w+")
_STEM = 5
_SCALES = np.geomspace(0.25, 64.0, 97)


class Prediction(NamedTuple):
    label: str | None
    """None if the classifier is unsure."""
    likeliest: str
    probability: float


@dataclass(frozen=True, slots=True)
class TextClassifier:
    labels: tuple[str, ...]
    weights: npt.NDArray[np.float32]
    """One row per bucket, one column per label."""
    bias: npt.NDArray[np.float32]
    scale: float = 1.0
    """Factor of the scores that makes the probabilities calibrated."""
    threshold: float = 0.0
    """Predictions with a lower probability are unsure."""

    def predict(self, text: str) -> Prediction:
        buckets, values = hash_features(text)
        scores = (values @ self.weights[buckets] + self.bias) * self.scale
        scores -= scores.max()
        chances = np.exp(scores)
        best = int(chances.argmax())
        probability = float(chances[best] / chances.sum())
        likeliest = self.labels[best]
        return Prediction(likeliest if probability >= self.threshold else None, likeliest, probability)


def hash_features(text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Buckets of words, pairs of words and word prefixes, with the values of a unit vector."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]} {text[-half:]}"
    tokens = _WORD.findall(text.lower())
    features = with_pairs(tokens)
    features += [f"^{word[:_STEM]}" for word in tokens if len(word) > _STEM]
    counts = hash_terms(features, BUCKETS)
    values = (1 + np.log(np.fromiter(counts.values(), float, len(counts)))).astype(np.float32)
    values /= max(float(np.linalg.norm(values)), 1.0)
    return np.fromiter(counts, np.int64, len(counts)), values


def train_classifier(
    texts: Sequence[str], labels: Sequence[str], *, check_texts: Sequence[str], check_labels: Sequence[str]
) -> TextClassifier:
    """Fit the weights to `texts`; the penalty and the calibration to `check_texts`, which it has not seen."""
    names = tuple(sorted(set(labels)))
    if len(names) < 2:
        raise ValueError("a classifier needs at least two labels")
    features, unseen = _Features.of(texts), _Features.of(check_texts)
    truth = np.array([names.index(label) for label in labels])
    checkable = [index for index, label in enumerate(check_labels) if label in names]
    check = np.array([names.index(check_labels[index]) for index in checkable], dtype=int)
    best: tuple[float, TextClassifier] | None = None
    for penalty in PENALTIES if checkable else PENALTIES[1:2]:
        weights, bias = _fit(features, truth, labels=len(names), penalty=penalty)
        scores = unseen.multiply(weights)[checkable] + bias
        scale, loss = _calibrate(scores, check)
        if best is None or loss < best[0]:
            fitted = TextClassifier(names, weights.astype(np.float32), bias.astype(np.float32), scale)
            best = loss, fitted
    assert best is not None
    return best[1]


def set_threshold(
    classifier: TextClassifier, predictions: Sequence[tuple[Prediction, str]], *, target: float
) -> TextClassifier:
    """The lowest threshold at which confident predictions are correct at the rate of `target`.

    It is never below the middle between a guess and certainty: a text of unknown words is near a guess.
    """
    ranked = sorted(predictions, key=lambda pair: -pair[0].probability)
    threshold, right = 1.0, 0
    for rank, (prediction, truth) in enumerate(ranked, 1):
        right += prediction.likeliest == truth
        tied = rank < len(ranked) and ranked[rank][0].probability == prediction.probability
        if not tied and right >= target * rank:
            # Where all of them together reach the target, none has to be unsure.
            threshold = prediction.probability if rank < len(ranked) else 0.0
    lowest = (1 + 1 / len(classifier.labels)) / 2
    return replace(classifier, threshold=max(threshold, lowest))


class _Features(NamedTuple):
    """Feature vectors of many texts, one after the other."""

    rows: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.int64]
    values: Array
    texts: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> "_Features":
        hashed = [hash_features(text) for text in texts]
        none: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] = (
            np.zeros(0, int),
            np.zeros(0, np.float32),
        )
        return cls(
            np.repeat(np.arange(len(hashed)), [len(buckets) for buckets, _ in hashed] or 0),
            np.concatenate([buckets for buckets, _ in (*hashed, none)]),
            np.concatenate([values for _, values in (*hashed, none)]).astype(float),
            len(hashed),
        )

    def multiply(self, weights: Array) -> Array:
        products = self.values[:, None] * weights[self.buckets]
        columns = [np.bincount(self.rows, column, minlength=self.texts) for column in products.T]
        return np.column_stack(columns)

    def multiply_transposed(self, errors: Array, *, buckets: int) -> Array:
        products = self.values[:, None] * errors[self.rows]
        columns = [np.bincount(self.buckets, column, minlength=buckets) for column in products.T]
        return np.column_stack(columns)


def _fit(
    features: _Features, truth: npt.NDArray[np.int64], *, labels: int, penalty: float
) -> tuple[Array, Array]:
    """Softmax regression by accelerated gradient descent. Vectors of length one bound its curvature."""
    used, renamed = np.unique(features.buckets, return_inverse=True)
    features = features._replace(buckets=renamed)
    target = np.eye(labels)[truth] / features.texts
    # The bias is one more feature of value one, so vectors have length √2 and the curvature is at most 1.
    rate = 1 / (1 + penalty)
    weights, bias = np.zeros((len(used), labels)), np.zeros(labels)
    ahead, ahead_bias, momentum = weights, bias, 1.0
    for _ in range(STEPS):
        errors = _softmax(features.multiply(ahead) + ahead_bias) / features.texts - target
        new = ahead - rate * (features.multiply_transposed(errors, buckets=len(used)) + penalty * ahead)
        new_bias = ahead_bias - rate * errors.sum(0)
        grown = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / grown * (new - weights)
        ahead_bias = new_bias + (momentum - 1) / grown * (new_bias - bias)
        weights, bias, momentum = new, new_bias, grown
    everything = np.zeros((BUCKETS, labels))
    everything[used] = weights
    return everything, bias


def _softmax(scores: Array) -> Array:
    chances = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(chances / chances.sum(1, keepdims=True))


def _calibrate(scores: Array, truth: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The scale with the smallest loss on texts that the weights were not fitted to, and that loss.

    As if every label had one more text of another one (Platt, 1999): a few right predictions do not prove
    that all are right.
    """
    count, labels = scores.shape
    if not count:
        return 1.0, 0.0
    target = np.full((count, labels), 1 / (count + labels))
    target[np.arange(count), truth] = (count + 1) / (count + labels)
    losses = [-float((target * np.log(_softmax(scores * s) + 1e-12)).sum(1).mean()) for s in _SCALES]
    best = int(np.argmin(losses))
    return float(_SCALES[best]), losses[best]
