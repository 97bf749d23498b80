"""A step recorded once and replayed: the card is not kept waiting for the host.

In: a decoder and batches of few shapes. Out: the same losses and gradients. A small micro-batch takes
the host longer to launch than the card to compute; replayed as one graph it costs one launch. The
first two times of a shape run plainly (they compile), the third is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graftwork.train.gpu.decoder import Decoder, Packed

PLAIN_RUNS = 2


@dataclass(frozen=True)
class Recording:
    graph: Any
    x: Tensor
    packed: Packed
    scale: Tensor
    loss: Tensor


class Captured:
    """Stands in for the decoder where there is a card. Gradients live in fixed places from the start."""

    def __init__(self, decoder: Decoder, parameters: Sequence[Tensor]) -> None:
        self.decoder = decoder
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._runs: dict[Any, int] = {}
        self._recordings: dict[Any, Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def learn(
        self, x: Tensor, packed: Packed, scale: Tensor, pulse: Callable[[], None] = lambda: None
    ) -> Tensor:
        shape = _shape_of(x, packed)
        if shape not in self._recordings:
            seen = self._runs.get(shape, 0)
            self._runs[shape] = seen + 1
            if seen < PLAIN_RUNS:
                return self.decoder.learn(x, packed, scale, pulse)
            self._recordings[shape] = self._record(x, packed, scale)
        recording = self._recordings[shape]
        _copy_into(recording, x, packed, scale)
        recording.graph.replay()
        pulse()
        return recording.loss.clone()

    def _record(self, x: Tensor, packed: Packed, scale: Tensor) -> Recording:
        """Recording computes nothing: gradients stay what they are until the first replay."""
        still = Packed(
            positions=packed.positions.clone(),
            documents=replace(packed.documents, starts=packed.documents.starts.clone()),
            predicts=packed.predicts.clone(),
            targets=packed.targets.clone(),
        )
        x, scale = x.clone(), scale.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            loss = self.decoder.learn(x, still, scale)
        return Recording(graph, x, still, scale, loss)


def _shape_of(x: Tensor, packed: Packed) -> Any:
    documents = packed.documents
    even = documents.lengths if documents.even else (documents.longest,)
    return tuple(x.shape), even, documents.starts.shape[0], packed.predicts.shape[0]


def _copy_into(recording: Recording, x: Tensor, packed: Packed, scale: Tensor) -> None:
    recording.x.copy_(x)
    recording.scale.copy_(scale)
    recording.packed.positions.copy_(packed.positions)
    recording.packed.documents.starts.copy_(packed.documents.starts)
    recording.packed.predicts.copy_(packed.predicts)
    recording.packed.targets.copy_(packed.targets)
