"""Which live prompts differ from the training data.

Input: prompts of the training rows, of held-out rows and of live traffic. Output: for each live prompt the
nearest training prompt and how rare such a distance is among held-out prompts, which are of the same origin
as the training rows and share no question with them. Pure; memory is bounded by the samples that are taken.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork.text.words import hash_terms, with_pairs, words

DIMENSIONS = 4096
MOST_TRAINING, MOST_HELD_OUT = 4000, 1000
FEWEST_HELD_OUT = 5
RARE = 0.05
"""Live prompts that are farther from the training data than this share of held-out prompts are unlike it."""

Vectors = npt.NDArray[np.float32]


class NearestPrompt(NamedTuple):
    """`place` is that of the nearest training prompt."""

    place: int
    similarity: float
    unlike: bool


def expected_share(held_out: int) -> float:
    """The share of prompts that count as different without any drift."""
    return max(RARE, 1 / (held_out + 1))


def compare_prompts(
    training: Sequence[str], held_out: Sequence[str], live: Sequence[str]
) -> list[NearestPrompt]:
    """Find the nearest training prompt of each live one. Needs FEWEST_HELD_OUT held-out prompts."""
    sample = thin_out(len(training), MOST_TRAINING)
    terms = [_count_terms(training[index]) for index in sample]
    # Rare terms weigh more; terms that all prompts share, such as instructions, weigh little.
    occurs = np.zeros(DIMENSIONS)
    for counts in terms:
        occurs[list(counts)] += 1
    weights: Vectors = np.log((1 + len(terms)) / (1 + occurs)).astype(np.float32) + np.float32(0.01)
    vectors = _to_vectors(terms, weights)
    compared = [_count_terms(held_out[index]) for index in thin_out(len(held_out), MOST_HELD_OUT)]
    usual = np.sort(_nearest(_to_vectors(compared, weights), vectors)[1])
    nearest, similarities = _nearest(_to_vectors([_count_terms(text) for text in live], weights), vectors)
    # A conformal p value: exact for any number of held-out prompts if live ones are like them.
    p = (1 + np.searchsorted(usual, similarities + 1e-6)) / (len(usual) + 1)
    limit = expected_share(len(usual))
    return [
        NearestPrompt(sample[row], float(similarity), bool(value <= limit + 1e-9))
        for row, similarity, value in zip(nearest.tolist(), similarities, p, strict=True)
    ]


def thin_out(texts: int, most: int) -> range:
    """The positions of at most `most` of this many texts, at even distances."""
    return range(0, texts, max(1, math.ceil(texts / most)))


def _count_terms(text: str) -> dict[int, float]:
    """Words and pairs of words, hashed, with damped counts."""
    hashed = hash_terms(with_pairs(words(text)), DIMENSIONS)
    return {term: 1 + math.log(count) for term, count in hashed.items()}


def _to_vectors(counted: Sequence[dict[int, float]], weights: Vectors) -> Vectors:
    vectors = np.zeros((len(counted), DIMENSIONS), dtype=np.float32)
    for row, counts in enumerate(counted):
        vectors[row, list(counts)] = list(counts.values())
    vectors *= weights
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return scaled


def _nearest(vectors: Vectors, references: Vectors) -> "tuple[npt.NDArray[np.int64], Vectors]":
    similarity = vectors @ references.T
    nearest = similarity.argmax(axis=1)
    return nearest, similarity[np.arange(len(vectors)), nearest]
