"""Combines LoRA adapters of one base into one: average, linear, TIES, DARE. Pure, without torch.

Input: for each adapter its pairs of factors with their scales, and a weight. Output: pairs of one adapter,
scale 1. `average` adds up what the adapters change and keeps the best approximation of the given rank; the
others combine the factors themselves, as PEFT's `add_weighted_adapter` does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]
MergeMethod = Literal["average", "linear", "ties", "dare", "dare_ties"]
METHODS: tuple[MergeMethod, ...] = ("average", "linear", "ties", "dare", "dare_ties")
DrawMask = Callable[[tuple[int, ...]], Array]
"""Ones where a value is kept, zeros elsewhere."""


class LoraPair(NamedTuple):
    """What one adapter adds to one layer: scale · b · a."""

    a: Array
    b: Array
    scale: float = 1.0


class CombinedPair(NamedTuple):
    a: Array
    b: Array
    kept: float
    """Share of the target that the rank captures, by squared length."""


def mask_source(density: float, seed: int) -> DrawMask:
    """Random masks that keep a share of the values."""
    chance = np.random.default_rng(seed)
    return lambda shape: (chance.random(shape) < density).astype(np.float32)


def combine_pairs(
    pairs: Sequence[LoraPair],
    weights: Sequence[float],
    *,
    method: MergeMethod,
    rank: int,
    density: float,
    draw: DrawMask,
) -> CombinedPair:
    """The pair of one layer. All methods but `average` need pairs of one rank, and give that rank."""
    if method == "average":
        return _average(pairs, weights, rank)
    strength = [math.sqrt(weight * pair.scale) for weight, pair in zip(weights, pairs, strict=True)]
    a = _combine([pair.a for pair in pairs], strength, method, density, draw)
    b = _combine([pair.b for pair in pairs], strength, method, density, draw)
    return CombinedPair(a, b, 1.0)


def _average(pairs: Sequence[LoraPair], weights: Sequence[float], rank: int) -> CombinedPair:
    """The sum has the combined rank: its singular values follow from two small triangular matrices."""
    stacked_b = np.concatenate([w * p.scale * p.b for w, p in zip(weights, pairs, strict=True)], axis=1)
    stacked_a = np.concatenate([pair.a for pair in pairs], axis=0)
    q_b, r_b = np.linalg.qr(stacked_b.astype(np.float64))
    q_a, r_a = np.linalg.qr(stacked_a.T.astype(np.float64))
    u, values, v = np.linalg.svd(r_b @ r_a.T)
    total = float((values**2).sum())
    components = min(rank, len(values))
    b = (q_b @ u[:, :components] * values[:components]).astype(np.float32)
    a = (v[:components] @ q_a.T).astype(np.float32)
    # A layer narrower than the rank has fewer directions.
    a, b = np.pad(a, ((0, rank - components), (0, 0))), np.pad(b, ((0, 0), (0, rank - components)))
    return CombinedPair(a, b, float((values[:rank] ** 2).sum()) / total if total else 1.0)


def _combine(
    tensors: Sequence[Array], strength: Sequence[float], method: MergeMethod, density: float, draw: DrawMask
) -> Array:
    if method == "ties":
        tensors = [_largest(tensor, density) for tensor in tensors]
    elif method in ("dare", "dare_ties"):
        tensors = [tensor * draw(tensor.shape) / np.float32(density) for tensor in tensors]
    stacked = np.stack(tensors)
    weighted = stacked * np.asarray(strength, dtype=np.float32).reshape(-1, *(1,) * (stacked.ndim - 1))
    if method in ("linear", "dare"):
        return np.asarray(weighted.sum(axis=0), dtype=np.float32)
    # The sign that has more weight wins; what points the other way is left out of the mean.
    agrees = np.sign(stacked) == np.where(stacked.sum(axis=0) >= 0, 1.0, -1.0)
    return np.asarray((weighted * agrees).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1), dtype=np.float32)


def _largest(tensor: Array, density: float) -> Array:
    """Only the largest values stay."""
    count = int(density * tensor.size)
    flat = np.abs(tensor).reshape(-1)
    mask = np.zeros(tensor.size, dtype=np.float32)
    if count:
        mask[np.argpartition(-flat, count - 1)[:count]] = 1
    return tensor * mask.reshape(tensor.shape)


def combine(
    adapters: Sequence[Mapping[str, LoraPair]],
    weights: Sequence[float],
    *,
    method: MergeMethod,
    rank: int,
    density: float,
    draw: DrawMask,
) -> dict[str, CombinedPair]:
    """By layer. All adapters have the same layers."""
    return {
        path: combine_pairs(
            [adapter[path] for adapter in adapters],
            weights,
            method=method,
            rank=rank,
            density=density,
            draw=draw,
        )
        for path in adapters[0]
    }
