"""Which live prompts are unlike the training data.

In: prompts of the training rows, of held-out rows and of live traffic. Out: for each live prompt the nearest
training prompt and how rare such a distance is among held-out prompts, which are of the same origin as the
training rows and share no question with them. Pure; memory is bounded by the samples that are taken.
"""

import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graftwork.text.words import words

DIMENSIONS = 4096
MOST_TRAINING, MOST_HELD_OUT = 4000, 1000
FEWEST_HELD_OUT = 5
RARE = 0.05
"""Live prompts that are farther from the training data than this share of held-out prompts are unlike it."""

Vectors = npt.NDArray[np.float32]


class NearestPrompt(NamedTuple):
    """`place` is that of the nearest training prompt; `p` the share of held-out prompts that are as far."""

    place: int
    similarity: float
    p: float
    unlike: bool


def expected_share(held_out: int) -> float:
    """The share of prompts that counts as unlike without any drift."""
    return max(RARE, 1 / (held_out + 1))


def compare_prompts(
    training: Sequence[str], held_out: Sequence[str], live: Sequence[str]
) -> list[NearestPrompt]:
    """Find the nearest training prompt of each live one. Needs FEWEST_HELD_OUT held-out prompts."""
    known = thin_out(training, MOST_TRAINING)
    counted = [_count(text) for text in known.texts]
    weights = _weigh(counted)
    vectors = _to_vectors(counted, weights)
    apart = thin_out(held_out, MOST_HELD_OUT).texts
    usual = np.sort(_nearest(_to_vectors([_count(text) for text in apart], weights), vectors)[1])
    places, similarities = _nearest(_to_vectors([_count(text) for text in live], weights), vectors)
    # A conformal p value: exact for any number of held-out prompts if live ones are like them.
    p = (1 + np.searchsorted(usual, similarities + 1e-6)) / (len(usual) + 1)
    limit = expected_share(len(usual))
    return [
        NearestPrompt(known.places[place], float(similarity), float(value), bool(value <= limit + 1e-9))
        for place, similarity, value in zip(places.tolist(), similarities, p, strict=True)
    ]


class ThinnedPrompts(NamedTuple):
    texts: list[str]
    places: list[int]


def thin_out(texts: Sequence[str], most: int) -> ThinnedPrompts:
    """Take at most `most` texts at even distances."""
    step = max(1, math.ceil(len(texts) / most))
    places = list(range(0, len(texts), step))
    return ThinnedPrompts([texts[place] for place in places], places)


def _count(text: str) -> dict[int, float]:
    """Words and pairs of words, hashed, with damped counts."""
    found = words(text)
    counts: dict[int, int] = {}
    for term in (*found, *(f"{one} {two}" for one, two in pairwise(found))):
        key = zlib.crc32(term.encode()) % DIMENSIONS
        counts[key] = counts.get(key, 0) + 1
    return {key: 1 + math.log(count) for key, count in counts.items()}


def _weigh(counted: Sequence[dict[int, float]]) -> Vectors:
    """Rare terms weigh more; terms that all prompts share, such as instructions, weigh little."""
    occurs = np.zeros(DIMENSIONS)
    for counts in counted:
        occurs[list(counts)] += 1
    weights: Vectors = np.log((1 + len(counted)) / (1 + occurs)).astype(np.float32) + np.float32(0.01)
    return weights


def _to_vectors(counted: Sequence[dict[int, float]], weights: Vectors) -> Vectors:
    vectors = np.zeros((len(counted), DIMENSIONS), dtype=np.float32)
    for row, counts in enumerate(counted):
        vectors[row, list(counts)] = list(counts.values())
    vectors *= weights
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return scaled


def _nearest(vectors: Vectors, known: Vectors) -> "tuple[npt.NDArray[np.int64], Vectors]":
    similarity = vectors @ known.T
    places = similarity.argmax(axis=1)
    return places, similarity[np.arange(len(vectors)), places]
